"""Trains the model that is shipped with the package.

From the repository's root::

    python -m tools.tiny_model.train --minutes 50 --output src/alignedserve/models/tiny
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from tools.tiny_model import attention
from tools.tiny_model.chat import END_OF_TEXT, END_OF_TURN, PADDING, chat_samples
from tools.tiny_model.corpus import Document, collect_documents
from tools.tiny_model.packing import TokenSource, evaluation_rows, training_batches
from tools.tiny_model.vocabulary import save_tokenizer, train_tokenizer

POSITIONS = 8192
WARM_UP_SHARE = 0.02
FINAL_RATE_SHARE = 0.05
WEIGHT_DECAY = 0.1
GRADIENT_NORM = 1.0
REPORT_EVERY_STEPS = 50
EVALUATION_ROW_TOKENS = 512
EVALUATION_ROWS = 64
TEMPERATURE = 0.3


@dataclass(frozen=True)
class Options:
    """The command-line options."""

    minutes: float
    output: Path
    seed: int
    peak_rate: float
    tokenizer: Path | None
    save_every_minutes: float


def model_config(tokenizer: Tokenizer) -> LlamaConfig:
    """Four million parameters: six layers, eight heads on four key heads, tied embeddings."""
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        initializer_range=0.04,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END_OF_TEXT),
        pad_token_id=tokenizer.token_to_id(PADDING),
    )


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up, then a cosine; `progress` runs from 0 to 1."""
    if progress < WARM_UP_SHARE:
        return peak * max(progress / WARM_UP_SHARE, 0.01)
    angle = math.pi * min((progress - WARM_UP_SHARE) / (1 - WARM_UP_SHARE), 1.0)
    share = FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * (1 + math.cos(angle)) / 2
    return peak * share


def loss_of(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Mean cross-entropy, in nats a token, of ids `[rows, row_tokens]`."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, rows: Tensor) -> float:
    """Mean loss over ids `[rows, row_tokens]`."""
    model.train(False)
    losses = [loss_of(model, part).item() * len(part) for part in torch.split(rows, 8)]
    model.train(True)
    return sum(losses) / len(rows)


def make_optimizers(model: LlamaForCausalLM, rate: float) -> list[Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms' weights."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed_tokens" not in name
        (matrices if is_matrix else others).append(parameter)
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return [muon, adamw]


def take_step(model: LlamaForCausalLM, optimizers: Sequence[Optimizer], ids: Tensor) -> float:
    """One update on ids `[rows, row_tokens]`. Returns the loss before it."""
    loss = loss_of(model, ids)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad(set_to_none=True)
    return loss.item()


def train(model: LlamaForCausalLM, source: TokenSource, options: Options) -> None:
    """Train until the time budget is spent."""
    optimizers = make_optimizers(model, options.peak_rate)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    start = last_save = time.monotonic()
    budget_s, save_every_s = options.minutes * 60, options.save_every_minutes * 60
    recent, tokens = 0.0, 0
    for step, ids in enumerate(training_batches(source), start=1):
        elapsed_s = time.monotonic() - start
        if elapsed_s >= budget_s:
            break
        for group in groups:
            group["lr"] = learning_rate(elapsed_s / budget_s, options.peak_rate)
        recent += take_step(model, optimizers, ids)
        tokens += ids.numel()
        if step % REPORT_EVERY_STEPS == 0:
            mean = recent / REPORT_EVERY_STEPS
            rate = tokens / elapsed_s
            line = f"{elapsed_s:7.0f} s  step {step}  loss {mean:.3f}  {rate:.0f} tokens/s"
            print(line, flush=True)
            recent = 0.0
        if time.monotonic() - last_save > save_every_s:
            save_model(model, options.output)
            last_save = time.monotonic()
    print(f"{step - 1} steps, {tokens} tokens, {budget_s / 60:.0f} minutes")


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Write the configurations, and the weights in bfloat16. `model` is unchanged."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = model.generation_config
    copy.bfloat16()
    copy.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)


def generation_config(tokenizer: Tokenizer) -> GenerationConfig:
    """Both end tokens stop generation. A low temperature avoids invented words."""
    return GenerationConfig(
        eos_token_id=[tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(END_OF_TURN)],
        pad_token_id=tokenizer.token_to_id(PADDING),
        do_sample=True,
        temperature=TEMPERATURE,
    )


def make_tokenizer(documents: Sequence[Document], options: Options) -> Tokenizer:
    """The tokenizer at `--tokenizer`, or a new one."""
    if options.tokenizer is not None:
        return Tokenizer.from_file(str(options.tokenizer))
    texts = [document.as_plain_text() for document in documents]
    chats = chat_samples(documents, random.Random(options.seed))
    return train_tokenizer([*texts, *chats])


def parse_options() -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="train the model that ships with the package")
    parser.add_argument("--minutes", type=float, default=50.0, help="time budget")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peak-rate", type=float, default=6e-3, help="highest learning rate")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json to keep")
    parser.add_argument("--save-every-minutes", type=float, default=10.0)
    return Options(**vars(parser.parse_args()))


def main() -> None:
    """Train tokenizer and model, write the folder, print the losses."""
    options = parse_options()
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    documents = collect_documents()
    training = [document for document in documents if not document.is_held_out]
    held_out = [document for document in documents if document.is_held_out]
    tokenizer = make_tokenizer(training, options)
    options.output.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, options.output, POSITIONS)
    model = LlamaForCausalLM(model_config(tokenizer))
    model.set_attn_implementation(attention.register())
    model.generation_config = generation_config(tokenizer)
    print(f"{len(training)} documents, {model.num_parameters()} parameters", flush=True)
    source = TokenSource(tokenizer, training, rng)
    train(model, source, options)
    save_model(model, options.output)
    for name, part in (("train", training), ("held-out", held_out)):
        rows = evaluation_rows(TokenSource(tokenizer, part, random.Random(0)), EVALUATION_ROW_TOKENS)
        print(f"{name} loss {evaluate(model, rows[:EVALUATION_ROWS]):.3f}", flush=True)


if __name__ == "__main__":
    main()
