"""The contract of a colocated instance's scheduler: which prompt chunks and decodes the next pass contains.

The caller's loop is the same in the simulator and in a worker: `add` and `cancel` as requests come and go, `plan`, run
the pass, `done`. The allocator owns the KV blocks, held under the request's key (`BlockAllocator.blocks_of`). From
`plan` on they cover every token that the pass computes. No scheduler knows a request's output length.
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
    """What a scheduler knows of a request.

    `max_total_tokens`: the prompt and the longest answer that it may ask for. Where the whole file is analysed first:
    `turn`, the place of its group of prompts in the order of the file, and `shared_tokens`, which the prompts of the
    group have in common, less than any of them has.
    """

    key: RequestKey
    arrival_s: float
    prompt_tokens: int
    max_total_tokens: int
    turn: int = 0
    shared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """Compute positions `cached_tokens .. cached_tokens + tokens - 1`. With `last`, a token is sampled after them.

    After a preemption the tokens that were already generated are computed again with the prompt.
    """

    key: RequestKey
    cached_tokens: int
    tokens: int
    last: bool


@dataclass(frozen=True, slots=True)
class PlannedDecode:
    """Compute position `kv_tokens` and sample a token. The KV of the `kv_tokens` tokens before it is cached."""

    key: RequestKey
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class MixedPlan:
    """One pass. `preempted`: requests that lost their KV for it and will be recomputed. Empty: nothing can run now."""

    chunks: tuple[PlannedChunk, ...] = ()
    decodes: tuple[PlannedDecode, ...] = ()
    preempted: tuple[RequestKey, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.chunks or self.decodes)

    def keys(self) -> list[RequestKey]:
        """All requests in the pass."""
        return [decode.key for decode in self.decodes] + [chunk.key for chunk in self.chunks]

    def sampling(self) -> list[RequestKey]:
        """The requests that get a token."""
        return [decode.key for decode in self.decodes] + [chunk.key for chunk in self.chunks if chunk.last]


class InstanceScheduler(ABC):
    """Called from one thread. Makes pure decisions: no I/O, no clock."""

    OPTIONS: ClassVar[Options] = {}
    """Options of a user-defined scheduler, with their defaults."""

    WHOLE_FILE: ClassVar[bool] = False
    """The prompts of the whole file are grouped by prefix before the first is added."""

    hit_tokens: int = 0
    """Tokens of prompts that another prompt had computed when they began."""

    @abstractmethod
    def __init__(self, options: Options, allocator: BlockAllocator, block_size: int) -> None:
        """Create an empty scheduler. `allocator`: the instance's whole cache, used by this scheduler only."""

    @property
    def depth(self) -> int:
        """Number of passes that may be planned before the first of them is `done`; at least 1."""
        return 1

    @property
    def stages(self) -> int:
        """Number of consecutive pipeline stages that a pass goes through; at least 1."""
        return 1

    @abstractmethod
    def add(self, request: MixedRequest) -> None:
        """Queue a request whose prompt and one token fit in the cache. Raises AccountingError if it is already here."""

    @abstractmethod
    def cancel(self, key: RequestKey) -> bool:
        """Remove the request and free its blocks. Returns False if it was not here."""

    @abstractmethod
    def plan(self, now_s: float) -> MixedPlan:
        """The next pass. A request is in one pass at a time, unless the scheduler plans ahead."""

    @abstractmethod
    def done(self, plan: MixedPlan, finished: Collection[RequestKey]) -> None:
        """The oldest planned pass has run. The `finished` requests sampled their last token and are removed."""

    @abstractmethod
    def load(self) -> tuple[int, int]:
        """(requests, prompt tokens still to be computed), for routing between instances."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raises AccountingError if requests and blocks do not match."""

    def quiet_passes(self, plan: MixedPlan) -> int:
        """How many passes like `plan`, including the next, follow if no request arrives or ends. 0: not known."""
        return 0

    def repeat(self, plan: MixedPlan, passes: int) -> None:
        """Same as `passes` times `plan` and `done` with no request finished; at most `quiet_passes(plan)`.

        Never called if `quiet_passes` returns 0: a scheduler that does not override `quiet_passes` need not override
        this.
        """
        raise TypeError(f"{type(self).__name__} overrides quiet_passes, so it must also override repeat")
