"""A cost model whose predictions can be calculated by hand in tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from alignedserve.scheduler.cost.step import ChunkShape, StepCost


class LinearStepCost(StepCost):
    """The time of a pass is linear in prompt tokens, decode requests, KV tokens, and the longest prefix length."""

    def __init__(
        self,
        base_s: float = 5e-3,
        prompt_token_s: float = 5e-5,
        decode_s: float = 2e-5,
        kv_token_s: float = 5e-8,
        longest_token_s: float = 2e-7,
    ) -> None:
        self._weights = base_s, prompt_token_s, decode_s, kv_token_s, longest_token_s

    def step_s(self, chunks: Sequence[ChunkShape], lengths: Sequence[int]) -> float:
        if not chunks and not lengths:
            return 0.0
        prompt = sum(chunk.tokens for chunk in chunks)
        cached = sum(chunk.cached_tokens for chunk in chunks)
        return self._seconds(prompt, len(lengths), cached + sum(lengths), max(lengths, default=0))

    def run_s(self, lengths: Sequence[int], steps: int) -> list[float]:
        count, total, longest = len(lengths), sum(lengths), max(lengths)
        return [self._seconds(0, count, total + count * step, longest + step) for step in range(steps)]

    def balanced_step_s(self, chunks: Sequence[ChunkShape], lengths: Sequence[int]) -> float:
        return (
            self.step_s(chunks, [sum(lengths) // len(lengths)] * len(lengths)) if lengths else self.step_s(chunks, ())
        )

    def balanced_run_s(self, lengths: Sequence[int], steps: int) -> list[float]:
        count, mean = len(lengths), sum(lengths) // len(lengths)
        return [self._seconds(0, count, count * (mean + step), mean + step) for step in range(steps)]

    def describe(self) -> dict[str, Any]:
        return {"name": "linear", "weights": list(self._weights)}

    def _seconds(self, prompt: int, decodes: int, kv_tokens: int, longest: int) -> float:
        base_s, prompt_s, decode_s, kv_s, longest_s = self._weights
        return base_s + prompt_s * prompt + decode_s * decodes + kv_s * kv_tokens + longest_s * longest
