"""A worker's side of a shard: a standing lease of free blocks, and commits that give filled blocks to a request.

Used from one event loop. The lease is refilled in the background, so that taking blocks needs no remote call. The
shard's memory outlives its process. A caller that waits for blocks or for a reply goes on waiting
for the successor, which gets the message again: commits are idempotent, and the successor takes over leases.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from alignedserve.control.convert import failure_from_proto, key_to_proto, keys_to_proto
from alignedserve.control.link import DuplexLink
from alignedserve.control.rpc import TokenChannel, open_channel
from alignedserve.errors import TransferError
from alignedserve.kv_pool.lease import StandingLease
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.proto import kv_pool_pb2_grpc as kp_grpc
from alignedserve.request import RequestKey

MODEST_S = 0.5  # after a recall, no standing lease for this time
PATIENCE_S = 60.0  # waits fail when there was no shard process for this time


@dataclass(slots=True)
class _Asked:
    message: kp.PoolWriterMessage
    answer: asyncio.Future[kp.PoolWriterReply]


@dataclass(frozen=True, slots=True)
class Committed:
    """The blocks that hold a request's KV after its commit, in order, and their checksums if blocks are verified.

    Blocks that the prefix cache had already are in the place of those that were written.
    """

    block_ids: list[int]
    checksums: list[int]


class PoolWriter:
    """Leases blocks of one shard and commits them. `standing_blocks` is the number of free blocks it keeps at hand."""

    def __init__(
        self,
        process: pb.ProcessKey,
        token: str,
        standing_blocks: int,
        on_waiting: Callable[[], None] = lambda: None,
        weights: str = "",
    ) -> None:
        """`on_waiting` is called when `waiting_blocks` has changed. `weights`: those that the writer's KV is of."""
        self._process = process
        self.weights = weights
        self._token = token
        self._lease = StandingLease(standing_blocks)
        self._waiters: deque[tuple[int, asyncio.Future[list[int]]]] = deque()
        self._asked: dict[int, _Asked] = {}  # commits, pins and blocks to cache, until the shard has replied
        self._told: dict[int, kp.PoolWriterMessage] = {}  # what frees blocks, until the shard has heard it for certain
        self._ids = itertools.count(1)
        self._modest_until = 0.0
        self._on_waiting = on_waiting
        self._channel: TokenChannel | None = None
        self._link: DuplexLink[kp.PoolWriterMessage, kp.PoolWriterReply] | None = None
        self._heard = False  # whether the shard has replied over the current link
        self._losing_patience: asyncio.TimerHandle | None = None

    @property
    def free_blocks(self) -> int:
        return self._lease.free_blocks

    @property
    def waiting_blocks(self) -> int:
        """The number of blocks that callers wait for because the shard has none free."""
        return sum(count for count, future in self._waiters if not future.done())

    @property
    def refusal(self) -> str:
        """Why the shard's process no longer serves this writer; empty while it does."""
        return self._link.refusal if self._link is not None else ""

    async def connect(self, address: str) -> None:
        """Connect to the shard's process at `address`, and disconnect from the previous one."""
        await self._disconnect()
        self._channel = open_channel(address, self._token)
        stub = kp_grpc.KvPoolStub(self._channel)
        self._link = DuplexLink(stub.Write, self._on_reply, self._first, on_down=self._on_down)
        self._link.start()

    async def take(self, count: int) -> list[int]:
        """Take `count` leased blocks, as soon as the shard has them, first come first served.

        Raises TransferError if the shard is unreachable for `PATIENCE_S`.
        """
        if not self._waiters and (taken := self._lease.take(count)) is not None:
            self._ask()
            return taken
        future: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiters.append((count, future))
        self._ask()
        self._on_waiting()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # granted in the same moment in which the caller was cancelled
                self.give(future.result())
            raise
        finally:
            self._on_waiting()

    def take_some(self, most: int) -> list[int]:
        """Take up to `most` leased blocks: as many as are at hand, none if a caller waits."""
        taken = [] if self._waiters else self._lease.take(max(0, min(most, self._lease.free_blocks)))
        self._ask()
        return taken or []

    def give(self, block_ids: Iterable[int]) -> None:
        """Put taken blocks back at hand. Blocks that were committed, or whose lease is void, are ignored."""
        self._lease.give(block_ids)
        self._serve()

    async def commit(
        self,
        key: RequestKey,
        kv_tokens: int,
        block_ids: Sequence[int],
        share_with: RequestKey | None = None,
        kept_blocks: int = 0,
        checksums: Sequence[int] = (),
        payload: bytes = b"",
    ) -> Committed:
        """From now on the request holds exactly `block_ids`.

        It or `share_with` holds the first `kept_blocks` of them already.

        `checksums`: one for each block, if blocks are verified. `payload`: stored with the KV (`stored.pack`).
        Returns once the shard has confirmed the commit.

        Raises TransferError if the shard refuses (a shared block is no longer held) or is unreachable for `PATIENCE_S`,
        and StaleError if another epoch has replaced this one. The taken blocks of `block_ids` then still belong to this
        writer.
        """
        commit = kp.Commit(
            key=key_to_proto(key),
            kv_tokens=kv_tokens,
            block_ids=block_ids,
            kept_blocks=kept_blocks,
            checksums=checksums,
            payload=payload,
        )
        if share_with is not None:
            commit.share_with.CopyFrom(key_to_proto(share_with))
        reply = await self._ask_shard(kp.PoolWriterMessage(commit=commit))
        held = Committed(list(reply.committed.block_ids), list(reply.committed.checksums))
        if not held.block_ids:
            held = Committed(list(block_ids), list(checksums))
        self._settle(block_ids[kept_blocks:], held.block_ids)
        return held

    async def pin(self, key: RequestKey, prefix: kp.CachedPrefix) -> kp.Holding:
        """The request holds the cached blocks of its prompt's beginning from now on: none, if none are cached.

        Raises like `commit`.
        """
        reply = await self._ask_shard(kp.PoolWriterMessage(pin=kp.Pin(key=key_to_proto(key), prefix=prefix)))
        return reply.pinned

    def unpin(self, key: RequestKey, kv_tokens: int) -> None:
        """The request no longer holds the `kv_tokens` tokens that it pinned. It may be committed all the same."""
        self._tell(kp.PoolWriterMessage(unpin=kp.Holding(key=key_to_proto(key), kv_tokens=kv_tokens)))

    async def cache(
        self,
        key: RequestKey,
        prefix: kp.CachedPrefix,
        first_block: int,
        block_ids: Sequence[int],
        checksums: Sequence[int],
    ) -> None:
        """Cache taken blocks that hold the KV of `prefix`, of the request `key`, from `first_block` on.

        Raises like `commit`.
        """
        cache = kp.CacheBlocks(
            key=key_to_proto(key), prefix=prefix, first_block=first_block, block_ids=block_ids, checksums=checksums
        )
        reply = await self._ask_shard(kp.PoolWriterMessage(cache=cache))
        self._settle(block_ids, reply.committed.block_ids)

    def _settle(self, taken: Sequence[int], used: Iterable[int]) -> None:
        """Of these taken blocks, those that the shard did not use are at hand again."""
        self._lease.committed(set(taken).intersection(used))
        self.give(set(taken).difference(used))

    async def _ask_shard(self, message: kp.PoolWriterMessage) -> kp.PoolWriterReply:
        """The shard's reply to a message that is sent again to its successor if need be. Raises like `commit`."""
        message.message_id = next(self._ids)
        asked = _Asked(message, asyncio.get_running_loop().create_future())
        self._asked[message.message_id] = asked
        if self._link is not None:
            self._link.send(message)  # else it is sent with the first messages of the next link
        self._stay_patient()
        try:
            return await asked.answer
        finally:
            self._asked.pop(message.message_id, None)

    def release(self, keys: Iterable[RequestKey]) -> None:
        """Free everything that these requests hold in the shard."""
        self._tell(kp.PoolWriterMessage(release=keys_to_proto(keys)))

    def _tell(self, message: kp.PoolWriterMessage) -> None:
        """Send a message without a reply. It is sent again over the next stream, unless a later one has a reply."""
        message.message_id = next(self._ids)
        self._told[message.message_id] = message
        if self._link is not None:
            self._link.send(message)

    async def close(self) -> None:
        await self._disconnect()
        self._give_up("this worker is closing its link to the KV pool")

    async def _disconnect(self) -> None:
        if self._link is not None:
            await self._link.close()
            self._link = None
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    def _first(self) -> Iterable[kp.PoolWriterMessage]:
        yield kp.PoolWriterMessage(hello=self._process)
        yield kp.PoolWriterMessage(want_blocks=self._lease.ask(self.waiting_blocks))
        unanswered = {number: asked.message for number, asked in self._asked.items()} | self._told
        yield from (unanswered[number] for number in sorted(unanswered))

    def _on_reply(self, reply: kp.PoolWriterReply) -> None:
        self._heard = True
        self._stop_waiting()
        kind = reply.WhichOneof("body")
        if kind == "granted":
            self._lease.granted(reply.granted.ids)
            self._serve()
            return
        if kind == "recall":
            self._on_recall()
            return
        while self._told and (oldest := next(iter(self._told))) < reply.message_id:
            del self._told[oldest]
        asked = self._asked.pop(reply.message_id, None)
        if asked is None or asked.answer.done():
            return
        if kind == "refused":
            asked.answer.set_exception(failure_from_proto(reply.refused))
        else:
            asked.answer.set_result(reply)

    def _on_down(self) -> None:
        """The stream broke. Leases are void until they are granted again; the outcome of commits is unknown."""
        self._heard = False
        self._lease.broke()
        self._stay_patient()

    def _stay_patient(self) -> None:
        """Let callers wait for a shard process, for at most `PATIENCE_S`."""
        if not self._heard and self._losing_patience is None:
            reason = f"the KV pool could not be reached for {PATIENCE_S:g} s"
            self._losing_patience = asyncio.get_running_loop().call_later(PATIENCE_S, self._give_up, reason)

    def _stop_waiting(self) -> None:
        if self._losing_patience is not None:
            self._losing_patience.cancel()
            self._losing_patience = None

    def _give_up(self, reason: str) -> None:
        self._stop_waiting()
        waiting: list[asyncio.Future[Any]] = [future for _, future in self._waiters]
        waiting += [asked.answer for asked in self._asked.values()]
        self._asked.clear()
        self._waiters.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(TransferError(reason))

    def _on_recall(self) -> None:
        """Give back the blocks at hand to other writers, and for `MODEST_S` lease only what callers wait for."""
        self._modest_until = asyncio.get_running_loop().time() + MODEST_S
        freed = self._lease.give_up()
        if freed and self._link is not None:
            self._link.send(kp.PoolWriterMessage(give_back=kp.BlockIds(ids=freed)))
        self._ask()

    def _serve(self) -> None:
        while self._waiters:
            count, future = self._waiters[0]
            if not future.done():
                taken = self._lease.take(count)
                if taken is None:
                    break
                future.set_result(taken)
            self._waiters.popleft()
        self._ask()

    def _ask(self) -> None:
        """Request the blocks that callers and the standing lease lack."""
        if self._link is None or not self._link.up:
            return
        demand = self.waiting_blocks
        if not demand and asyncio.get_running_loop().time() < self._modest_until:
            return
        if wanted := self._lease.ask(demand):
            self._link.send(kp.PoolWriterMessage(want_blocks=wanted))
