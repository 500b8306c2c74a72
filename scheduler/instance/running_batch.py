"""The requests that hold blocks of a decode cache, and the blocks that they hold.

    entering ──copy completed──► running ──evicted──► leaving ──copy completed──► (gone)
        └──copy failed──► (gone)    └──finished, cancelled──► (gone)   └──copy failed──► running

Leading blocks that several requests share are counted once: a joining request holds those that a member already has of
its chain (`resident.py`), together with it. What a request shares begins with its first block.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from operator import eq
from typing import NamedTuple, Protocol

from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.plan import BufferKind, Candidate, Join, RunItem
from alignedserve.scheduler.instance.resident import BlockChain, Resident, ResidentPrefixes
from alignedserve.scheduler.priorities import BACKGROUND

MOST_EVICTIONS = 2  # of a request, as long as others can be evicted that had fewer


class Phase(enum.IntEnum):
    ENTERING = 0  # its KV is being copied in
    RUNNING = 1
    LEAVING = 2  # its KV is being copied out


@dataclass(slots=True)
class RunningRequest(RunItem):
    """A request that holds blocks. `kv_tokens` have been computed; `block_ids` cover at least one token more."""

    max_total_tokens: int
    candidate: Candidate
    batch_id: int  # the candidate batch that it belongs to
    phase: Phase
    iterations: int = 0  # since it joined
    left_s: float = 0.0  # when it was evicted
    to_pool: bool = False  # evicted to the pool, not to the candidate request buffer
    cancelled: bool = False  # its blocks are freed when the copy in flight has ended
    resident: Resident | None = None  # its blocks that others may share

    @property
    def background(self) -> bool:
        """It only takes what others leave."""
        return self.candidate.rank >= BACKGROUND

    def fill(self) -> None:
        """The KV of all its tokens is in its blocks: others may share them."""
        if self.resident is not None:
            self.resident.filled = True

    def eviction_rank(self, batch_id: int) -> tuple[int, bool, bool, int]:
        """The greatest is evicted first: the highest rank of priorities, then the longest.

        Of one rank, those of other batches than `batch_id` go before. What was evicted MOST_EVICTIONS times goes last,
        since the longest would be evicted wherever it joins.
        """
        candidate = self.candidate
        return candidate.rank, self.batch_id != batch_id, candidate.evictions < MOST_EVICTIONS, self.kv_tokens


class Seat(NamedTuple):
    """Where a candidate may join: the rank that has a cache of its own, or 0; and leading blocks that are there."""

    rank: int
    resident: list[int]


class HoldsBlocks(Protocol):
    @property
    def block_ids(self) -> list[int]: ...


class Blocks(Protocol):
    """What counting room needs of an allocator."""

    @property
    def available_blocks(self) -> int: ...

    def holder_count(self, block: int) -> int: ...


class Occupancy(Protocol):
    """What counting room needs of a batch, or of the part of it that is in one rank's cache."""

    block_size: int
    running: dict[RequestKey, RunningRequest]
    leaving: dict[RequestKey, RunningRequest]

    @property
    def allocator(self) -> Blocks: ...

    @property
    def size(self) -> int: ...

    def present(self) -> Iterator[RunningRequest]: ...

    def going(self) -> Iterable[HoldsBlocks]: ...

    def leaving_blocks(self) -> int: ...


class Leaving:
    """`blocks` become free when these members leave: not those that others hold, too."""

    def __init__(self, allocator: Blocks, members: Iterable[HoldsBlocks]) -> None:
        self.blocks = 0
        self._allocator = allocator
        count, shared = allocator.holder_count, []
        for member in members:
            if count(member.block_ids[0]) == 1:  # then it shares no other either
                self.blocks += len(member.block_ids)
            else:
                shared.append(member.block_ids)
        self._leavers = Counter(chain.from_iterable(shared))  # block -> number of members that hold it
        self.blocks += sum(map(eq, self._leavers.values(), map(count, self._leavers)))

    def add(self, member: HoldsBlocks) -> None:
        count = self._allocator.holder_count
        if count(member.block_ids[0]) == 1:
            self.blocks += len(member.block_ids)
            return
        for block in member.block_ids:
            self._leavers[block] += 1
            self.blocks += self._leavers[block] == count(block)


