"""The candidate buffers of one prefill instance (block accounting only), and the instances' reports to the core."""

from __future__ import annotations

from alignedserve.request import RequestKey
from alignedserve.scheduler.core.events import DecodeReported, PrefillReported
from alignedserve.scheduler.cost.pass_model import Passes
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.plan import BufferKind, IterationStatus


class SimulatedBuffers:
    """Tracks which requests hold blocks of the two candidate buffers, and for which decode instance."""

    def __init__(self, prefill_id: str, batch_blocks: int, requests_blocks: int) -> None:
        self.batch = BlockAllocator(batch_blocks, f"{prefill_id}/batch")
        self.requests = BlockAllocator(requests_blocks, f"{prefill_id}/requests")
        self._held: dict[RequestKey, tuple[BlockAllocator, str]] = {}  # -> buffer, decode instance

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._held

    def take(self, kind: BufferKind, key: RequestKey, blocks: int, decode_id: str) -> bool:
        """Allocate blocks for a candidate. Returns False, unchanged, if there are too few."""
        buffer = self.batch if kind is BufferKind.BATCH else self.requests
        if buffer.allocate(blocks, key) is None:
            return False
        self._held[key] = buffer, decode_id
        return True

    def adopt(self, key: RequestKey, blocks: int, decode_id: str) -> None:
        """Assign blocks that are leased to its decode instance to an evicted request."""
        self.requests.assign_leased(self.requests.leased_to(decode_id)[:blocks], decode_id, key)
        self._held[key] = self.requests, decode_id

    def free(self, key: RequestKey) -> str:
        """Free all blocks of the request. Returns the decode instance that it was for."""
        buffer, decode_id = self._held.pop(key)
        buffer.release_all(key)
        return decode_id

    def leased_blocks(self, decode_id: str) -> int:
        """Blocks of the candidate request buffer that the decode instance may evict to without asking."""
        return len(self.requests.leased_to(decode_id))

    def top_up_lease(self, decode_id: str, blocks: int) -> bool:
        """Lease free blocks up to a total of `blocks`. Returns whether any were added."""
        missing = blocks - self.leased_blocks(decode_id)
        return missing > 0 and bool(self.requests.lease(missing, decode_id))

    def drop_decode(self, decode_id: str) -> None:
        """A decode instance is gone: free its candidates' blocks and its lease."""
        for key in [key for key, (_, wanted_by) in self._held.items() if wanted_by == decode_id]:
            self.free(key)
        self.requests.return_lease(self.requests.leased_to(decode_id), decode_id)

    def report(
        self, prefill_id: str, pending_tokens: int, cache_blocks: int, waits: int = 0, measured: Passes | None = None
    ) -> PrefillReported:
        return PrefillReported(
            prefill_id,
            pending_tokens,
            cache_blocks,
            self.batch.capacity,
            self.batch.available_blocks,
            self.requests.capacity,
            self.requests.available_blocks,
            waits,
            measured,
        )


def decode_report(
    decode_id: str, cache: BlockAllocator, status: IterationStatus, waits: int, measured: Passes | None = None
) -> DecodeReported:
    """`waits`: pool blocks that its evictions wait for."""
    return DecodeReported(
        decode_id,
        cache.capacity,
        cache.free_blocks,
        status.running,
        status.shortest_tokens,
        status.longest_tokens,
        status.batch_id,
        status.batch_buffer_requests,
        status.requests_buffer_requests,
        waits,
        measured,
        status.batch_shortest_tokens,
        status.batch_longest_tokens,
        status.max_running,
    )
