"""The contract of a colocated instance's scheduler: which prompt chunks and which decodes the next pass holds.

The caller's loop, in the simulator as in a worker: `add` and `cancel` as requests come and go, `plan`, run the pass,
`done`. KV blocks are the allocator's, held under the request's key (`BlockAllocator.blocks_of`): from `plan` on they
cover every token that the pass computes. No scheduler learns a request's output length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.block_allocator import BlockAllocator

Options = Mapping[str, float | int | bool | str]


@dataclass(frozen=True, slots=True)
class MixedRequest:
    """What a scheduler knows of a request. `max_total_tokens`: prompt and the longest answer that it may ask for."""

    key: RequestKey
    arrival_s: float
    prompt_tokens: int
    max_total_tokens: int


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """Compute positions `cached_tokens .. cached_tokens + tokens - 1`; with `last` a token is sampled behind them.

    After a preemption the tokens that were generated already are computed again with the prompt.
    """

    key: RequestKey
    cached_tokens: int
    tokens: int
    last: bool


@dataclass(frozen=True, slots=True)
class PlannedDecode:
    """Compute position `kv_tokens`, behind as many tokens whose KV is there; a token is sampled."""

    key: RequestKey
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class MixedPlan:
    """One pass. `preempted`: lost their KV for it, and will be computed again. Empty: nothing can run now."""

    chunks: tuple[PlannedChunk, ...] = ()
    decodes: tuple[PlannedDecode, ...] = ()
    preempted: tuple[RequestKey, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.chunks or self.decodes)

    def keys(self) -> list[RequestKey]:
        """Of all requests in the pass."""
        return [decode.key for decode in self.decodes] + [chunk.key for chunk in self.chunks]

    def sampling(self) -> list[RequestKey]:
        """Of those that get a token."""
        return [decode.key for decode in self.decodes] + [chunk.key for chunk in self.chunks if chunk.last]


class InstanceScheduler(ABC):
    """Called from one thread. Pure decisions: no I/O, no clock."""

    OPTIONS: ClassVar[Options] = {}
    """Of a scheduler of one's own: its options, with their defaults."""

    @abstractmethod
    def __init__(self, options: Options, allocator: BlockAllocator, block_size: int) -> None:
        """Empty. `allocator`: the instance's whole cache, used by nobody else."""

    @property
    def depth(self) -> int:
        """Passes that may be planned before the first of them is `done`, at least 1."""
        return 1

    @property
    def stages(self) -> int:
        """Stages of the pipeline that a pass goes through, one behind the other, at least 1."""
        return 1

    @abstractmethod
    def add(self, request: MixedRequest) -> None:
        """A request waits. Its prompt and one token fit in the cache. Raises AccountingError for one that is here."""

    @abstractmethod
    def cancel(self, key: RequestKey) -> bool:
        """The request is gone, and its blocks are free. False where it was not here."""

    @abstractmethod
    def plan(self, now_s: float) -> MixedPlan:
        """The next pass. A request is in one pass at a time, but for those that the scheduler plans ahead."""

    @abstractmethod
    def done(self, plan: MixedPlan, finished: Collection[RequestKey]) -> None:
        """The pass has run, the oldest that was not done; those `finished` sampled their last token and are gone."""

    @abstractmethod
    def load(self) -> tuple[int, int]:
        """(requests, tokens still to be computed of prompts) here, for routing between instances."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raises AccountingError where requests and blocks do not match."""

    def quiet_passes(self, plan: MixedPlan) -> int:
        """How many passes like `plan`, the next one included, follow if nobody comes or ends. 0: not known."""
        return 0

    def repeat(self, plan: MixedPlan, passes: int) -> None:
        """As many `plan` and `done` as `passes`, at most `quiet_passes(plan)`, with nobody finished.

        Never called where `quiet_passes` says 0: who does not override one need not override the other.
        """
        raise NotImplementedError
