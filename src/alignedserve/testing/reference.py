"""What `transformers` itself generates: the truth that served tokens are compared with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of `folder` as `transformers` runs it by default."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    model.eval()
    return model


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: Sequence[int], new_tokens: int, guess: Sequence[int] = ()) -> list[int]:
    """`model.generate`, greedy, exactly `new_tokens` tokens (no end token ends it).

    A right `guess` of them costs one forward pass: it is right where each token has the largest logit after those
    before it.
    """
    if len(guess) == new_tokens and new_tokens:
        logits = model(torch.tensor([[*prompt, *guess[:-1]]])).logits[0, len(prompt) - 1 :]
        if logits.argmax(dim=-1).tolist() == list(guess):
            return list(guess)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    ids = torch.tensor([list(prompt)])
    output: torch.Tensor = model.generate(  # type: ignore[operator]  # transformers' own mixin, untyped
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, use_cache=True
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


@torch.inference_mode()
def logprobs(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """Natural-log probabilities `[len(tokens), vocab]` after each of `tokens`, from one full forward pass in fp32."""
    logits = model(torch.tensor([list(tokens)])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts of these lengths; ids from 2 on."""
    rng = random.Random(seed)
    return [[rng.randrange(2, vocab_size) for _ in range(length)] for length in lengths]
