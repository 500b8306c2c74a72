"""A shard's messages about its prefix cache: from workers that use and fill it, and from gateways (`PrefixCache`)."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from itertools import islice
from typing import Any

import grpc

from alignedserve.control.convert import failure_to_proto, key_from_proto
from alignedserve.control.prefixes import prefix_tokens
from alignedserve.errors import AlignedServeError
from alignedserve.kv_pool.counts import Grant
from alignedserve.kv_pool.disk.tier import DiskTier
from alignedserve.kv_pool.kept.pins import Pins
from alignedserve.kv_pool.pool import KvPool
from alignedserve.kv_pool.prefix_chain import root_digest
from alignedserve.kv_pool.records import Holding, WriterKey
from alignedserve.kv_pool.removal import remove_found
from alignedserve.kv_pool.stored import holding_to_proto
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.proto import kv_pool_pb2_grpc as kp_grpc
from alignedserve.request import RequestKey
from alignedserve.scheduler.cache.sessions import Note, Sessions

logger = logging.getLogger(__name__)

MOST_ASKED = 4096
SOON_S = 0.05  # a read from a disk of unknown speed is asked after
ERASED_WITHIN_S = 3.0  # a drop does not wait longer for the disk; the gateway waits 10 s for it

Context = grpc.aio.ServicerContext[Any, Any]


class PrefixCacheService(kp_grpc.PrefixCacheServicer):
    """`ready` returns once the pool may be changed. `changed` gets the grants of each change.

    `alone`: until it is left, nothing else changes the pool.
    """

    def __init__(
        self,
        pool_id: str,
        fraction: float,
        ready: Callable[[Context], Awaitable[KvPool]],
        changed: Callable[[Iterable[Grant]], None],
        alone: Callable[[], AbstractAsyncContextManager[None]],
    ) -> None:
        self._pool_id = pool_id
        self._fraction = fraction
        self._ready = ready
        self._changed = changed
        self._alone = alone
        self._fingerprint = self._weights = ""
        self._known: set[str] = set()  # weights that KV here may be of
        self._block_bytes = 0
        self._pins: Pins | None = None
        self.disk: DiskTier | None = None  # set once there is one
        self._asked: OrderedDict[RequestKey, int] = OrderedDict()  # tokens found: one that waited asks again
        self.queried_tokens = 0  # of prompts that workers looked up
        self.hit_tokens = 0

    def open(self, pool: KvPool, fingerprint: str, block_bytes: int) -> None:
        """The pool exists now. `fingerprint`: of the geometry of its blocks."""
        self._fingerprint, self._block_bytes = fingerprint, block_bytes
        self._pins = Pins(pool, self._fraction, time.monotonic)
        self._known |= self._pins.weights

    def serve_weights(self, weights: str) -> None:
        """The newest instance has loaded these weights. KV of others is found only by instances that have them."""
        self._weights = weights

    @property
    def pinned_blocks(self) -> int:
        return 0 if self._pins is None else len(self._pins.blocks)

    @property
    def pins(self) -> int:
        return 0 if self._pins is None else len(self._pins)

    def root(self, salt: bytes, weights: str = "") -> bytes:
        """The start of the chains of a salt: everything but tokens that changes KV. `weights`: "": the newest."""
        self._known.add(weights or self._weights)
        return root_digest(self._fingerprint, weights or self._weights, salt.hex())

    def _root_of(self, prefix: kp.CachedPrefix) -> bytes:
        return self.root(prefix.salt, prefix.weights)

    # ---- workers, over their streams

    def when_promoted(self, message: kp.Pin, then: Callable[[], None]) -> None:
        """Call `then` when what is on disk of the prompt is in the shard too. Raises AlignedServeError."""
        if self.disk is None:
            then()
        else:
            self.disk.promoted(self._root_of(message.prefix), prefix_tokens(message.prefix), then)

    def pin(self, pool: KvPool, message: kp.Pin) -> tuple[Holding, list[Grant]]:
        """Hold what is cached of a prompt's beginning for its request. Raises AlignedServeError."""
        tokens, key = prefix_tokens(message.prefix), key_from_proto(message.key)
        before = self._asked.pop(key, None)
        held, grants = pool.pin(key, self._root_of(message.prefix), tokens, len(tokens), before or 0)
        self._asked[key] = held.kv_tokens
        if len(self._asked) > MOST_ASKED:
            self._asked.popitem(last=False)
        self.queried_tokens += len(tokens) if before is None else 0
        self.hit_tokens += held.kv_tokens - (before or 0)
        if self._pins is not None:
            self._pins.used(held.block_ids[(before or 0) // pool.block_size :])
        return held, grants

    def cache(self, pool: KvPool, writer: WriterKey, message: kp.CacheBlocks) -> tuple[list[int], list[Grant]]:
        """Cache blocks that hold an answer's KV. Raises AlignedServeError."""
        tokens, root = prefix_tokens(message.prefix), self._root_of(message.prefix)
        blocks, sums = list(message.block_ids), list(message.checksums)
        return pool.cache(writer, root, tokens, blocks, message.first_block, sums, message.key.request_id)

    # ---- gateways

    async def match(self, request: kp.CachedPrefix, context: Context) -> kp.PrefixFound:
        pool = await self._ready(context)
        try:
            root, tokens = self._root_of(request), prefix_tokens(request)
            blocks = pool.match(root, tokens)
            coming, ready_s = self.disk.begin(root, tokens) if self.disk is not None else (0, 0.0)
        except AlignedServeError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        return kp.PrefixFound(tokens=(blocks + coming) * pool.block_size, ready_s=ready_s)

    async def Keep(self, request: kp.PinnedPrefix, context: Context) -> kp.Kept:
        pins = await self._open_pins(context)
        request.prefix.weights = request.prefix.weights or self._weights
        try:
            holding, grants = pins.keep(request, self._root_of(request.prefix))
        except AlignedServeError as error:
            return kp.Kept(refused=failure_to_proto(error))
        self._changed(grants)
        if holding is None:
            return kp.Kept()
        return kp.Kept(held=True, blocks=len(holding.block_ids), block_bytes=self._block_bytes)

    async def Lend(self, request: kp.Pin, context: Context) -> kp.Holding:
        pool = await self._ready(context)
        try:
            tokens, root = prefix_tokens(request.prefix), self._root_of(request.prefix)
            held, grants = pool.pin(key_from_proto(request.key), root, tokens, len(tokens))
            coming, ready_s = self.disk.begin(root, tokens) if self.disk is not None else (0, 0.0)
        except AlignedServeError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        self._changed(grants)
        loan = holding_to_proto(held, self._pool_id)
        loan.ready_s = max(SOON_S, ready_s) if coming else 0.0
        return loan

    async def TakeBack(self, request: pb.RequestKey, context: Context) -> pb.Empty:
        pool = await self._ready(context)
        self._changed(pool.unpin(key_from_proto(request)))
        return pb.Empty()

    async def List(self, request: kp.CacheQuery, context: Context) -> kp.CacheContents:
        pool, pins = await self._ready(context), await self._open_pins(context)
        counts, sessions = pool.counts(), pool.sessions
        return kp.CacheContents(
            pool_id=self._pool_id,
            pins=pins.listed(self._weights, prefixes=request.prefixes),
            sessions=[] if sessions is None else _listed(sessions, request.most_sessions),
            session_count=0 if sessions is None else len(sessions),
            capacity_blocks=counts.capacity,
            free_blocks=counts.free,
            cached_blocks=counts.cached,
            pinned_blocks=len(pins.blocks),
            block_bytes=self._block_bytes,
            block_size=pool.block_size,
            queried_tokens=self.queried_tokens,
            hit_tokens=self.hit_tokens,
        )

    async def Drop(self, request: kp.DropCached, context: Context) -> kp.Dropped:
        pool, pins = await self._ready(context), await self._open_pins(context)
        names, grants = pins.let_go(request.names)
        self._changed(grants)
        removed = 0
        if request.HasField("prefix"):
            try:  # it is carried out even if the caller gives up
                drop = asyncio.ensure_future(self._drop(pool, pins, request.prefix))
                more, removed = await asyncio.shield(drop)
            except AlignedServeError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
            names = [*names, *more]
        return kp.Dropped(names=names, blocks=removed)

    async def _drop(self, pool: KvPool, pins: Pins, prefix: kp.CachedPrefix) -> tuple[list[str], int]:
        """End the pins that begin with a prefix, and remove what does from memory and disk: without tokens, all of its
        salt. Returns the pins, and the number of blocks removed from memory. Raises TransferError.
        """
        tokens, removed = prefix_tokens(prefix), 0

        def remove(block_ids: list[int]) -> None:
            nonlocal removed
            count, grants = pool.remove(block_ids, pins.blocks)
            removed += count
            self._changed(grants)

        async with self._alone():
            names, grants = pins.let_go_of(prefix)
            self._changed(grants)
            for weights in [prefix.weights] if prefix.weights else sorted(self._known | {self._weights}):
                root = self.root(prefix.salt, weights)
                await remove_found(pool.counts().capacity, functools.partial(pool.begun_by, root, tokens), remove)
                if self.disk is not None:
                    await self.disk.forget(root, tokens)
        if self.disk is not None and not await self.disk.erased(ERASED_WITHIN_S):
            logger.warning("what was dropped is not erased from the disk tier's file yet")
        return names, removed

    async def NoteEndings(self, request: kp.Endings, context: Context) -> pb.Empty:
        pool, now_s = await self._ready(context), time.monotonic()
        for one in request.endings:
            pool.note_ending(one.request_id, Note(one.kind, one.session, now_s - one.took_s))
        return pb.Empty()

    async def _open_pins(self, context: Context) -> Pins:
        await self._ready(context)
        assert self._pins is not None
        return self._pins


def _listed(sessions: Sessions, most: int) -> list[kp.CachedSession]:
    now_s = sessions.clock()
    return [
        kp.CachedSession(
            name=session.name,
            request_id=session.request_id,
            blocks=session.blocks,
            turns=session.turns,
            idle_s=now_s - session.ended_s,
            ending=session.kind,
            expected_s=sessions.returns.expected_s(session.kind, session.turns) or 0.0,
        )
        for session in islice(sessions, most)
    ]
