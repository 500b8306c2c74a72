"""The values that the decode worker and its iteration scheduler exchange at an iteration boundary."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.resident import BlockChain
from alignedserve.scheduler.priorities import BACKGROUND


class BufferKind(enum.IntEnum):
    """The two candidate buffers of a prefill instance (paper, section 3.4)."""

    BATCH = 1
    REQUESTS = 2


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request whose copy is complete in a candidate buffer (or in the pool, if buffers are bypassed).

    It has `kv_tokens` tokens of KV. `chain`: full blocks of them that others may share; None: none. `due_s`: past
    the starvation threshold, the end of its wait objective; else infinite. Overdue requests take priority over density,
    earliest deadline first. `wait_objective_s`: its own, or 0. `evictions`: how often it was evicted before.
    `rank`: of its priority.
    """

    key: RequestKey
    kv_tokens: int
    max_total_tokens: int
    chain: BlockChain | None
    buffer: BufferKind
    batch_id: int
    due_s: float = math.inf
    wait_objective_s: float = 0.0
    evictions: int = 0
    rank: int = 0

    @property
    def background(self) -> bool:
        """It only takes what others leave."""
        return self.rank >= BACKGROUND

    @property
    def overdue(self) -> bool:
        return self.due_s < math.inf


class CancelOutcome(enum.Enum):
    """Where a cancelled request was. Only WAITING leaves work for the caller: tell the candidate's source."""

    NOT_HERE = "not_here"
    WAITING = "waiting"  # was a candidate, and was removed
    RUNNING = "running"  # its blocks are free now
    COPYING = "copying"  # its blocks are free when the copy in flight has ended


@dataclass(frozen=True, slots=True)
class Join:
    """Copy the candidate's KV into `block_ids` of the decode cache; it enters the iteration after the copy.

    The first `resident_blocks` blocks already hold the KV, shared with a request that begins alike.
    """

    key: RequestKey
    block_ids: tuple[int, ...]
    resident_blocks: int


@dataclass(frozen=True, slots=True)
class Relocate:
    """Copy the request's blocks `source_ids` to `block_ids`, in the cache of another rank. It pauses meanwhile.

    `shared_blocks`: that it found there besides, as another request's. Both sides stay owned until `copied_in`.
    """

    key: RequestKey
    source_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    shared_blocks: int


@dataclass(frozen=True, slots=True)
class Evict:
    """Copy the request's `block_ids` out: to the candidate request buffer, or to the pool, back to the scheduler.

    The blocks stay owned until `copied_out`.
    """

    key: RequestKey
    block_ids: tuple[int, ...]
    kv_tokens: int
    to_pool: bool


@dataclass(frozen=True, slots=True)
class GiveBack:
    """The decode instance returns candidates that have not joined to the scheduler's waiting requests."""

    keys: tuple[RequestKey, ...]


@dataclass(slots=True)
class RunItem:
    """One request of the next iteration: computes position `kv_tokens`; `block_ids` cover `kv_tokens + 1` tokens.

    This is the iteration scheduler's own object: read it only, and only until `advance`. Copying every request in every
    iteration would dominate the cost of a decision.
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
    stalled: int  # running requests that skip this iteration for lack of a block
    switching: bool
    batch_id: int
    moves: tuple[Relocate, ...] = ()  # of requests that do not run in this iteration


@dataclass(frozen=True, slots=True)
class IterationStatus:
    """`running` includes requests whose copy in is in flight. Lengths are KV tokens, 0 if nothing runs.

    `batch_shortest_tokens`, `batch_longest_tokens`: of the requests that the running batch was formed from, without
    late joins. `max_running`: the most requests in an iteration; with a TPOT objective as many as ran when it last kept
    a candidate from joining, or more since. `held_iterations`: those after it did, until one joined. `moves`: from the
    cache of one rank to that of another.
    """

    running: int
    shortest_tokens: int
    longest_tokens: int
    batch_shortest_tokens: int
    batch_longest_tokens: int
    batch_id: int
    switching: bool
    batch_buffer_requests: int
    requests_buffer_requests: int
    iterations: int
    switch_iterations: int
    held_iterations: int
    evictions: int
    max_running: int
    moves: int = 0
