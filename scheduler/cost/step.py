"""The contract of a step cost: how long one forward pass takes on one instance of given hardware, in seconds.

A pass may contain prompt chunks, decode requests, or both. Attention depends on the length of every request, by the
kernel mode (ADR 20):

    split_kv   the KV of all requests is split over thread blocks by work: t_mean + alpha (t_max - t_mean)
    no_split   a (request, head) job is one thread block's: the pass ends with its last job. Jobs are assigned to SMs as
               these become free, in the order of the batch, each reading at the bandwidth that one thread block reaches
    no_split_longest_first    the same with the longest jobs first, nearly the best order
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

KERNEL_MODES = ("split_kv", "no_split", "no_split_longest_first")


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """`tokens` prompt tokens that a pass computes, after `cached_tokens` of the prompt with cached KV."""

    tokens: int
    cached_tokens: int = 0


class StepCost(ABC):
    """Pure: the same arguments always give the same result, on every machine, to the last bit."""

    @abstractmethod
    def step_s(self, chunks: Sequence[ChunkShape], lengths: Sequence[int]) -> float:
        """Seconds of one pass: these prompt chunks, and one token each for requests with these prefix lengths.

        `lengths`: KV tokens of each decode request before the pass, without the one that it adds, in the order of the
        batch (which matters for `no_split` only). 0 if both are empty.
        """

    @property
    def rounds_of(self) -> int:
        """The stages of the instance whose decodes were measured: a decode pass is a round of as many lanes."""
        return 1

    def stages_s(self, chunks: Sequence[ChunkShape]) -> Sequence[float]:
        """Seconds of a pass of prompt chunks in each stage of the instance's pipeline, one after the other."""
        return (self.step_s(chunks, ()),)

    @abstractmethod
    def run_s(self, lengths: Sequence[int], steps: int) -> list[float]:
        """Seconds of each of the next `steps` decode passes without joins or departures.

        Equal, bit for bit, to `step_s((), ...)` for lengths that grow by one each time.
        """

    @abstractmethod
    def balanced_step_s(self, chunks: Sequence[ChunkShape], lengths: Sequence[int]) -> float:
        """The same pass if its decode requests read the same bytes at equal lengths.

        `step_s` minus this is the bubble.
        """

    def balanced_run_s(self, lengths: Sequence[int], steps: int) -> list[float]:
        """`balanced_step_s` of each of the passes of `run_s`, bit for bit.

        Subclasses should override it with a faster one.
        """
        return [self.balanced_step_s((), [length + step for length in lengths]) for step in range(steps)]

    def counted_s(self, requests: int, total: int, longest: int, shortest: int) -> float:
        """`step_s` of decodes of which only the number, sum, longest and shortest length are known.

        Here all but the longest and the shortest are taken as equal. Subclasses should override it with a faster one.
        """
        if requests < 3:
            return self.step_s((), [longest, shortest][:requests])
        # Not below 0: `SharedPool` weighs batches of so few that their sum is less than these two.
        others, more = divmod(max(0, total - longest - shortest), requests - 2)
        return self.step_s((), [longest, shortest, *[others + 1] * more, *[others] * (requests - 2 - more)])

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """For reports: name, kernel mode, source with its hash, and every option. JSON-serialisable."""