class RunningBatch:
    """Members by phase, their blocks, and their future needs. Takes blocks from `allocator`, under their keys."""

    def __init__(self, allocator: BlockAllocator, block_size: int) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.entering: dict[RequestKey, RunningRequest] = {}
        self.running: dict[RequestKey, RunningRequest] = {}
        self.leaving: dict[RequestKey, RunningRequest] = {}
        self._by_phase = (self.entering, self.running, self.leaving)
        self._prefixes = ResidentPrefixes()
        self.background = 0  # members that run or are entering and only take what others leave
        self._of_batch: dict[int, int] = {}  # candidate batch -> number of its members that run or are entering

    @property
    def size(self) -> int:
        """Number of requests that run or are entering."""
        return len(self.running) + len(self.entering)

    @property
    def holds_background(self) -> bool:
        """Whether a member only takes what others leave; one may be on its way out."""
        return self.background > 0 or any(member.background for member in self.leaving.values())

    def present(self) -> Iterator[RunningRequest]:
        """Members that run or are entering, oldest first."""
        return chain(self.running.values(), self.entering.values())

    def holds_others_than(self, batch_id: int) -> bool:
        """Whether a member of another candidate batch runs or is entering: a batch switch."""
        return len(self._of_batch) > (batch_id in self._of_batch)

    def lengths(self, batch_id: int) -> list[int]:
        """KV tokens of the members of a candidate batch that run or are entering."""
        return [member.kv_tokens for member in self.present() if member.batch_id == batch_id]

    def formed_lengths(self, batch_id: int) -> list[int]:
        """KV tokens of the requests that the candidate batch was formed from.

        Late joins would widen the join window.
        """
        return [
            member.kv_tokens
            for member in self.present()
            if member.candidate.batch_id == batch_id and member.candidate.buffer is BufferKind.BATCH
        ]

    def adopt(self, batch_id: int, shortest_tokens: int, longest_tokens: int) -> None:
        """Members of other candidate batches whose length is in the range belong to this batch from here on."""
        for member in chain(self.present(), self.leaving.values()):
            if shortest_tokens <= member.kv_tokens <= longest_tokens:
                self._count(member, -1)
                member.batch_id = batch_id
                self._count(member, 1)

    def get(self, key: RequestKey) -> RunningRequest | None:
        return self.running.get(key) or self.entering.get(key) or self.leaving.get(key)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def seats(self, candidate: Candidate) -> list[Seat]:
        """Where the candidate may join. Nowhere while what it begins with is being copied in: it waits to share it."""
        resident = [] if candidate.chain is None else self._prefixes.find(candidate.chain)
        return [] if resident is None else [Seat(0, resident)]

    def join(self, candidate: Candidate, batch_id: int, seat: Seat) -> Join:
        """Allocate blocks for the candidate's KV and one more token. The caller has checked that they are available."""
        key, kv_tokens, resident = candidate.key, candidate.kv_tokens, seat.resident
        block_ids = self._allocate(key, kv_tokens, seat)
        most = candidate.max_total_tokens
        member = RunningRequest(key, kv_tokens, block_ids, most, candidate, batch_id, Phase.ENTERING)
        self.entering[key] = member
        self._count(member, 1)
        if (chain := self._chain_in(candidate, seat.rank)) is not None:
            member.resident = self._prefixes.enter(chain, block_ids)
        copied = self.blocks_for(kv_tokens)
        return Join(key, tuple(block_ids[:copied]), min(len(resident), copied))

    def _allocate(self, key: RequestKey, kv_tokens: int, seat: Seat) -> list[int]:
        """Blocks for so many tokens and one more: those that are there, and new ones."""
        own = self._take_blocks(self.blocks_for(kv_tokens + 1) - len(seat.resident), key, seat.rank)
        if own is None:
            raise AccountingError(f"no room for {key} to join", request_id=key.request_id)
        self.allocator.retain(seat.resident, key)
        return seat.resident + own

    def _take_blocks(self, count: int, key: RequestKey, rank: int) -> list[int] | None:
        return self.allocator.allocate(count, key)

    def _chain_in(self, candidate: Candidate, rank: int) -> BlockChain | None:
        """The candidate's blocks that requests of the rank may share."""
        return candidate.chain

    def cover_next_token(self, member: RunningRequest) -> bool:
        """Make sure that the member has a block for its next token. Returns False if none is available."""
        return len(member.block_ids) * self.block_size > member.kv_tokens or self.take_block(member)

    def take_block(self, member: RunningRequest) -> bool:
        """Allocate one more block for the member. Returns False if none is available."""
        block = self.allocator.allocate_one(member.key)
        if block is None:
            return False
        member.block_ids.append(block)
        return True

    def move(self, member: RunningRequest, phase: Phase) -> None:
        del self._by_phase[member.phase][member.key]
        self._count(member, -1)
        member.phase = phase
        self._by_phase[phase][member.key] = member
        self._count(member, 1)

    def remove(self, member: RunningRequest) -> None:
        """The member ends here. Its blocks become free, except those that others share."""
        del self._by_phase[member.phase][member.key]
        self._count(member, -1)
        self.allocator.release_all(member.key)
        if member.resident is not None:
            self._prefixes.leave(member.resident)

    def going(self) -> Iterable[HoldsBlocks]:
        """Whatever is copied out, and holds its blocks until then."""
        return self.leaving.values()

    def leaving_blocks(self) -> int:
        """Blocks that become free when every copy out has completed."""
        return Leaving(self.allocator, self.leaving.values()).blocks if self.leaving else 0

    def _count(self, member: RunningRequest, change: int) -> None:
        if member.phase is Phase.LEAVING:
            return
        if member.candidate.rank >= BACKGROUND:
            self.background += change
        count = self._of_batch.get(member.batch_id, 0) + change
        if count:
            self._of_batch[member.batch_id] = count
        else:
            self._of_batch.pop(member.batch_id, None)

    def check_integrity(self) -> None:
        """Raises AccountingError if members and blocks do not match."""
        for phase, in_phase in zip(Phase, self._by_phase, strict=True):
            for key, member in in_phase.items():
                if member.phase is not phase or member.key != key:
                    raise AccountingError(f"{key} is {member.phase.name} but listed as {phase.name}")
                if sorted(self.allocator.blocks_of(key)) != sorted(member.block_ids):
                    raise AccountingError(
                        f"{key}: its blocks are not those in the allocator", request_id=key.request_id
                    )
                if len(member.block_ids) < self.blocks_for(member.kv_tokens):
                    raise AccountingError(f"{key}: {len(member.block_ids)} blocks for {member.kv_tokens} tokens")
        members = [member for phase in self._by_phase for member in phase.values()]
        if Counter(member.batch_id for member in self.present()) != self._of_batch:
            raise AccountingError("the member counts by batch do not match a recount")
        if sum(member.background for member in self.present()) != self.background:
            raise AccountingError(f"{self.background} members only take what others leave; a recount differs")
        self._prefixes.check_integrity([*self._residents(members)])
        self.allocator.check_integrity()

    def _residents(self, members: Iterable[RunningRequest]) -> Iterator[Resident]:
        """All that the prefixes are of."""
        return (member.resident for member in members if member.resident is not None)
