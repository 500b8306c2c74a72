"""The requests of ranks that have a cache each, with the blocks of every one in the range of its rank.

A request that moves holds blocks in both ranges until its copy has ended:

    running ──relocate──► entering, and departing from the rank before ──copy completed──► running
                              └──copy failed──► running where it was
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.plan import Candidate, Relocate
from alignedserve.scheduler.instance.ranged_allocator import RangedAllocator
from alignedserve.scheduler.instance.resident import BlockChain, Resident
from alignedserve.scheduler.instance.running_batch import (
    HoldsBlocks,
    Leaving,
    Phase,
    RunningBatch,
    RunningRequest,
    Seat,
)


@dataclass(slots=True)
class Departure:
    """What a request that moves holds in the rank that it leaves."""

    key: RequestKey
    block_ids: list[int]
    resident: Resident | None
    iterations: int  # since it joined there

    @property
    def holder(self) -> tuple[str, RequestKey]:
        return "departing", self.key


class Share:
    """The part of a batch that is in the cache of one rank, as of a moment; `leave` and `depart` keep it up to date."""

    def __init__(self, batch: RankedBatch, rank: int) -> None:
        self.rank, self.block_size = rank, batch.block_size
        self.entering: dict[RequestKey, RunningRequest] = {}
        self.running: dict[RequestKey, RunningRequest] = {}
        self.leaving: dict[RequestKey, RunningRequest] = {}
        self.departing: list[Departure] = []
        self._books = batch.allocator

    @property
    def allocator(self) -> Share:
        return self

    @property
    def available_blocks(self) -> int:
        return self._books.available_in(self.rank)

    def holder_count(self, block: int) -> int:
        return self._books.holder_count(block)

    @property
    def size(self) -> int:
        return len(self.running) + len(self.entering)

    def present(self) -> Iterator[RunningRequest]:
        return chain(self.running.values(), self.entering.values())

    def going(self) -> Iterable[HoldsBlocks]:
        return chain(self.leaving.values(), self.departing)

    def leaving_blocks(self) -> int:
        return Leaving(self._books, self.going()).blocks

    def leave(self, member: RunningRequest) -> None:
        """The member has been evicted."""
        self.leaving[member.key] = self.running.pop(member.key)

    def depart(self, departure: Departure) -> None:
        """The request has begun to move to another rank."""
        del self.running[departure.key]
        self.departing.append(departure)


class RankedBatch(RunningBatch):
    """Members by phase. `allocator` has a range for each rank."""

    allocator: RangedAllocator

    def __init__(self, allocator: RangedAllocator, block_size: int) -> None:
        super().__init__(allocator, block_size)
        self.departures: dict[RequestKey, Departure] = {}

    @property
    def ranks(self) -> int:
        return self.allocator.ranges

    def available(self) -> list[int]:
        """Blocks of each rank that can be handed out now."""
        return [self.allocator.available_in(rank) for rank in range(self.ranks)]

    def rank_of(self, member: RunningRequest) -> int:
        return self.allocator.range_of(member.block_ids[0])

    def shares(self) -> list[Share]:
        """The members of each rank: O(members)."""
        found = [Share(self, rank) for rank in range(self.ranks)]
        for member in self.running.values():
            found[self.rank_of(member)].running[member.key] = member
        for member in self.entering.values():
            found[self.rank_of(member)].entering[member.key] = member
        for member in self.leaving.values():
            found[self.rank_of(member)].leaving[member.key] = member
        for departure in self.departures.values():
            found[self.allocator.range_of(departure.block_ids[0])].departing.append(departure)
        return found

    def seats(self, candidate: Candidate) -> list[Seat]:
        return [seat for rank in range(self.ranks) if (seat := self.seat_in(candidate, rank)) is not None]

    def seat_in(self, candidate: Candidate, rank: int) -> Seat | None:
        """None while what it begins with is being copied into the rank's cache."""
        own = self._chain_in(candidate, rank)
        resident = [] if own is None else self._prefixes.find(own)
        return None if resident is None else Seat(rank, resident)

    def _chain_in(self, candidate: Candidate, rank: int) -> BlockChain | None:
        """Only requests of one rank share blocks: each has salts of its own."""
        own = candidate.chain
        return None if own is None else replace(own, salt=rank.to_bytes(2) + own.salt)

    def _take_blocks(self, count: int, key: RequestKey, rank: int) -> list[int] | None:
        return self.allocator.allocate_in(rank, count, key)

    def take_block(self, member: RunningRequest) -> bool:
        found = self.allocator.allocate_in(self.rank_of(member), 1, member.key)
        member.block_ids.extend(found or ())
        return found is not None

    # ---- moves

    def relocate(self, member: RunningRequest, seat: Seat) -> Relocate:
        """The running member goes to another rank, where there is room for it."""
        key, kv_tokens = member.key, member.kv_tokens
        departure = Departure(key, member.block_ids, member.resident, member.iterations)
        self.allocator.retain(departure.block_ids, departure.holder)
        self.allocator.release(departure.block_ids, key)
        member.block_ids = self._allocate(key, kv_tokens, seat)
        own = self._chain_in(member.candidate, seat.rank)
        # Blocks that are being copied in cannot be shared; then none of this request's are.
        free = own is not None and self._prefixes.find(own) is not None
        member.resident = self._prefixes.enter(own, member.block_ids) if own is not None and free else None
        member.iterations = 0
        self.move(member, Phase.ENTERING)
        self.departures[key] = departure
        shared, copied = len(seat.resident), self.blocks_for(kv_tokens)
        return Relocate(key, tuple(departure.block_ids[shared:copied]), tuple(member.block_ids[shared:copied]), shared)

    def arrive(self, key: RequestKey) -> None:
        """The copy has completed, if the request moves: nothing of it is left in the rank that it came from."""
        departure = self.departures.pop(key, None)
        if departure is not None:
            self.allocator.release_all(departure.holder)
            if departure.resident is not None:
                self._prefixes.leave(departure.resident)

    def turn_back(self, member: RunningRequest) -> None:
        """The copy of a request that moves has failed: it runs on where it was."""
        departure = self.departures.pop(member.key)
        self.allocator.release_all(member.key)
        if member.resident is not None:
            self._prefixes.leave(member.resident)
        self.allocator.retain(departure.block_ids, member.key)
        self.allocator.release_all(departure.holder)
        member.block_ids, member.resident = departure.block_ids, departure.resident
        has_next = len(member.block_ids) * self.block_size > member.kv_tokens
        member.iterations = 0 if has_next else departure.iterations  # it runs first, unless it lacks the block for that
        self.move(member, Phase.RUNNING)

    def _residents(self, members: Iterable[RunningRequest]) -> Iterator[Resident]:
        departing = (one.resident for one in self.departures.values() if one.resident is not None)
        return chain(super()._residents(members), departing)

    def check_integrity(self) -> None:
        super().check_integrity()
        for member in chain(self.present(), self.leaving.values()):
            if len({self.allocator.range_of(block) for block in member.block_ids}) != 1:
                raise AccountingError(f"{member.key} has blocks of several ranks", request_id=member.key.request_id)
        for key, departure in self.departures.items():
            if key not in self.entering:
                raise AccountingError(f"{key} departs from a rank, and arrives nowhere", request_id=key.request_id)
            if sorted(self.allocator.blocks_of(departure.holder)) != sorted(departure.block_ids):
                raise AccountingError(f"{key}: the blocks that it departs from are not in the books")
