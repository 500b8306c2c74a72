"""The stream from the process of rank 0 to the one that has ranks on another node."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from alignedserve.cancellation import end_tasks
from alignedserve.config import Config
from alignedserve.control.convert import failure_from_proto
from alignedserve.control.link import DuplexLink, from_any_thread
from alignedserve.control.rpc import open_channel
from alignedserve.control.runtime import RoleSettings
from alignedserve.engine.parallel.children import SILENT_S, RankOrder
from alignedserve.engine.parallel.processes import RankHost
from alignedserve.errors import AlignedServeError, RankLostError
from alignedserve.geometry import KvGeometry, StoreSlice
from alignedserve.kv_pool.paired_link import PairedLink
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import rank_host_pb2 as rh
from alignedserve.proto import rank_host_pb2_grpc as rh_grpc
from alignedserve.ranks.degrees import devices_in
from alignedserve.ranks.now import RankNow
from alignedserve.transfer.block_store import BlockStore
from alignedserve.transfer.handles import StoreHandle, geometry_to_proto
from alignedserve.transfer.paired.client import PairClient
from alignedserve.transfer.paired.remote import RemoteBlockStore
from alignedserve.transfer.paired.rendezvous import Rendezvous
from alignedserve.transfer.paired.transport import ASKING_RANK, Wiring
from alignedserve.transfer.topology import shard_channel

logger = logging.getLogger(__name__)

MAKE_S = 120.0  # a store's memory may have to be cleared
SAYS_WITHIN_S = 2.0
CLOSE_S = 5.0


class HostLink(RankHost):
    """Made on the event loop; `open` first. What is asked for goes over the one stream, whose end is the ranks' end."""

    def __init__(self, address: str, settings: RoleSettings, process: pb.ProcessKey, config: Config) -> None:
        self._settings, self._process, self._config = settings, process, config
        self._loop = asyncio.get_running_loop()
        self._rpc = open_channel(address, settings.token)
        stub: Any = rh_grpc.RankHostStub(self._rpc)
        hello = rh.RankHostCommand(hello=rh.RankHostHello(process=process))
        self._link: DuplexLink[rh.RankHostCommand, rh.RankHostEvent] = DuplexLink(
            stub.Host, self._on_event, lambda: [hello], on_down=self._on_down, reconnect=False
        )
        self._send = from_any_thread(self._link.send)
        self.node_id, self.address, self._address = "", "", address
        self.devices: Sequence[str] = ("cpu",)
        self._ranks: Sequence[int] = ()  # of its node
        self._now: Sequence[RankNow] = ()
        self._opened: Future[None] = Future()
        self._said_held: Future[list[tuple[StoreSlice, int]]] = Future()
        self._made: Future[list[StoreHandle]] = Future()
        self._values: Rendezvous | None = None
        self._pass_on: Callable[[str, bytes], None] = lambda key, value: None
        self._lost = ""  # why its ranks are of no use any more
        self._heard_s = time.monotonic()
        self._watching: asyncio.Task[None] | None = None  # for its silence; None until `open`
        self._client: PairClient | None = None  # of copies from and to its parts; None until `store`
        self._pair: PairedLink | None = None
        self._closed = False

    async def open(self) -> None:
        """Raises RankLostError."""
        self._link.start()
        limit_s = self._config.supervisor.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.wrap_future(self._opened)
        except TimeoutError:
            why = self._link.broken_by or f"it does not answer within {limit_s:g} s"
            raise RankLostError(f"the process for ranks at {self._address} cannot be used: {why}") from None
        self._watching = self._loop.create_task(self._watch())

    async def _watch(self) -> None:
        """For silence. A late turn of this task means that this process was suspended, and heard nothing."""
        limit_s = self._config.supervisor.fence_after_s
        step_s, looked_s = limit_s / 8, time.monotonic()
        while not self._lost:
            await asyncio.sleep(step_s)
            now_s, before_s = time.monotonic(), looked_s
            looked_s = now_s
            if now_s - before_s > limit_s / 2:
                self._heard_s = now_s
            elif now_s - self._heard_s > limit_s:
                self._end(f"its process is silent for over {limit_s:g} s (supervisor.fence_after_s)")

    # ---- on the event loop

    def _on_event(self, event: rh.RankHostEvent) -> None:
        self._heard_s = time.monotonic()
        kind = event.WhichOneof("body")
        if kind == "opened":
            self.node_id, self.address = event.opened.node_id, event.opened.host
            self.devices = devices_in(event.opened.device)
            self._opened.set_result(None)
        elif kind == "value" and self._values is not None:
            self._values.heard(event.value.key, event.value.value)
            self._pass_on(event.value.key, event.value.value)
        elif kind == "started":
            self._now = [RankNow(rank, pid) for rank, pid in zip(self._ranks, event.started.pids, strict=True)]
        elif kind == "beat" and event.beat.ranks:
            self._now = [
                RankNow(each.rank, each.pid, resident_bytes=each.resident_bytes, waited_s=each.waited_s)
                for each in event.beat.ranks
            ]
        elif kind == "held" and not self._said_held.done():
            if event.held.HasField("failure"):
                self._said_held.set_exception(failure_from_proto(event.held.failure))
                if self._values is not None:  # the others need not wait for its ranks
                    self._values.end(event.held.failure.message)
            else:
                self._said_held.set_result([_held(rank) for rank in event.held.ranks])
        elif kind == "made" and not self._made.done():
            if event.made.HasField("failure"):
                self._made.set_exception(failure_from_proto(event.made.failure))
            else:
                self._made.set_result([StoreHandle.from_proto(store) for store in event.made.stores])
        elif kind == "lost":
            self._end(event.lost.message)

    def _on_down(self) -> None:
        self._end(f"the stream to it has ended ({self._link.broken_by or 'it has closed it'})")

    def _end(self, reason: str) -> None:
        self._lost = self._lost or reason
        lost = self._as_error(self._lost)
        for future in (self._opened, self._said_held, self._made):
            if not future.done():
                future.set_exception(lost)
        if self._values is not None:
            self._values.end(lost.message)

    def _as_error(self, reason: str) -> RankLostError:
        return RankLostError(f"the ranks on node {self.node_id or self._address} are lost: {reason}")

    # ---- from any thread

    def start(self, orders: Sequence[RankOrder], values: Rendezvous, pass_on: Callable[[str, bytes], None]) -> None:
        self._values, self._pass_on = values, pass_on
        self._ranks = [order.rank for order in orders]
        written = [json.dumps(asdict(order)) for order in orders]
        self._send(rh.RankHostCommand(start=rh.StartRanks(orders=written)))

    def tell(self, key: str, value: bytes) -> None:
        self._send(rh.RankHostCommand(value=rh.RankValue(key=key, value=value)))

    def held(self) -> list[tuple[StoreSlice, int]]:
        try:
            return self._said_held.result(SILENT_S)
        except TimeoutError:
            raise self._as_error("they do not say what they hold") from None

    def said(self) -> AlignedServeError | None:
        with contextlib.suppress(TimeoutError):
            error = self._said_held.exception(SAYS_WITHIN_S)
            if isinstance(error, AlignedServeError):
                return error
        return None

    def store(self, store_id: str, geometry: KvGeometry, blocks: int) -> list[BlockStore]:
        asked = rh.MakeParts(store_id=store_id, geometry=geometry_to_proto(geometry), blocks=blocks)
        self._send(rh.RankHostCommand(make_parts=asked))
        try:
            handles = self._made.result(MAKE_S)
        except TimeoutError:
            raise self._as_error(f"no part of {store_id} within {MAKE_S:g} s") from None
        timeout_s, settings = self._config.kv_pool.copy_timeout_s, self._settings
        channel = shard_channel(self._config.cluster.channel)
        wiring = Wiring.between_workers(channel, ASKING_RANK, settings.host, settings.devices[0], timeout_s)
        peer = f"the ranks on node {self.node_id}"
        self._client = PairClient(self._process, wiring, geometry, peer, away_s=timeout_s, on_doubt=self._doubt)
        asyncio.run_coroutine_threadsafe(self._begin_pair(self._client), self._loop).result(CLOSE_S)
        return [RemoteBlockStore(handle, self._client) for handle in handles]

    def _doubt(self) -> None:
        """Called in any thread. No pass may use the blocks of that copy: `DrivenRunner` asks before each."""
        self._lost = self._lost or "a copy to them has failed, and may still write to their memory"

    async def _begin_pair(self, client: PairClient) -> None:
        self._pair = PairedLink(client, self._rpc)

    def now(self) -> Sequence[RankNow]:
        return self._now

    def trouble(self) -> RankLostError | None:
        return self._as_error(self._lost) if self._lost and not self._closed else None

    def close(self) -> None:
        self._closed = True
        ending = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        with contextlib.suppress(TimeoutError):
            ending.result(CLOSE_S)

    async def _close(self) -> None:
        if self._watching is not None:
            await end_tasks([self._watching])
        if self._pair is not None:
            await self._pair.close()
        if self._client is not None:
            await asyncio.to_thread(self._client.close)
        await self._link.close()
        await self._rpc.close()


async def open_hosts(settings: RoleSettings, process: pb.ProcessKey, config: Config) -> list[HostLink]:
    """The processes on the instance's other nodes, in order. Raises RankLostError if one cannot be used."""
    hosts = [HostLink(address, settings, process, config) for address in settings.rank_hosts]
    await asyncio.gather(*(host.open() for host in hosts))
    return hosts


def _held(rank: rh.RankHeld) -> tuple[StoreSlice, int]:
    return StoreSlice(rank.layer_begin, rank.layer_end, rank.head_begin, rank.head_end), rank.weight_bytes
