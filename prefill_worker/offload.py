"""Steps 1 and 2 of the paper: copies a computed prompt's KV from the instance's cache to the pool, and commits it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from alignedserve.control.convert import key_from_proto, spec_to_proto
from alignedserve.control.prefixes import cached_prefix
from alignedserve.errors import AlignedServeError, StaleError, TransferError
from alignedserve.kv_pool.stored import LastCommitted, location, pooled
from alignedserve.kv_pool.writer import Committed, PoolWriter
from alignedserve.metrics import Page
from alignedserve.prefill_worker.jobs import Base, PrefilledJob
from alignedserve.prefill_worker.layerwise import Ahead
from alignedserve.proto import common_pb2 as pb
from alignedserve.request import RequestKey
from alignedserve.transfer.channel import Channel
from alignedserve.transfer.completion import Completion
from alignedserve.transfer.copier import Copier, Route

logger = logging.getLogger(__name__)


class Offloader:
    """Copies prompts to the pool, one coroutine each. Cancelled requests are dropped as soon as their copy allows."""

    def __init__(
        self,
        prefill_id: str,
        pool: PoolWriter,
        copier: Copier,
        to_pool: Channel,
        pool_id: str,
        block_size: int,
        committed: LastCommitted | None = None,
        let_go: Callable[[RequestKey, Base], None] = lambda pin, base: None,
    ) -> None:
        """`committed` gets each committed request. `let_go` unpins a cached base of a prompt that goes on."""
        self._prefill_id = prefill_id
        self._pool = pool
        self._copier = copier
        self._to_pool = to_pool
        self._pool_id = pool_id
        self._block_size = block_size
        self._under_way: dict[RequestKey, asyncio.Task[list[int]] | None] = {}  # the lease that each waits for
        self._cancelled: set[RequestKey] = set()
        self._letting_go: set[asyncio.Task[None]] = set()
        self._committed = committed
        self._let_go_of = let_go
        self._full: asyncio.Future[None] | None = None  # set when prompts are to let go of their bases
        self.exposed_s = 0.0  # seconds that copies took after their prompt was computed
        self.blocks = 0  # blocks of prompts copied
        self.blocks_ahead = 0  # of those, blocks whose copies began before the prompt was computed

    def show_metrics(self, page: Page) -> None:
        meaning = "seconds that copies took after their prompt was computed"
        page.counter("prefill_offload_exposed_seconds_total", meaning, self.exposed_s)
        page.counter("prefill_offload_blocks_total", "blocks of prompts written to the pool", self.blocks)
        meaning = "blocks of prompts written to the pool by copies begun before the prompt was computed"
        page.counter("prefill_offload_ahead_blocks_total", meaning, self.blocks_ahead)

    @property
    def idle(self) -> bool:
        return not self._under_way and not self._letting_go

    def prepare(self, ahead: Ahead) -> None:
        """Lease blocks of the pool for a prompt that is being computed."""

        def taken(task: asyncio.Task[list[int]]) -> None:
            if not task.cancelled() and task.exception() is None:
                ahead.fresh = task.result()

        ahead.taking = asyncio.get_running_loop().create_task(self._pool.take(ahead.count))
        ahead.taking.add_done_callback(taken)

    def begin_part(
        self, lead: RequestKey, source_ids: Sequence[int], fresh: Sequence[int], layers: tuple[int, int] | None
    ) -> Completion:
        """Begin a copy of a prompt that is being computed. Called by the compute thread."""
        return self._copier.begin_part(self._to_pool, source_ids, fresh, layers, lead.request_id)

    def abandon(self, ahead: Ahead) -> None:
        """The prompt is not offloaded: give its blocks of the pool back once no copy writes to them."""
        task = asyncio.get_running_loop().create_task(self._let_go(ahead))
        self._letting_go.add(task)
        task.add_done_callback(self._letting_go.discard)

    async def _let_go(self, ahead: Ahead) -> None:
        assert ahead.taking is not None
        ahead.taking.cancel()
        await asyncio.wait([ahead.taking])
        await _settled(ahead.parts)
        if not ahead.taking.cancelled() and ahead.taking.exception() is None:
            self._pool.give(ahead.taking.result())

    def cancel(self, key: RequestKey) -> bool:
        """Cancel an offload. Returns True if the request is being offloaded; `offload` then leaves it out."""
        if key not in self._under_way:
            return False
        self._cancelled.add(key)
        waiting = self._under_way[key]
        if waiting is not None and all(k in self._cancelled for k, w in self._under_way.items() if w is waiting):
            waiting.cancel()  # all requests of the job are cancelled: it must not wait for blocks
        return True

    def give_up_pins(self) -> None:
        """Prompts that wait for room let go of their cached bases, which others need; they are written whole."""
        if self._full is not None and not self._full.done():
            self._full.set_result(None)

    async def offload(self, job: PrefilledJob) -> tuple[list[pb.PooledRequest], list[RequestKey]]:
        """Copy and commit a job. Returns the requests that are in the pool, and the keys that were cancelled meanwhile.

        The members of a job share its blocks. Cancelled requests hold nothing in the pool. If the pool no longer holds
        what was to be kept, because the answer that held it has ended, the job is written in full. Raises TransferError
        if the copy or the commit fails, and StaleError if a newer epoch has replaced a request.
        """
        keys = [spec.key for spec in job.members]
        found: list[pb.StoredRequest] = []
        try:
            try:
                if not await self._write(job, keys, found):
                    job.base = job.ahead = None
                    await self._write(job, keys, found)
            except AlignedServeError:
                if len(keys) > 1:  # some may have been committed; a single one still holds its old blocks
                    self._pool.release(keys)
                raise
            if not found:
                return [], keys
            gone = [key for key in keys if key in self._cancelled]
            if gone:
                self._pool.release(gone)
            going_on = [request for request in found if key_from_proto(request.spec.key) not in self._cancelled]
            if self._committed is not None:
                for request in going_on:
                    self._committed.note(request)
            return [_prefilled(request, job, len(self._kept(job))) for request in going_on], gone
        finally:
            for key in keys:
                self._under_way.pop(key, None)
            self._cancelled.difference_update(keys)

    def _kept(self, job: PrefilledJob) -> list[int]:
        return [] if job.base is None else job.base.kept_blocks(self._block_size)

    async def _write(self, job: PrefilledJob, keys: list[RequestKey], found: list[pb.StoredRequest]) -> bool:
        """Copy the blocks that the pool lacks, and commit the job for each member, which is then added to `found`.

        None is if all are cancelled while the job waits for blocks. Returns False if the kept blocks were let go of, or
        the shard does not take them: then nothing has been committed.
        """
        kept, ahead = self._kept(job), job.ahead
        if ahead is not None and ahead.taking is not None:
            taking = ahead.taking
        else:
            taking = asyncio.get_running_loop().create_task(self._pool.take(len(job.block_ids) - len(kept)))
        self._under_way.update(dict.fromkeys(keys, taking))
        if kept and job.base is not None and job.base.cached and not await self._granted(taking):
            if self._cancelled.issuperset(keys):
                return True
            self._let_go_of(job.pin or job.lead, job.base)
            return False
        await asyncio.wait([taking])
        if taking.cancelled():
            return True
        fresh = taking.result()
        self._under_way.update(dict.fromkeys(keys))
        try:
            checksums = await self._copy(job, fresh, len(kept))
        except AlignedServeError:
            self._pool.give(fresh)
            raise
        try:
            await self._commit(job, [*kept, *fresh], checksums, len(kept), found)
        except AlignedServeError as error:
            self._pool.give(fresh)
            if not kept or found or isinstance(error, StaleError):
                raise
            logger.info("a prompt is written in full: %s", error, extra={"request_id": job.lead.request_id})
            return False
        return True

    async def _granted(self, taking: asyncio.Task[list[int]]) -> bool:
        """Wait for a lease. False if it was given up instead, because others need the base that this prompt holds."""
        if self._full is None or self._full.done():
            self._full = asyncio.get_running_loop().create_future()
        either: list[asyncio.Future[Any]] = [taking, self._full]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if taking.done():
            return True
        taking.cancel()
        await asyncio.wait([taking])
        return not taking.cancelled()

    async def cache(self, job: PrefilledJob) -> None:
        """Copy the full blocks that the pool lacks to the prefix cache, as far as it has free blocks at hand.

        Raises TransferError if the copy fails or the shard cannot take them.
        """
        first, end = len(self._kept(job)), job.kv_tokens // self._block_size
        fresh = self._pool.take_some(end - first)
        if not fresh:
            return
        end = first + len(fresh)
        source, tokens = job.block_ids[first:end], job.tokens[: end * self._block_size]
        prefix = cached_prefix(tokens, job.salt, self._pool.weights)
        try:
            checksums = await self._copier.checksums(self._to_pool.source, source)
            route = Route(self._to_pool, source, checksums)
            await self._copier.copy([route, route], fresh, job.lead.request_id)
            await self._pool.cache(job.lead, prefix, first, fresh, checksums)
        except AlignedServeError:
            self._pool.give(fresh)
            raise

    async def _copy(self, job: PrefilledJob, fresh: list[int], kept: int) -> list[int]:
        """Copy the blocks whose copies have not begun, and wait for all. Returns the checksums of all blocks."""
        begun_s = time.perf_counter()
        parts = [] if job.ahead is None else job.ahead.parts
        ahead = job.ahead.copied - kept if job.ahead is not None and parts else 0
        if parts and ahead < len(fresh):
            parts.append(self.begin_part(job.lead, job.block_ids[kept + ahead :], fresh[ahead:], None))
        try:
            checksums = await self._checksums(job, kept)
        except BaseException:
            await _settled(parts)
            raise
        route = Route(self._to_pool, job.block_ids[kept:], checksums[kept:])
        routes, label = [route, route], job.lead.request_id
        if parts:
            await self._copier.join(parts, routes, fresh, label)
        else:
            await self._copier.copy(routes, fresh, label)
        self.exposed_s += time.perf_counter() - begun_s
        self.blocks += len(fresh)
        self.blocks_ahead += ahead
        return checksums

    async def _checksums(self, job: PrefilledJob, kept: int) -> list[int]:
        """Checksums of all blocks of the job: the committed ones of kept blocks, and those of the cache."""
        before = [] if job.base is None else list(job.base.checksums[:kept])
        return before + await self._copier.checksums(self._to_pool.source, job.block_ids[kept:])

    async def _commit(
        self,
        job: PrefilledJob,
        blocks: list[int],
        checksums: list[int],
        kept: int,
        found: list[pb.StoredRequest],
    ) -> None:
        """Commit the job for each member, and add it to `found`. Later members share the blocks of the first one."""
        lead = job.members[0].key
        cached = kept if job.base is not None and job.base.cached else 0
        holder = job.pin if cached and job.pin != lead else None  # it holds the base, and is not among the members
        held = Committed(blocks, checksums)
        for spec in job.members:
            first = spec.key == lead
            request = pb.StoredRequest(
                spec=spec_to_proto(spec), prefill_id=self._prefill_id, weights=self._pool.weights
            )
            held = await self._pool.commit(
                spec.key,
                job.kv_tokens,
                held.block_ids,
                holder if first else lead,
                kept if first else len(held.block_ids),  # all of a later one: a lease of the same ids has other KV
                held.checksums,
                request.SerializeToString(),
            )
            request.MergeFrom(location(self._pool_id, job.kv_tokens, held.block_ids, held.checksums))
            found.append(request)


def _prefilled(request: pb.StoredRequest, job: PrefilledJob, kept: int) -> pb.PooledRequest:
    message = pooled(request)
    message.shared_blocks = kept if job.base is not None and job.base.cached else 0
    return message


async def _settled(parts: Sequence[Completion]) -> None:
    """Wait until all these copies have ended, with or without an error."""
    for part in parts:
        with contextlib.suppress(TransferError):
            await part
