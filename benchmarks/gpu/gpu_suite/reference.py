"""What `transformers` generates on the same device, and how our tokens differ from it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

LIKELY = 8
"""Of so many of the most likely tokens the error of their logits is looked at."""


@torch.inference_mode()
def greedy(model: Any, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """`model.generate` on the model's device, greedy, exactly `new_tokens` tokens (no end token ends it)."""
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
    """Of several answers. `before`: tokens before the first position whose best two logits lie within rounding.

    `same_before` of them are equal; `wrong` describes each answer that differs where they do not lie within rounding.
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
        """Of all tokens, those that come before a position within rounding."""
        return self.before / self.tokens

    def add(self, other: Agreement) -> None:
        for name in ("answers", "equal_answers", "tokens", "before", "same_before", "varied"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.wrong = [*(self.wrong or ()), *(other.wrong or ())]


def agreement(
    model: Any, prompts: Sequence[Sequence[int]], ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]
) -> Agreement:
    """Compare our answers with `transformers`' own, by its own logits along its own answer.

    In fp32 every position counts. In lower precision rounding is what `transformers` itself is off by there, against
    the same weights in fp32: two logits lie within it where they differ by at most twice the largest such error of the
    most likely tokens, since both computations may be off by as much.
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
    """At each position of the answer: how far the best two logits are apart, and by how much rounding moves them."""
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
    """fp32 `[answer tokens, vocab_size]`, from one pass over all."""
    ids = torch.tensor([[*prompt, *answer[:-1]]], device=model.device)
    found: torch.Tensor = model(ids).logits[0, len(prompt) - 1 :].float()
    return found
