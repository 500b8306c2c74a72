"""The candidate batch buffer and the candidate requests buffer (paper, section 3.4): who lies where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.control.convert import key_from_proto
from alignedserve.errors import AccountingError
from alignedserve.proto import common_pb2 as pb
from alignedserve.request import RequestKey
from alignedserve.scheduler.core.events import BufferKind
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.transfer.block_store import BlockStore


@dataclass(slots=True)
class Buffered:
    """A request in a buffer. `ready`: its copy has completed, it may be pulled. `owner`: whose stream it is for.

    `orphaned`: that stream is gone, and the copy still under way; its blocks are freed when that has ended.
    """

    stored: pb.StoredRequest
    owner: str
    ready: bool = False
    orphaned: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request is to lie: the first `resident` blocks hold its KV already, shared with one of its group."""

    block_ids: list[int]
    resident: int


class CandidateBuffer:
    """One buffer: a store that paired decode instances attach, and the count of its blocks."""

    def __init__(self, kind: BufferKind, store: BlockStore) -> None:
        self.kind = kind
        self.store = store
        self.allocator = BlockAllocator(store.capacity_blocks, store.store_id)
        self.requests: dict[RequestKey, Buffered] = {}

    def place(self, stored: pb.StoredRequest, owner: str) -> Placement | None:
        """Find room for a request that lies in the pool; None where there is none, or it is here already."""
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
        """Blocks of the group's prompt that another of its requests has here already."""
        if stored.spec.group_size < 2:
            return []
        full = len(stored.spec.prompt_token_ids) // self.store.geometry.block_size
        for other in self.requests.values():
            if not other.ready or other.stored.spec.group_id != stored.spec.group_id:
                continue
            if other.stored.pool_id != stored.pool_id:
                continue  # block ids are of a shard
            theirs, ours = other.stored.pool_block_ids, stored.pool_block_ids
            same = 0
            while same < min(full, len(theirs), len(ours)) and theirs[same] == ours[same]:
                same += 1
            return list(other.stored.block_ids[:same])
        return []

    def adopt(self, stored: pb.StoredRequest, owner: str) -> None:
        """An evicted request's KV lies in blocks that were leased to `owner`."""
        key = key_from_proto(stored.spec.key)
        if key in self.requests:
            raise AccountingError(f"{self.store.store_id}: {key} lies here already", request_id=key.request_id)
        self.allocator.assign_leased(list(stored.block_ids), owner, key)
        self.requests[key] = Buffered(stored, owner, ready=True)

    def top_up_lease(self, owner: str, wanted: int) -> list[int]:
        """Blocks newly leased to `owner` so that it holds up to `wanted` free ones."""
        missing = min(wanted - len(self.allocator.leased_to(owner)), self.allocator.available_blocks)
        return self.allocator.lease(missing, owner) if missing > 0 else []

    def return_lease(self, owner: str, block_ids: Sequence[int]) -> None:
        """`owner` does not want these any more."""
        leased = set(self.allocator.leased_to(owner))
        self.allocator.return_lease([block for block in block_ids if block in leased], owner)

    def holds_nothing(self) -> bool:
        return not self.requests and not self.allocator.leased_blocks

    def remove(self, key: RequestKey) -> Buffered | None:
        """The request holds nothing here any more; None where it did not."""
        buffered = self.requests.pop(key, None)
        if buffered is not None:
            self.allocator.release_all(key)
        return buffered

    def check_integrity(self) -> None:
        """Raises AccountingError where requests and blocks do not match."""
        self.allocator.check_integrity()
        for key, buffered in self.requests.items():
            if sorted(self.allocator.blocks_of(key)) != sorted(buffered.stored.block_ids):
                raise AccountingError(f"{self.store.store_id}: {key} holds other blocks than it should")
        if (strange := self.allocator.holders_but(self.requests)) is not None:
            raise AccountingError(f"{self.store.store_id}: {strange} holds blocks and is not here")

    def drop_owner(self, owner: str) -> list[Buffered]:
        """A decode instance's stream is gone for certain: what lay here for it, and its lease, are free again.

        Not what is still being copied here: that is marked, and removed by whoever waits for the copy.
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
