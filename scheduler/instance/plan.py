"""The values that the decode worker and its iteration scheduler exchange at an iteration boundary."""

from __future__ import annotations

import math
from dataclasses import dataclass

from alignedserve.request import RequestKey
from alignedserve.scheduler.core.events import BufferKind


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request that waits, its copy complete, in a candidate buffer (or in the pool, where buffers are left out).

    `kv_tokens` tokens of KV; the first `shared_tokens` of them belong to the prompt that its group shares.
    `due_s`: of one that is past the starvation threshold, when its objective ends or ended; infinite for all others.
    It goes before density, the first due first. `wait_objective_s`: its own, 0 where it has none.
    """

    key: RequestKey
    kv_tokens: int
    max_total_tokens: int
    group_id: str
    shared_tokens: int
    buffer: BufferKind
    batch_id: int
    due_s: float = math.inf
    wait_objective_s: float = 0.0

    @property
    def overdue(self) -> bool:
        return self.due_s < math.inf


@dataclass(frozen=True, slots=True)
class Join:
    """Copy the candidate's KV into `block_ids` of the decode cache; enter the iteration once that has completed.

    The first `resident_blocks` of them already hold the KV (shared with a running request of the same group).
    """

    key: RequestKey
    block_ids: tuple[int, ...]
    resident_blocks: int


@dataclass(frozen=True, slots=True)
class Evict:
    """Copy the request's `block_ids` out: to the candidate requests buffer, or to the pool, back under the scheduler.

    The blocks stay owned until `copied_out`.
    """

    key: RequestKey
    block_ids: tuple[int, ...]
    kv_tokens: int
    to_pool: bool


@dataclass(frozen=True, slots=True)
class GiveBack:
    """The decode instance gives up a candidate that has not joined: it returns to the tree."""

    keys: tuple[RequestKey, ...]


@dataclass(slots=True)
class RunItem:
    """One request of the next iteration: computes position `kv_tokens`; `block_ids` cover `kv_tokens + 1` tokens.

    The iteration scheduler's own book: to be read only, and only until `advance`. A copy for each request and each
    iteration would be most of what a decision costs.
    """

    key: RequestKey
    kv_tokens: int
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class IterationPlan:
    joins: tuple[Join, ...]
    evictions: tuple[Evict, ...]
    give_back: GiveBack
    run: tuple[RunItem, ...]
    stalled: int  # running requests that had to sit this iteration out for want of a block
    switching: bool
    batch_id: int
