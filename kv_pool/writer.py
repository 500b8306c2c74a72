"""A worker's side of the pool: a standing lease of free blocks, and commits that hand filled ones to a request.

Used from one event loop. The lease is refilled in the background, so that taking blocks needs no call.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from alignedserve.control.convert import failure_from_proto, key_to_proto, keys_to_proto
from alignedserve.control.link import DuplexLink
from alignedserve.control.rpc import TokenChannel, open_channel
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.proto import kv_pool_pb2_grpc as kp_grpc

from alignedserve.errors import TransferError
from alignedserve.request import RequestKey


class PoolWriter:
    """Leases blocks of one pool and commits them. `standing_blocks` is how many free ones it keeps at hand."""

    def __init__(self, process: pb.ProcessKey, token: str, standing_blocks: int) -> None:
        self._process = process
        self._token = token
        self._standing = standing_blocks
        self._free: list[int] = []
        self._taken: set[int] = set()  # neither committed nor given back; void once the stream breaks
        self._outstanding = 0
        self._waiters: deque[tuple[int, asyncio.Future[list[int]]]] = deque()
        self._commits: dict[int, asyncio.Future[None]] = {}
        self._ids = itertools.count(1)
        self._channel: TokenChannel | None = None
        self._link: DuplexLink[kp.PoolWriterMessage, kp.PoolWriterReply] | None = None

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    async def connect(self, address: str) -> None:
        """Attach to the pool process at `address`; leaves the one before it, whose leases are void."""
        await self.close()
        self._channel = open_channel(address, self._token)
        stub = kp_grpc.KvPoolStub(self._channel)
        self._link = DuplexLink(stub.Write, self._on_reply, self._first, on_down=self._forget)
        self._link.start()

    async def take(self, count: int) -> list[int]:
        """`count` leased blocks, as soon as the pool has them; first come first served.

        Raises TransferError where the pool goes away meanwhile.
        """
        if not self._waiters and len(self._free) >= count:
            return self._pop(count)
        future: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiters.append((count, future))
        self._top_up()
        return await future

    def give(self, block_ids: Iterable[int]) -> None:
        """Put taken blocks back at hand; those that were committed, or whose lease is void, are left alone."""
        back = [block for block in block_ids if block in self._taken]
        self._taken.difference_update(back)
        self._free.extend(back)
        self._serve()

    async def commit(
        self, key: RequestKey, kv_tokens: int, block_ids: Sequence[int], share_with: RequestKey | None = None
    ) -> None:
        """From now on the request holds exactly `block_ids`. Returns once the pool has said so.

        Raises TransferError where the pool refuses (a base block is no longer held) or goes away: the taken ones
        among `block_ids` are then still this writer's.
        """
        message_id = next(self._ids)
        commit = kp.Commit(key=key_to_proto(key), kv_tokens=kv_tokens, block_ids=block_ids)
        if share_with is not None:
            commit.share_with.CopyFrom(key_to_proto(share_with))
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._commits[message_id] = future
        if self._link is None or not self._link.send(kp.PoolWriterMessage(message_id=message_id, commit=commit)):
            del self._commits[message_id]
            raise TransferError(f"the KV pool cannot be reached to commit {key.request_id}")
        await future
        self._taken.difference_update(block_ids)

    def release(self, keys: Iterable[RequestKey]) -> None:
        """These requests hold nothing more in the pool."""
        if self._link is not None:
            self._link.send(kp.PoolWriterMessage(release=keys_to_proto(keys)))

    async def close(self) -> None:
        if self._link is not None:
            await self._link.close()
            self._link = None
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    def _first(self) -> Iterable[kp.PoolWriterMessage]:
        self._outstanding = self._standing
        yield kp.PoolWriterMessage(hello=self._process)
        yield kp.PoolWriterMessage(want_blocks=self._standing)

    def _on_reply(self, reply: kp.PoolWriterReply) -> None:
        kind = reply.WhichOneof("body")
        if kind == "granted":
            self._outstanding -= len(reply.granted.ids)
            self._free.extend(reply.granted.ids)
            self._serve()
            return
        future = self._commits.pop(reply.message_id, None)
        if future is None or future.done():
            return
        if kind == "refused":
            future.set_exception(failure_from_proto(reply.refused))
        else:
            future.set_result(None)

    def _forget(self) -> None:
        """The stream broke: leases are void, and commits under way are unknown."""
        self._free.clear()
        self._taken.clear()
        self._outstanding = 0
        lost = TransferError("the link to the KV pool broke")
        pending: list[asyncio.Future[Any]] = [*self._commits.values(), *(future for _, future in self._waiters)]
        self._commits.clear()
        self._waiters.clear()
        for future in pending:
            if not future.done():
                future.set_exception(lost)

    def _pop(self, count: int) -> list[int]:
        taken, self._free = self._free[:count], self._free[count:]
        self._taken.update(taken)
        self._top_up()
        return taken

    def _serve(self) -> None:
        while self._waiters and len(self._free) >= self._waiters[0][0]:
            count, future = self._waiters.popleft()
            if not future.done():
                future.set_result(self._pop(count))
        self._top_up()

    def _top_up(self) -> None:
        """Ask for what waiters and the standing lease lack, once half of it is used."""
        demand = sum(count for count, future in self._waiters if not future.done())
        missing = self._standing + demand - len(self._free) - self._outstanding
        wanted = missing > 0 and (demand > 0 or missing * 2 >= self._standing)
        if wanted and self._link is not None and self._link.send(kp.PoolWriterMessage(want_blocks=missing)):
            self._outstanding += missing
