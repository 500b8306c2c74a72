"""Compares our tokens with those that `transformers` generates on the same device."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

LIKELY = 8
"""Number of most likely tokens whose logits are compared."""


@torch.inference_mode()
def greedy(model: Any, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """Exactly `new_tokens` greedy tokens of `model.generate`; end tokens are ignored."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    ids = torch.tensor([list(prompt)], device=model.device)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, use_cache=True
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


@dataclass(slots=True)
class Agreement:
    """How far several answers agree. A position is uncertain if its best two logits lie within the rounding error.

    `before` counts the tokens before each answer's first uncertain position, `same_before` the equal ones among them.
    `wrong` describes each answer that differs earlier.
    """

    answers: int = 0
    equal_answers: int = 0
    tokens: int = 0
    before: int = 0
    same_before: int = 0
    wrong: list[str] | None = None
    varied: int = 0

    @property
    def share(self) -> float:
        """The share of tokens before the first uncertain position of their answer."""
        return self.before / self.tokens

    def add(self, other: Agreement) -> None:
        for name in ("answers", "equal_answers", "tokens", "before", "same_before", "varied"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.wrong = [*(self.wrong or ()), *(other.wrong or ())]


def agreement(
    model: Any, prompts: Sequence[Sequence[int]], ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]
) -> Agreement:
    """Compare our answers with those of `transformers`, using its logits along its own answers.

    In fp32 every position counts. In lower precision the rounding error of a position is the largest difference of
    `transformers`' most likely logits from the same model in fp32. Two logits lie within it if they differ by at most
    twice that error, since both computations may have it.
    """
    exact = None if model.dtype == torch.float32 else copy.deepcopy(model).float()
    total = Agreement(wrong=[], varied=len({token for answer in theirs for token in answer}))
    for prompt, mine, expected in zip(prompts, ours, theirs, strict=True):
        gaps, errors = _gaps(model, exact, prompt, expected)
        close = next((at for at in range(len(expected)) if gaps[at] <= 2 * errors[at]), len(expected))
        differs = next((at for at, (a, b) in enumerate(zip(mine, expected, strict=False)) if a != b), None)
        if differs is None and len(mine) != len(expected):
            differs = min(len(mine), len(expected))
        total.answers += 1
        total.equal_answers += differs is None
        total.tokens += len(expected)
        total.before += close
        total.same_before += close if differs is None else min(close, differs)
        if differs is not None and differs < close:
            total.wrong = [
                *(total.wrong or ()),
                f"prompt of {len(prompt)}: token {differs} is {mine[differs : differs + 1]}, not {expected[differs]}; "
                f"gap {gaps[differs]:.2e}, rounding {errors[differs]:.2e}",
            ]
    return total


def _gaps(model: Any, exact: Any, prompt: Sequence[int], answer: Sequence[int]) -> tuple[list[float], list[float]]:
    """For each position of the answer: the difference of the best two logits, and the rounding error (-1 in fp32)."""
    logits = _logits(model, prompt, answer)
    best = logits.topk(min(LIKELY, logits.shape[-1]), dim=-1)
    gaps: list[float] = (best.values[:, 0] - best.values[:, 1]).tolist()
    if exact is None:
        return gaps, [-1.0] * len(gaps)
    right = _logits(exact, prompt, answer).gather(1, best.indices)
    errors: list[float] = (best.values - right).abs().amax(dim=-1).tolist()
    return gaps, errors


@torch.inference_mode()
def _logits(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """fp32 `[answer tokens, vocab_size]`, from one forward pass."""
    ids = torch.tensor([[*prompt, *answer[:-1]]], device=model.device)
    found: torch.Tensor = model(ids).logits[0, len(prompt) - 1 :].float()
    return found
