"""Cached prefixes that shards of other nodes hold for this instance while it copies them.

A prefix that is asked for on several nodes so gets to each node's shard, with the prompt that is committed there. Also
tells any shard which of its prefixes has been spoiled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

from alignedserve.cancellation import end_tasks
from alignedserve.control.convert import key_to_proto
from alignedserve.control.rpc import TokenChannel, one_answer, open_channel
from alignedserve.errors import UnavailableError
from alignedserve.prefill_worker.jobs import Base
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.proto import kv_pool_pb2_grpc as kp_grpc
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.request import RequestKey

logger = logging.getLogger(__name__)

ANSWER_S = 0.5
READ_S = 10.0  # a loan is waited for while its shard reads it from disk
DROP_S = 10.0  # the shard reads its whole index
GAIN = 0.1  # of the newest copy in the mean


class Loans:
    """For one event loop. Any failure costs the loan, and never a request."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._addresses: dict[str, str] = {}  # of shards, by id
        self._channels: dict[str, TokenChannel] = {}  # by address
        self._lent: dict[RequestKey, str] = {}  # the shard that has lent to it
        self._returning: set[asyncio.Task[None]] = set()
        self.copy_s_per_token = 0.0  # mean of the copies so far; 0: there were none
        self.tokens = 0  # copied from other nodes

    async def on_view(self, view: sv.ClusterView) -> None:
        self._addresses = {
            peer.process.id: peer.address for peer in view.peers if peer.process.role == "kv_pool" and peer.address
        }
        for address in self._channels.keys() - self._addresses.values():
            await self._channels.pop(address).close()

    async def borrow(self, pool_id: str, key: RequestKey, prefix: kp.CachedPrefix) -> Base | None:
        """What the shard has of the prompt, on disk too, held for the request until `give_back`.

        None if it has nothing, or does not answer.
        """
        address, until_s = self._addresses.get(pool_id), time.monotonic() + READ_S
        if address is None:
            return None
        asked = kp.Pin(key=key_to_proto(key), prefix=prefix)
        while True:
            try:
                held: kp.Holding = await one_answer(self._shard(address).Lend(asked, timeout=ANSWER_S))
            except UnavailableError as error:
                logger.info("%s lends nothing: %s", pool_id, error.message, extra={"request_id": key.request_id})
                self._lent[key] = pool_id  # it may be, all the same
                self.give_back(key)
                return None
            if held.block_ids:
                self._lent[key] = pool_id
            left_s = until_s - time.monotonic()
            if not held.ready_s or left_s <= 0.0:
                break
            await asyncio.sleep(min(held.ready_s, left_s))
        if not held.block_ids:
            return None
        return Base(held.kv_tokens, list(held.block_ids), list(held.checksums), pool_id, here=False, cached=True)

    def give_back(self, key: RequestKey) -> None:
        """The request's prefix has been copied, or is not needed. Without effect if nothing was lent to it."""
        address = self._addresses.get(self._lent.pop(key, ""))
        if address is not None:  # a shard that has gone holds nothing
            self._spawn(self._return(address, key))

    def forget(self, pool_id: str, prefix: kp.CachedPrefix) -> None:
        """The shard is to drop the last block of this prefix, and all that continues it."""
        address = self._addresses.get(pool_id)
        if address is not None:
            self._spawn(self._drop(address, prefix))

    def copied(self, tokens: int, seconds: float) -> None:
        """So many tokens of a loan were copied in this time. Any thread may call it."""
        self.tokens += tokens
        gain = GAIN if self.copy_s_per_token else 1.0
        self.copy_s_per_token += gain * (seconds / tokens - self.copy_s_per_token)

    async def close(self) -> None:
        await end_tasks(self._returning)
        while self._channels:
            await self._channels.popitem()[1].close()

    async def _return(self, address: str, key: RequestKey) -> None:
        try:
            await one_answer(self._shard(address).TakeBack(key_to_proto(key), timeout=ANSWER_S))
        except UnavailableError as error:  # the scheduler has the shard drop it with the request
            logger.info("a loan could not be given back: %s", error.message)

    async def _drop(self, address: str, prefix: kp.CachedPrefix) -> None:
        try:
            dropped = await one_answer(self._shard(address).Drop(kp.DropCached(prefix=prefix), timeout=DROP_S))
        except UnavailableError as error:
            logger.warning("a spoiled prefix could not be dropped: %s", error.message)
        else:
            pins = f", and the pins {', '.join(dropped.names)}" if dropped.names else ""
            logger.warning("a spoiled prefix was dropped: %d blocks%s", dropped.blocks, pins)

    def _shard(self, address: str) -> Any:
        if address not in self._channels:
            self._channels[address] = open_channel(address, self._token)
        return kp_grpc.PrefixCacheStub(self._channels[address])

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)
