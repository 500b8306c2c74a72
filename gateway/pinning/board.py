"""Pins prefixes in the shards of the pool: computes what a shard lacks, and has it held there.

A prefix is computed by an ordinary request, last among those that wait. It asks for two tokens: a prompt that ends
with its first one is cached only if free blocks are at hand. It is steered to a shard's node by the hint that this
shard has it already. If it was computed elsewhere, or evicted before it was held, it is tried again.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc

from alignedserve.control.convert import failure_from_proto
from alignedserve.control.prefixes import cached_prefix, prefix_tokens
from alignedserve.control.rpc import TokenChannel
from alignedserve.errors import InvalidRequestError, NotFoundError, UnavailableError
from alignedserve.gateway.body.planning import CacheUse, CallPlan, PromptPlan, ServedModel
from alignedserve.gateway.body.requests import ReplyOptions
from alignedserve.gateway.failures import ContextLengthError, NotPossibleError
from alignedserve.gateway.ledger.ledger import Ledger
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.proto import kv_pool_pb2_grpc as kp_grpc
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.request import SamplingParams

logger = logging.getLogger(__name__)

Message = TypeVar("Message")

LAST_PRIORITY = 999_999  # behind all that wait, before those that only take what others leave
PIN_CALL = "pin-"  # begins the ids of its requests
TRIES = 6
COMMITTED_WITHIN_S = 1.0  # after the token of the request that computes a prefix
COMMIT_POLL_S = 0.05
ANSWER_WITHIN_S = 10.0
DROPPED_WITHIN_S = 60.0  # of a shard of ten million blocks, and its disk


@dataclass(frozen=True, slots=True)
class Pinned:
    """A prefix that a shard holds now."""

    pool_id: str
    tokens: int
    blocks: int
    bytes: int


class PinBoard:
    """For one event loop. `channels`: to each shard, by its id. `view`: the cluster's present one."""

    def __init__(
        self,
        ledger: Ledger,
        model: ServedModel,
        channels: Callable[[], Mapping[str, TokenChannel]],
        view: Callable[[], sv.ClusterView],
    ) -> None:
        self._ledger = ledger
        self._model = model
        self._channels = channels
        self._view = view

    @property
    def on(self) -> bool:
        """Whether the cluster has a prefix cache."""
        return self._model.cache is not None

    def shards(self, node: str = "") -> list[str]:
        """The shards whose nodes compute prompts, or that of one node, which may be named by its shard.

        Raises NotPossibleError without a prefix cache, NotFoundError for an unknown node, UnavailableError without any.
        """
        if not self.on:
            raise NotPossibleError("this cluster has no prefix cache: start it without --no-prefix-cache")
        view, known = self._view(), self._channels()
        computing = {peer.node_id for peer in view.peers if peer.process.role == "prefill"}
        nodes = {peer.process.id: peer.node_id for peer in view.peers if peer.process.role == "kv_pool"}
        found = [pool_id for pool_id in sorted(known) if nodes.get(pool_id) in computing]
        if node:
            found = [pool_id for pool_id in found if node in (pool_id, nodes[pool_id])]
            if not found:
                names = ", ".join(sorted(f"{nodes[pool_id]} ({pool_id})" for pool_id in known if pool_id in nodes))
                raise NotFoundError(f"no node {node[:64]!r} computes prompts; the nodes are {names}", param="node")
        if not found:
            raise UnavailableError("no shard of the pool is known yet")
        return found

    async def pin(self, pin: kp.PinnedPrefix, pool_ids: Sequence[str]) -> list[Pinned]:
        """Have these shards hold a prefix; its tokens are cut to full blocks. Idempotent.

        Raises InvalidRequestError for less than a block, the shard's error if it refuses, UnavailableError if a shard
        does not answer or the prefix could not be computed there, and the errors of a request. If one fails, the others
        may hold it.
        """
        return list(await asyncio.gather(*(self._pin(pin, pool_id) for pool_id in pool_ids)))

    async def contents(self, *, prefixes: bool = False, most_sessions: int = 0) -> list[kp.CacheContents]:
        """What each shard keeps. Raises UnavailableError if one does not answer."""
        query = kp.CacheQuery(prefixes=prefixes, most_sessions=most_sessions)
        names = sorted(self._channels())
        return list(await asyncio.gather(*(self._ask(name, lambda shard: shard.List(query)) for name in names)))

    async def drop(self, order: kp.DropCached) -> dict[str, kp.Dropped]:
        """Carry this out in all shards; again if one does not answer. Raises UnavailableError if it never does."""
        names = sorted(self._channels())
        done = await asyncio.gather(
            *(self._ask(name, lambda shard: shard.Drop(order), DROPPED_WITHIN_S) for name in names)
        )
        return dict(zip(names, done, strict=True))

    # ---- internal

    async def _pin(self, pin: kp.PinnedPrefix, pool_id: str) -> Pinned:
        query = kp.CacheQuery()
        block_size = (await self._ask(pool_id, lambda shard: shard.List(query))).block_size
        tokens = prefix_tokens(pin.prefix)
        tokens = tokens[: len(tokens) // block_size * block_size]
        if not tokens:
            raise InvalidRequestError(f"the prefix has less than a block of {block_size} tokens that never change")
        cut = kp.PinnedPrefix(name=pin.name, everywhere=pin.everywhere, prefix=cached_prefix(tokens, pin.prefix.salt))
        within_s = 0.0
        for _ in range(TRIES):
            if (kept := await self._keep(cut, pool_id, within_s)).held:
                return Pinned(pool_id, len(tokens), kept.blocks, kept.blocks * kept.block_bytes)
            await self._compute(tokens.tolist(), pin.prefix.salt, pool_id)
            within_s = COMMITTED_WITHIN_S
        raise UnavailableError(
            f"{pool_id}: {pin.name[:64]!r} was computed {TRIES} times, and its blocks were gone before they were held"
        )

    async def _keep(self, pin: kp.PinnedPrefix, pool_id: str, within_s: float) -> kp.Kept:
        """Ask the shard to hold the prefix, again and again for `within_s`: its last blocks may be under way to it."""
        until_s = time.monotonic() + within_s
        while True:
            kept: kp.Kept = await self._ask(pool_id, lambda shard: shard.Keep(pin))
            if kept.HasField("refused"):
                raise failure_from_proto(kept.refused)
            if kept.held or time.monotonic() >= until_s:
                return kept
            await asyncio.sleep(COMMIT_POLL_S)

    async def _compute(self, tokens: list[int], salt: bytes, pool_id: str) -> None:
        """Raises ContextLengthError if the prefix leaves no room for a token, and what a client would get."""
        limit, holder = self._model.limit
        if len(tokens) >= limit:
            raise ContextLengthError(f"the prefix has {len(tokens)} tokens; that leaves no room within {holder}")
        sampling = SamplingParams(temperature=0.0, max_tokens=min(2, limit - len(tokens)), ignore_eos=True)
        name = f"{PIN_CALL}{uuid.uuid4().hex}"
        prompt = PromptPlan(tuple(tokens), sampling, cached=((pool_id, len(tokens) - 1),))
        plan = CallPlan(
            name,
            (prompt,),
            ReplyOptions(),
            internal_id=name,
            priority=LAST_PRIORITY,
            offline=True,
            cache=CacheUse(salt),
        )
        call = self._ledger.open(plan)
        try:
            while await call.next():
                pass
        finally:
            self._ledger.close(call)

    async def _ask(
        self,
        pool_id: str,
        ask: Callable[[kp_grpc.PrefixCacheStub], Awaitable[Message]],
        within_s: float = ANSWER_WITHIN_S,
    ) -> Message:
        """A shard's answer; asked again once if its process has just been replaced. Raises UnavailableError."""
        for last in (False, True):
            channel = self._channels().get(pool_id)
            try:
                if channel is not None:
                    async with asyncio.timeout(within_s):
                        return await ask(kp_grpc.PrefixCacheStub(channel))
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                if last:
                    said = error.code().name if isinstance(error, grpc.aio.AioRpcError) else "no answer"
                    raise UnavailableError(f"{pool_id} cannot be asked about its prefix cache: {said}") from error
            if not last:
                await asyncio.sleep(1.0)
        raise UnavailableError(f"{pool_id} is not there")
