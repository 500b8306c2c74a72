"""The candidate batch buffer and the candidate request buffer (paper, section 3.4), and the blocks of each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.control.convert import key_from_proto
from alignedserve.errors import AccountingError
from alignedserve.proto import common_pb2 as pb
from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.plan import BufferKind
from alignedserve.transfer.block_store import BlockStore


@dataclass(slots=True)
class Buffered:
    """A request in a buffer. `ready`: its copy has completed, so it may be pulled. `owner`: the stream that it is for.

    `orphaned`: the stream ended while the copy was under way. The blocks are freed when the copy has ended.
    """

    stored: pb.StoredRequest
    owner: str
    ready: bool = False
    orphaned: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """The blocks for a request. The first `resident` of them already hold its KV, shared with its group."""

    block_ids: list[int]
    resident: int


class CandidateBuffer:
    """One buffer: a store that paired decode instances attach, and the accounting of its blocks."""

    def __init__(self, kind: BufferKind, store: BlockStore) -> None:
        self.kind = kind
        self.store = store
        self.allocator = BlockAllocator(store.capacity_blocks, store.store_id)
        self.requests: dict[RequestKey, Buffered] = {}

    def place(self, stored: pb.StoredRequest, owner: str) -> Placement | None:
        """Allocate blocks for a request from the pool; None if there is no room, or if the request is here already."""
        key = key_from_proto(stored.spec.key)
        if key in self.requests:
            return None
        shared = self._shared_with_group(stored)
        fresh = self.allocator.allocate(len(stored.pool_block_ids) - len(shared), key)
        if fresh is None:
            return None
        self.allocator.retain(shared, key)
        here = pb.StoredRequest()
        here.CopyFrom(stored)
        here.store_id = self.store.store_id
        here.block_ids[:] = [*shared, *fresh]
        here.checksums[:] = stored.pool_checksums
        self.requests[key] = Buffered(here, owner)
        return Placement(list(here.block_ids), len(shared))

    def _shared_with_group(self, stored: pb.StoredRequest) -> list[int]:
        """The blocks of the group's prompt that another of its requests already has here."""
        if stored.spec.group_size < 2:
            return []
        full = len(stored.spec.prompt_token_ids) // self.store.geometry.block_size
        for other in self.requests.values():
            if not other.ready or other.stored.spec.group_id != stored.spec.group_id:
                continue
            if other.stored.pool_id != stored.pool_id:
                continue  # block ids of different shards cannot be compared
            theirs, ours = other.stored.pool_block_ids, stored.pool_block_ids
            same = 0
            while same < min(full, len(theirs), len(ours)) and theirs[same] == ours[same]:
                same += 1
            return list(other.stored.block_ids[:same])
        return []

    def adopt(self, stored: pb.StoredRequest, owner: str) -> None:
        """Take in an evicted request, whose KV is in blocks leased to `owner`.

        Raises AccountingError if the request is here already, or if a block is not leased to `owner`.
        """
        key = key_from_proto(stored.spec.key)
        if key in self.requests:
            raise AccountingError(f"{self.store.store_id}: {key} is here already", request_id=key.request_id)
        self.allocator.assign_leased(list(stored.block_ids), owner, key)
        self.requests[key] = Buffered(stored, owner, ready=True)

    def top_up_lease(self, owner: str, wanted: int) -> list[int]:
        """Lease more blocks to `owner` until it has `wanted`, as far as blocks are free. Returns the new ones."""
        missing = min(wanted - len(self.allocator.leased_to(owner)), self.allocator.available_blocks)
        return self.allocator.lease(missing, owner) if missing > 0 else []

    def return_lease(self, owner: str, block_ids: Sequence[int]) -> None:
        """`owner` returns these blocks. Blocks that are not leased to it are ignored."""
        leased = set(self.allocator.leased_to(owner))
        self.allocator.return_lease([block for block in block_ids if block in leased], owner)

    def holds_nothing(self) -> bool:
        return not self.requests and not self.allocator.leased_blocks

    def remove(self, key: RequestKey) -> Buffered | None:
        """Remove a request and free its blocks; None if it was not here."""
        buffered = self.requests.pop(key, None)
        if buffered is not None:
            self.allocator.release_all(key)
        return buffered

    def check_integrity(self) -> None:
        """Raises AccountingError if requests and blocks do not match."""
        self.allocator.check_integrity()
        for key, buffered in self.requests.items():
            if sorted(self.allocator.blocks_of(key)) != sorted(buffered.stored.block_ids):
                raise AccountingError(f"{self.store.store_id}: {key} holds other blocks than it should")
        if (strange := self.allocator.holders_but(self.requests)) is not None:
            raise AccountingError(f"{self.store.store_id}: {strange} holds blocks but is not in this buffer")

    def drop_owner(self, owner: str) -> list[Buffered]:
        """Free the requests and the lease of `owner`, whose decode instance no longer uses them. Returns the requests.

        A request whose copy is still under way is marked `orphaned`, and removed when the copy has ended.
        """
        ours = {key: buffered for key, buffered in self.requests.items() if buffered.owner == owner}
        gone = []
        for key, buffered in ours.items():
            if buffered.ready:
                gone.append(buffered)
                self.remove(key)
            else:
                buffered.orphaned = True
        self.allocator.return_lease(self.allocator.leased_to(owner), owner)
        return gone
