"""Step 4 of the paper: candidates come from the pool into this instance's buffers, ahead of their decode instance.

Also the way back: what a decode instance gives up is written to this node's shard where the pool lacks it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence

from alignedserve.control.convert import enter_stage, key_from_proto
from alignedserve.control.link import Outbox
from alignedserve.errors import AlignedServeError, TransferError
from alignedserve.kv_pool.remote_shards import PoolReader
from alignedserve.kv_pool.writeback import write_back
from alignedserve.kv_pool.writer import PoolWriter
from alignedserve.prefill_worker.buffers import Buffered, CandidateBuffer, Placement
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import prefill_worker_pb2 as pw
from alignedserve.request import RequestKey, Stage
from alignedserve.scheduler.core.events import BufferKind
from alignedserve.transfer.channel import Channel
from alignedserve.transfer.completion import Completion
from alignedserve.transfer.copier import Copier, Route

logger = logging.getLogger(__name__)

BufferOutbox = Outbox[pw.BufferEvent]


class Prefetcher:
    """Fills and empties the two buffers. Used from the worker's event loop."""

    def __init__(
        self,
        buffers: dict[BufferKind, CandidateBuffer],
        copier: Copier,
        from_pool: dict[BufferKind, PoolReader],
        to_pool: dict[BufferKind, Channel],
        pool: PoolWriter,
        block_size: int,
    ) -> None:
        self.buffers = buffers
        self._copier = copier
        self._from_pool = from_pool
        self._to_pool = to_pool
        self._pool = pool
        self._block_size = block_size

    def find(self, key: RequestKey) -> tuple[CandidateBuffer, Buffered] | None:
        for buffer in self.buffers.values():
            if buffered := buffer.requests.get(key):
                return buffer, buffered
        return None

    async def prefetch(
        self, command: pw.Prefetch, outbox: BufferOutbox | None, owner: str
    ) -> tuple[list[pb.StoredRequest], list[RequestKey]]:
        """Copy the command's requests and announce each once it is here.

        Returns those that found no room, or no decode instance to be announced to: they still lie in the pool. And
        those whose KV could not be copied, or was not what had been written: lost, since it would not be another time.
        """
        buffer = self.buffers[BufferKind(command.buffer)]
        returned: list[pb.StoredRequest] = []
        lost: list[RequestKey] = []
        # Each on its own: a shard that is slow or cut off delays no other's candidates.
        arriving: list[Coroutine[None, None, bool | None]] = []
        coming: list[pb.StoredRequest] = []
        for stored in command.requests:
            placement = buffer.place(stored, owner) if outbox is not None else None
            if placement is None:
                returned.append(stored)
                continue
            enter_stage(stored.spec.timings, Stage.PREFETCH, time.time_ns())
            key = key_from_proto(stored.spec.key)
            buffer.requests[key].stored.spec.timings.CopyFrom(stored.spec.timings)
            coming.append(stored)
            arriving.append(self._arrive(buffer, stored, self._start(buffer, stored, placement), command, outbox))
        for stored, announced in zip(coming, await asyncio.gather(*arriving), strict=True):
            if announced is None:
                lost.append(key_from_proto(stored.spec.key))
            elif not announced:
                returned.append(stored)
        return returned, lost

    def _start(self, buffer: CandidateBuffer, stored: pb.StoredRequest, placement: Placement) -> Completion:
        begin, label = placement.resident, stored.spec.key.request_id
        try:
            source = self._from_pool[buffer.kind].channel(stored.pool_id)
        except TransferError as error:
            failed = Completion(label)
            failed.finish(error)
            return failed
        # Passes touch no buffer: no copy waits for one.
        route = Route(source, stored.pool_block_ids[begin:], stored.pool_checksums[begin:], settled=True)
        return self._copier.copy([route, route], placement.block_ids[begin:], label)

    async def _arrive(
        self,
        buffer: CandidateBuffer,
        stored: pb.StoredRequest,
        completion: Completion,
        command: pw.Prefetch,
        outbox: BufferOutbox | None,
    ) -> bool | None:
        """Wait for the copy. True: announced; False: there is nobody to announce it to; None: its KV did not come."""
        try:
            await completion
        except TransferError as error:
            key = key_from_proto(stored.spec.key)
            logger.warning("prefetch failed: %s", error, extra={"request_id": key.request_id})
            buffer.remove(key)
            return None
        return self._announce(buffer, stored, command, outbox)

    def _announce(
        self,
        buffer: CandidateBuffer,
        stored: pb.StoredRequest,
        command: pw.Prefetch,
        outbox: BufferOutbox | None,
    ) -> bool:
        """The copy is complete: tell the decode instance. False where that has gone meanwhile."""
        key = key_from_proto(stored.spec.key)
        buffered = buffer.requests[key]
        if buffered.orphaned:
            buffer.remove(key)
            return False
        buffered.ready = True
        if outbox is not None:
            announced = pw.Announcement(buffer=command.buffer, batch_id=command.batch_id, requests=[buffered.stored])
            outbox.put(pw.BufferEvent(announced=announced))
        return True

    async def give_back(self, keys: Sequence[RequestKey]) -> tuple[list[pb.StoredRequest], list[RequestKey]]:
        """Return requests to the pool. Those that could not be written there are the second list: lost."""
        returned: list[pb.StoredRequest] = []
        lost: list[RequestKey] = []
        for key in keys:
            found = self.find(key)
            if found is None:
                continue
            buffer, buffered = found
            enter_stage(buffered.stored.spec.timings, Stage.POOL, time.time_ns())
            try:
                stored = buffered.stored
                source = Route(self._to_pool[buffer.kind], list(stored.block_ids), list(stored.checksums))
                returned.append(await write_back(self._pool, self._copier, source, stored, self._block_size))
            except AlignedServeError as error:
                logger.warning("write-back failed: %s", error, extra={"request_id": key.request_id})
                lost.append(key)
            if buffer.requests.get(key) is buffered:
                buffer.remove(key)
        return returned, lost
