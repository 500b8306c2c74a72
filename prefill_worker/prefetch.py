"""Step 4 of the paper: copies candidates from the pool to this instance's buffers, before they can join.

Also writes requests that a decode instance gives back to this node's shard, if the pool lacks their KV.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field

from alignedserve.control.convert import enter_stage, key_from_proto
from alignedserve.control.link import Outbox
from alignedserve.errors import AlignedServeError, TransferError
from alignedserve.kv_pool.remote_shards import PoolReader
from alignedserve.kv_pool.stored import LastCommitted
from alignedserve.kv_pool.writeback import write_back
from alignedserve.kv_pool.writer import PoolWriter
from alignedserve.prefill_worker.buffers import Buffered, CandidateBuffer, Placement
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import prefill_worker_pb2 as pw
from alignedserve.request import RequestKey, Stage
from alignedserve.scheduler.instance.plan import BufferKind
from alignedserve.transfer.channel import Channel
from alignedserve.transfer.completion import Completion
from alignedserve.transfer.copier import Copier, Route

logger = logging.getLogger(__name__)

BufferOutbox = Outbox[pw.BufferEvent]
ReadStored = Callable[[str, Collection[RequestKey]], Awaitable[dict[RequestKey, pb.StoredRequest]]]


@dataclass(slots=True)
class Missed:
    """The requests of a `Prefetch` that were not announced to the decode instance.

    `returned`: there was no room, or no decode instance; their KV is still in the pool. `missing`: the pool does not
    have them, or could not be read. `unreadable`: their KV could not be copied or its checksums did not match, and a
    retry would not help.
    """

    returned: list[pb.StoredRequest] = field(default_factory=list)
    missing: list[RequestKey] = field(default_factory=list)
    unreadable: list[RequestKey] = field(default_factory=list)


class Prefetcher:
    """Fills and empties the candidate buffers. Used from the worker's event loop."""

    def __init__(
        self,
        buffers: dict[BufferKind, CandidateBuffer],
        copier: Copier,
        from_pool: dict[BufferKind, PoolReader],
        to_pool: dict[BufferKind, Channel],
        pool: PoolWriter,
        read: ReadStored,
        committed: LastCommitted,
        block_size: int,
    ) -> None:
        """`read` gives the stored requests of a shard; those that cannot be read are missing. Those in `committed` are
        not read.
        """
        self.buffers = buffers
        self._read = read
        self._committed = committed
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

    async def prefetch(self, command: pw.Prefetch, decoder: Callable[[], tuple[BufferOutbox, str] | None]) -> Missed:
        """Read the requests of the command, copy them, and announce each once its copy is complete.

        `decoder` is called once they are read. It gives the outbox and the owner of the decode instance's stream, or
        None if there is no stream.
        """
        shards: dict[str, list[pb.PooledRequest]] = {}
        for request in command.requests:
            shards.setdefault(request.pool_id, []).append(request)
        missed = Missed()
        # All shards at once: a shard that is slow or unreachable does not delay the candidates of others.
        await asyncio.gather(*(self._bring(*shard, command, decoder, missed) for shard in shards.items()))
        return missed

    async def _bring(
        self,
        pool_id: str,
        requests: Sequence[pb.PooledRequest],
        command: pw.Prefetch,
        decoder: Callable[[], tuple[BufferOutbox, str] | None],
        missed: Missed,
    ) -> None:
        """Bring the requests of one shard."""
        buffer = self.buffers[BufferKind(command.buffer)]
        keys = [key_from_proto(request.key) for request in requests]
        known = {key: self._committed.take(request) for key, request in zip(keys, requests, strict=True)}
        found = {key: stored for key, stored in known.items() if stored is not None}
        if unknown := [key for key in keys if key not in found]:
            found |= await self._read(pool_id, unknown)
        outbox, owner = decoder() or (None, "")
        missed.missing += [key for key in keys if key not in found]
        here = [key for key in keys if key in found]
        if outbox is None:
            missed.returned += [found[key] for key in here]
            return
        arrivals = (self._arrive(buffer, found[key], owner, command, outbox) for key in here)
        # Whatever goes wrong with one request, the scheduler must learn of it and of the others.
        for key, announced in zip(here, await asyncio.gather(*arrivals, return_exceptions=True), strict=True):
            if isinstance(announced, BaseException):
                trace = None if isinstance(announced, TransferError) else announced
                logger.warning("prefetch failed: %s", announced, exc_info=trace, extra={"request_id": key.request_id})
                missed.unreadable.append(key)
            elif not announced:
                missed.returned.append(found[key])

    async def _arrive(
        self, buffer: CandidateBuffer, stored: pb.StoredRequest, owner: str, command: pw.Prefetch, outbox: BufferOutbox
    ) -> bool:
        """Copy a request and announce it.

        False if there is no room, or if the decode instance's stream has ended meanwhile. Raises TransferError if the
        copy failed.
        """
        placement = buffer.place(stored, owner)
        if placement is None:
            return False
        key = key_from_proto(stored.spec.key)
        buffered, announced = buffer.requests[key], False
        try:
            enter_stage(buffered.stored.spec.timings, Stage.PREFETCH, time.time_ns())
            await self._copy(buffer, stored, placement)
            if buffer.requests.get(key) is buffered and not buffered.orphaned:
                buffered.ready = announced = True
                requests = [buffered.stored]
                message = pw.Announcement(buffer=command.buffer, batch_id=command.batch_id, requests=requests)
                outbox.put(pw.BufferEvent(announced=message))
        finally:
            if not announced and buffer.requests.get(key) is buffered:
                buffer.remove(key)
        return announced

    def _copy(self, buffer: CandidateBuffer, stored: pb.StoredRequest, placement: Placement) -> Completion:
        """Start the copy from the pool. Raises TransferError if the shard cannot be reached."""
        begin = placement.resident
        source = self._from_pool[buffer.kind].channel(stored.pool_id)
        # Passes do not use the candidate buffers, so no copy waits for a pass.
        route = Route(source, stored.pool_block_ids[begin:], stored.pool_checksums[begin:], settled=True)
        return self._copier.copy([route, route], placement.block_ids[begin:], stored.spec.key.request_id)

    async def give_back(self, keys: Sequence[RequestKey]) -> tuple[list[pb.StoredRequest], list[RequestKey]]:
        """Return requests to the pool. Returns the requests that are there, and the keys of those that are lost."""
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
            except Exception as error:  # whatever it is, the scheduler must learn of this request and of the others
                trace = None if isinstance(error, AlignedServeError) else error
                logger.warning("write-back failed: %s", error, exc_info=trace, extra={"request_id": key.request_id})
                lost.append(key)
            if buffer.requests.get(key) is buffered:
                buffer.remove(key)
        return returned, lost
