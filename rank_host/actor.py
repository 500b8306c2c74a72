"""The process that has an instance's ranks on another node, and the part of its KV store that is there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc
import torch

from alignedserve.cancellation import end_tasks
from alignedserve.config import Config
from alignedserve.config_sources import from_tree
from alignedserve.control.convert import failure_to_proto
from alignedserve.control.link import Outbox, first_message, from_any_thread, serve_stream
from alignedserve.control.role import new_incarnation
from alignedserve.control.rpc import RpcServer
from alignedserve.control.runtime import RoleSettings
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.parallel.children import RankChildren, RankOrder, devices_by_turns
from alignedserve.engine.parallel.stores import device_parts, host_parts
from alignedserve.errors import AlignedServeError, ModelError, RankLostError
from alignedserve.geometry import StoreSlice
from alignedserve.kv_pool.paired_service import PairedCopiesService
from alignedserve.model import ModelInfo, resolve_model
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import paired_copies_pb2_grpc as pc_grpc
from alignedserve.proto import rank_host_pb2 as rh
from alignedserve.proto import rank_host_pb2_grpc as rh_grpc
from alignedserve.transfer.block_store import BlockStore
from alignedserve.transfer.handles import geometry_from_proto
from alignedserve.transfer.paired.rendezvous import Rendezvous
from alignedserve.transfer.topology import shard_channel

logger = logging.getLogger(__name__)

LOADED_WITHIN_S = 10.0  # for the error of a rank that has ended
CALLED_WITHIN_S = 120.0  # by the process of rank 0, which may have to import first
BEAT_S = 0.5  # or the heartbeat's, if that is shorter


class RankHostServer(rh_grpc.RankHostServicer):
    """`settings`: those of the instance, with the id, node, address and device of this process."""

    def __init__(self, settings: RoleSettings) -> None:
        self.settings = settings
        self.process = pb.ProcessKey(role="rank_host", id=settings.id, incarnation=new_incarnation(settings.after))
        self._config: Config = from_tree(settings.config)
        self.beat_s = min(BEAT_S, self._config.supervisor.heartbeat_s)
        self._children: RankChildren | None = None  # the ranks; None until they are ordered
        self._values = Rendezvous(self._tell)  # by which they find those of other nodes
        self._send: Callable[[rh.RankHostEvent], None] = lambda event: None  # to the process of rank 0; any thread may
        self._held: list[StoreSlice] = []  # by each rank; known once they have loaded
        self._stores: dict[str, BlockStore] = {}  # their parts
        self._instance = ""  # the process of rank 0 that has called
        self._called = asyncio.Event()
        self._ended = asyncio.Event()  # its stream has ended
        self._server = RpcServer(settings.token, settings.host)
        channel, timeout_s = shard_channel(self._config.cluster.channel), self._config.kv_pool.copy_timeout_s
        self._copies = PairedCopiesService(
            settings, self.process, lambda: self._stores, [channel], timeout_s, writable=True
        )

    async def start(self) -> str:
        """Serve. Returns the address."""
        self._server.add(rh_grpc.add_RankHostServicer_to_server, self)
        self._server.add(pc_grpc.add_PairedCopiesServicer_to_server, self._copies)
        return await self._server.start()

    async def wait(self) -> None:
        """Until the instance has ended, or has not called in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CALLED_WITHIN_S):
                await self._called.wait()
        if self._called.is_set():
            await self._ended.wait()
        else:
            logger.warning("%s ends: its instance has not called within %g s", self.settings.id, CALLED_WITHIN_S)

    async def close(self) -> None:
        if self._children is not None:
            await asyncio.to_thread(self._children.close)
        self._values.end("the instance has ended")
        await self._copies.close()
        await self._server.stop()

    async def Host(
        self, request_iterator: AsyncIterator[rh.RankHostCommand], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[rh.RankHostEvent]:
        hello: rh.RankHostHello = await first_message(request_iterator, "hello", context)
        if self._called.is_set():
            why = f"{self.settings.id} already has ranks of {self._instance}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, why)
        self._called.set()
        self._instance = f"{hello.process.id} ({hello.process.incarnation})"
        outbox = Outbox[rh.RankHostEvent]()
        outbox.put(rh.RankHostEvent(opened=self._opened()))
        self._send = from_any_thread(outbox.put)
        session = _Session(self, outbox)
        beating = asyncio.get_running_loop().create_task(session.beat())
        try:
            async for event in serve_stream(request_iterator, outbox, session.on_command):
                yield event
        finally:
            logger.info("the stream of %s has ended", self._instance)
            self._ended.set()
            await end_tasks([beating, *session.tasks])

    def _opened(self) -> rh.RankHostOpened:
        return rh.RankHostOpened(
            process=self.process,
            node_id=self.settings.node_id,
            host=self.settings.host,
            device=self.settings.device,
        )

    # ---- what the process of rank 0 asks for

    def with_model_here(self, orders: list[RankOrder]) -> list[RankOrder]:
        """The orders for this node's copy of the model. Blocks. Raises ModelError, also if it is another model."""
        model, wanted = self._config.model, ModelInfo.from_json(orders[0].info)
        folder, trusted = resolve_model(model.path, model.trust_remote_code), model.trust_remote_code
        found = inspect_model(wanted.name, folder, model.dtype, self.settings.devices[0], trusted)
        if found.weights != wanted.weights:
            raise ModelError(
                f"{folder} on node {self.settings.node_id} has other weights than that on the first node of "
                f"{self._instance}: copy the same files to all nodes"
            )
        info = replace(wanted, path=found.path).to_json()
        return [replace(order, info=info) for order in orders]

    def start_ranks(self, orders: list[RankOrder]) -> list[int]:
        """Returns their pids. To be called on the thread of the event loop, with which they end."""
        self._children = RankChildren(self._values)
        torch.set_num_threads(1)  # the ranks compute, not this process
        for order in orders:
            self._children.start(order)
        return self._children.pids

    def now(self) -> rh.RanksNow:
        """Of each rank; none before they are started."""
        ranks = [] if self._children is None else self._children.now()
        told = [
            rh.RankNow(rank=each.rank, pid=each.pid, resident_bytes=each.resident_bytes, waited_s=each.waited_s)
            for each in ranks
        ]
        return rh.RanksNow(ranks=told)

    def _tell(self, key: str, value: bytes) -> None:
        self._send(rh.RankHostEvent(value=rh.RankValue(key=key, value=value)))

    def hear(self, value: rh.RankValue) -> None:
        self._values.heard(value.key, value.value)

    def held(self) -> rh.RanksHeld:
        """Blocks. Raises AlignedServeError: the one for which a rank could not load its part, if any says it."""
        assert self._children is not None
        try:
            found = self._children.held(None)  # rank 0 waits, and a process that reads weights may take minutes
        except RankLostError as error:
            raise self._children.said() or error from None
        self._held = [held for held, _ in found]
        return rh.RanksHeld(
            ranks=[
                rh.RankHeld(
                    layer_begin=held.layer_begin,
                    layer_end=held.layer_end,
                    head_begin=held.head_begin,
                    head_end=held.head_end,
                    weight_bytes=weight_bytes,
                )
                for held, weight_bytes in found
            ]
        )

    def make_parts(self, asked: rh.MakeParts) -> rh.PartsMade:
        """Blocks. Raises AlignedServeError."""
        assert self._children is not None
        geometry, node_id, devices = geometry_from_proto(asked.geometry), self.settings.node_id, self.settings.devices
        store_id = f"{asked.store_id}@{self.settings.id}"
        if devices[0] == "cpu":
            made = host_parts(store_id, geometry, asked.blocks, node_id, self._held)
        else:
            of_ranks = devices_by_turns(devices, len(self._held))
            made = device_parts(store_id, geometry, asked.blocks, node_id, self._held, of_ranks, shared=True)
        self._children.give(made, geometry, asked.blocks, own=True, first=0)
        self._stores = {part.store_id: part for part in made.parts}
        return rh.PartsMade(stores=[part.handle().to_proto() for part in made.parts])

    def trouble(self) -> AlignedServeError | None:
        return None if self._children is None else self._children.trouble()


class _Session:
    """The stream of the instance. All but its tasks' work is on the event loop."""

    def __init__(self, server: RankHostServer, outbox: Outbox[rh.RankHostEvent]) -> None:
        self._server, self._outbox = server, outbox
        self.loaded = asyncio.Event()  # all ranks have said what they hold, or why not
        self.tasks: set[asyncio.Task[None]] = set()

    def on_command(self, command: rh.RankHostCommand) -> None:
        kind = command.WhichOneof("body")
        if kind == "value":
            self._server.hear(command.value)
        elif kind == "start":
            self._spawn(self._start([RankOrder(**json.loads(order)) for order in command.start.orders]))
        elif kind == "make_parts":
            self._spawn(self._make_parts(command.make_parts))

    async def _start(self, orders: list[RankOrder]) -> None:
        """Until all have loaded their part of the model."""
        try:
            here = await asyncio.to_thread(self._server.with_model_here, orders)
            started = rh.RanksStarted(pids=self._server.start_ranks(here))
            self._outbox.put(rh.RankHostEvent(started=started))
            held = await asyncio.to_thread(self._server.held)
        except Exception as error:  # whatever it is, the process of rank 0 waits for an answer
            logger.exception("the ranks could not load their parts")
            held = rh.RanksHeld(failure=failure_to_proto(error))
        self.loaded.set()
        self._outbox.put(rh.RankHostEvent(held=held))

    async def _make_parts(self, asked: rh.MakeParts) -> None:
        try:
            made = await asyncio.to_thread(self._server.make_parts, asked)
        except Exception as error:  # also out of memory
            logger.exception("no part of %s could be made", asked.store_id)
            made = rh.PartsMade(failure=failure_to_proto(error))
        self._outbox.put(rh.RankHostEvent(made=made))

    async def beat(self) -> None:
        """Until a rank is lost. Then its error goes first, if it could not load its part."""
        while (lost := self._server.trouble()) is None:
            self._outbox.put(rh.RankHostEvent(beat=self._server.now()))
            await asyncio.sleep(self._server.beat_s)
        logger.error("%s", lost)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOADED_WITHIN_S):
                await self.loaded.wait()
        self._outbox.put(rh.RankHostEvent(lost=failure_to_proto(lost)))

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


async def host_ranks(settings: RoleSettings, on_address: Any) -> None:
    """Run the process from start to end. `on_address` gets the address once it serves."""
    server = RankHostServer(settings)
    try:
        on_address(await server.start())
        await server.wait()
    finally:
        await server.close()
