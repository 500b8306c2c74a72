"""The contract of a step cost: how long one forward pass takes on one instance of given hardware, in seconds.

A pass may hold prompt chunks, decode requests, or both. Attention depends on the length of every request, by one of two
kernel modes (ADR 20):

    split_kv   the KV of all requests is split over thread blocks by work: t_mean + alpha (t_max - t_mean)
    no_split   a (request, head) job is one thread block's: the pass ends when the last job has, laid on the SMs as they
               become free, each reading at the bandwidth that one thread block reaches
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

KERNEL_MODES = ("split_kv", "no_split")


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """`tokens` of a prompt that a pass computes, behind `cached_tokens` of it whose KV is there."""

    tokens: int
    cached_tokens: int = 0


class StepCost(ABC):
    """Pure: the same question always has the same answer, on every machine, to the last bit."""

    @abstractmethod
    def step_s(self, chunks: Sequence[ChunkShape], lengths: Sequence[int]) -> float:
        """Seconds of one pass: these prompt chunks, and one token each for requests with these prefix lengths.

        `lengths`: KV tokens that each decode request has before the pass, without the one that it adds, in any order.
        Both empty: 0.
        """

    @abstractmethod
    def run_s(self, lengths: Sequence[int], steps: int) -> list[float]:
        """Seconds of each of the next `steps` decode passes in which nobody comes or goes.

        Bit for bit what `step_s((), ...)` says for lengths that are one longer each time.
        """

    @abstractmethod
    def balanced_step_s(self, chunks: Sequence[ChunkShape], lengths: Sequence[int]) -> float:
        """The same pass if its decode requests read the same bytes at equal lengths. `step_s` less this: the bubble."""

    def balanced_run_s(self, lengths: Sequence[int], steps: int) -> list[float]:
        """`balanced_step_s` of each of the passes of `run_s`, bit for bit. Worth writing faster than this."""
        return [self.balanced_step_s((), [length + step for length in lengths]) for step in range(steps)]

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """For reports: name, kernel mode, source with its hash, and every option. JSON."""
