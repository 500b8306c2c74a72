"""The supervisor's server: roles join it, hear of each other, and are started, watched and ended by it.

It decides nothing itself (`core.py` does) and starts nothing itself (a `Launcher` does), and knows nothing of Ray.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from alignedserve.cluster.collector import Collector, cluster_metrics
from alignedserve.cluster.core import Action, End, Fence, FenceGuest, Launch, SupervisorCore
from alignedserve.cluster.fencer import Fencer
from alignedserve.cluster.integrity import check_cluster
from alignedserve.cluster.launcher import Launcher
from alignedserve.cluster.members import Phase, Slot
from alignedserve.cluster.plan import Node, PlannedRole, Shape, plan_roles, resolve_device
from alignedserve.cluster.watchdog import Watchdog
from alignedserve.config import Config
from alignedserve.config_sources import to_tree
from alignedserve.control.convert import failure_to_proto
from alignedserve.control.link import Outbox, first_message, serve_stream
from alignedserve.control.role import new_incarnation
from alignedserve.control.rpc import RpcServer
from alignedserve.control.runtime import RoleSettings
from alignedserve.errors import AlignedServeError
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.proto import supervisor_pb2_grpc as sv_grpc

logger = logging.getLogger(__name__)

EXIT_NEWS_S = 0.05


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes a cluster this one. A supervisor's successor goes on with the same."""

    cluster_id: str
    token: str = field(repr=False)
    agent_socket: str = ""


class Supervisor(sv_grpc.SupervisorServicer):
    """Life: `start` → `end_all` (ends every process) → `close`; without `end_all` the roles wait for a successor."""

    def __init__(self, config: Config, launcher: Launcher, identity: Identity, *, replaceable: bool = False) -> None:
        """`replaceable`: somebody starts a successor, so node agents may end this process when it hangs."""
        self.config = config
        self.identity = identity
        self.address = ""
        self.home = Node("")
        self.core: SupervisorCore
        self._tree: Mapping[str, Any] = {}
        self._launcher = launcher
        self._replaceable = replaceable
        self._process = pb.ProcessKey(role="supervisor", id="supervisor-0", incarnation=new_incarnation())
        self._started_unix_s = time.time()
        self._outboxes: dict[str, Outbox[sv.RoleOrder]] = {}
        self._told_version = 0
        self._collector = Collector(self._outboxes)
        self._fencer = Fencer(lambda: self.core.roster, launcher, identity.token)
        self._watchdog = Watchdog(self._on_dead)
        self._here = ""
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: RpcServer | None = None
        self._launches = 0
        self.ticked_at = time.monotonic()
        self.stop_asked = asyncio.Event()
        self.command = (0, "")  # pid and machine of the command that ends this cluster, where there is one

    # ---- life

    async def start(self) -> None:
        """Serve, find what runs, start what does not. Raises ResourceError where no node has what is asked for."""
        nodes = list(await self._launcher.nodes())
        self._here = self._fencer.here = nodes[0].node_id
        self.home = _choose_home(self.config, nodes)
        self.config = self.config.on_device(resolve_device(self.config, self.home.gpus))
        self._tree = to_tree(self.config)
        found = await self._launcher.find()
        told = max((running.view for running in found), key=lambda view: view.version, default=sv.ClusterView())
        shape = Shape(told.prefill, told.decode) if told.prefill else Shape.configured(self.config)
        self.core = SupervisorCore(
            self.config,
            plan_roles(self.config, self.home.gpus, shape),
            shape=shape,
            gpus=self.home.gpus,
            first_version=time.time_ns() // 1_000_000,
        )
        running_roles = [PlannedRole(r.settings.role, r.settings.id, r.settings.device) for r in found]
        self.core.scaling.adopt(told, running_roles, time.monotonic())
        self.core.planner.adopt(told.model_info, told.store_plan)
        self._server = RpcServer(self.identity.token, nodes[0].host)
        self._server.add(sv_grpc.add_SupervisorServicer_to_server, self)
        self.address = await self._server.start()
        self.core.own_pid = os.getpid()
        self.core.incarnation = self._process.incarnation
        if self._replaceable:
            self.core.supervisor = self._as_peer()
        for running in found:
            slot = self.core.roster.slots.get(running.settings.id)
            if slot is None:
                await self._launcher.kill(running.settings.id)
            else:
                self._watch(running.settings.id, slot.generation)
        if found:
            logger.info("found running: %s", ", ".join(running.settings.id for running in found))
        self._carry_out(self.core.begin(time.monotonic(), [running.settings.id for running in found]))
        self._spawn(self._announce())
        self._spawn(self._tick())

    def announce_end(self, grace_s: float = 0.0) -> None:
        """Tell everyone that `end_all` is near: gateways have `grace_s` for what they hold."""
        self.core.end(grace_s)
        self._publish()

    async def wait_drained(self, timeout_s: float) -> bool:
        """Returns once no gateway holds a request, or after `timeout_s`; which of the two. After `announce_end`."""
        deadline = time.monotonic() + timeout_s
        while not self.core.roster.guests_drained():
            if time.monotonic() >= deadline:
                return False
            await self.wait_changed(0.2)
        return True

    async def end_all(self, grace_s: float = 8.0) -> None:
        """Order every role to end, kill what has not within `grace_s`, agents last. Returns when all are dead."""
        self.announce_end()
        agents = [slot for slot in self.core.roster.slots.values() if slot.planned.role == "node_agent"]
        others = [slot for slot in self.core.roster.slots.values() if slot.planned.role != "node_agent"]
        await self._end_slots(others, grace_s)
        await self._end_slots(agents, min(grace_s, 3.0))

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for outbox in self._outboxes.values():
            outbox.close()
        self._watchdog.close()
        await self._launcher.close()
        if self._server is not None:
            await self._server.stop()

    async def wait_changed(self, timeout_s: float) -> None:
        """Returns when somebody's state changed, or the time is over."""
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except TimeoutError:
            return

    # ---- gRPC

    async def Join(
        self, requests: AsyncIterator[sv.RoleReport], context: grpc.aio.ServicerContext[sv.RoleReport, sv.RoleOrder]
    ) -> AsyncIterator[sv.RoleOrder]:
        hello: sv.RoleHello = await first_message(requests, "hello", context)
        key = hello.process
        refusal = self.core.joined(hello, time.monotonic(), time.time())
        if refusal is not None:
            logger.warning("refused %s/%d: %s", key.id, key.incarnation, refusal.message)
            yield sv.RoleOrder(refused=refusal)
            return
        logger.info("%s joined: pid %d at %s", key.id, hello.pid, hello.address)
        outbox: Outbox[sv.RoleOrder] = Outbox()
        if (old := self._outboxes.get(key.id)) is not None:
            old.close()
        self._outboxes[key.id] = outbox
        outbox.put(sv.RoleOrder(view=self.core.view()))
        self._publish()
        try:
            async for order in serve_stream(requests, outbox, lambda report: self._on_report(key, report)):
                yield order
        finally:
            if self._outboxes.get(key.id) is outbox:  # else it has joined again meanwhile
                del self._outboxes[key.id]
                self._carry_out(self.core.broke(key, time.monotonic()))

    async def GetStatus(
        self, request: pb.Empty, context: grpc.aio.ServicerContext[pb.Empty, sv.ClusterStatus]
    ) -> sv.ClusterStatus:
        return await self.status()

    async def CheckIntegrity(
        self, request: pb.Empty, context: grpc.aio.ServicerContext[pb.Empty, sv.IntegrityReport]
    ) -> sv.IntegrityReport:
        return await self.check_integrity()

    async def check_integrity(self) -> sv.IntegrityReport:
        """Every process recounts its stores and books, now."""
        return await check_cluster(self.core.roster, self.identity.token)

    async def Scale(
        self, request: sv.ScaleRequest, context: grpc.aio.ServicerContext[sv.ScaleRequest, sv.ScaleReply]
    ) -> sv.ScaleReply:
        try:
            return await self.scale(request.prefill, request.decode)
        except AlignedServeError as error:
            return sv.ScaleReply(refused=failure_to_proto(error))

    async def scale(self, prefill: int = 0, decode: int = 0) -> sv.ScaleReply:
        """Begin to have other numbers of instances; 0: as it is. Raises AlignedServeError where that cannot be."""
        available_bytes = await self._fencer.available_memory_bytes()
        self._carry_out(self.core.scale(prefill, decode, available_bytes, time.monotonic()))
        shape = self.core.scaling.shape
        return sv.ScaleReply(prefill=shape.prefill, decode=shape.decode)

    async def Stop(self, request: pb.Empty, context: grpc.aio.ServicerContext[pb.Empty, sv.StopReply]) -> sv.StopReply:
        grace_s = self.config.gateway.drain_s
        self.announce_end(grace_s)
        self.stop_asked.set()
        return sv.StopReply(grace_s=grace_s, command_pid=self.command[0], command_host=self.command[1])

    async def status(self, *, fresh: bool = True) -> sv.ClusterStatus:
        """Everyone who lives and, with `fresh`, the metrics of this moment."""
        if fresh:
            await self._collector.refresh()
        status = self.core.status(self.identity.cluster_id)
        status.peers.append(self._as_peer())
        status.metrics = cluster_metrics(self.core.roster, self._launches)
        return status

    # ---- inside

    def _as_peer(self) -> sv.Peer:
        return sv.Peer(
            process=self._process,
            pid=os.getpid(),
            node_id=self._here,
            address=self.address,
            state="ready",
            holds=f"{len(self._outboxes)} roles",
            started_unix_s=self._started_unix_s,
        )

    def _on_report(self, key: pb.ProcessKey, report: sv.RoleReport) -> None:
        if report.WhichOneof("body") == "heartbeat":
            self._carry_out(self.core.heard(key, report.heartbeat, time.monotonic()))
            self._collector.heard(key.id)
            if key.role == "node_agent" and key.id in self._outboxes:
                self._outboxes[key.id].put(sv.RoleOrder(heard=pb.Empty()))

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Launch():
                    self._spawn(self._launch(action))
                case End():
                    self._order_end(action.role_id)
                case Fence():
                    self._spawn(self._end_process(action))
                case FenceGuest():
                    self._spawn(self._end_guest(action))
        self._publish()

    def _publish(self) -> None:
        """Tell everyone, where there is news."""
        if self.core.view_version == self._told_version:
            return
        self._told_version = self.core.view_version
        order = sv.RoleOrder(view=self.core.view())
        for outbox in self._outboxes.values():
            outbox.put(order)
        self._changed.set()
        self._changed = asyncio.Event()

    def _settings(self, slot: Slot) -> RoleSettings:
        return RoleSettings(
            role=slot.planned.role,
            id=slot.planned.id,
            config=self._tree,
            cluster_id=self.identity.cluster_id,
            token=self.identity.token,
            node_id=self.home.node_id,
            host=self.home.host,
            agent_socket=self.identity.agent_socket,
            supervisor_address=self.address,
            device=slot.device or slot.planned.device,
            pinned=bool(slot.device),
        )

    async def _launch(self, action: Launch) -> None:
        role_id = action.planned.id
        self._launches += 1
        try:
            await self._launcher.launch(self._settings(self.core.roster.slots[role_id]), action.spare_id)
        except AlignedServeError as error:
            self._exited(role_id, action.generation, error.message)
        else:
            self._watch(role_id, action.generation)

    def _watch(self, role_id: str, generation: int) -> None:
        self._launcher.watch(role_id, lambda reason: self._exited(role_id, generation, reason))

    def _exited(self, role_id: str, generation: int, reason: str) -> None:
        self._carry_out(self.core.ended(role_id, generation, reason, time.monotonic()))

    async def _end_process(self, fence: Fence) -> None:
        logger.warning("ending %s: %s", fence.role_id, fence.reason)
        slot = self.core.roster.slots[fence.role_id]
        if await self._fencer.end(
            fence.role_id,
            fence.hello,
            lambda: slot.phase is Phase.ENDING and slot.generation == fence.generation,
        ):
            self._exited(fence.role_id, fence.generation, fence.reason)

    async def _end_guest(self, fence: FenceGuest) -> None:
        key = fence.hello.process
        logger.warning("ending %s: %s", key.id, fence.reason)
        if await self._fencer.end(key.id, fence.hello, lambda: self.core.roster.member(key) is not None):
            self._carry_out(self.core.process_ended(key, fence.reason, time.monotonic()))

    def _on_dead(self, key: pb.ProcessKey) -> None:
        """The kernel says so, before anybody else; whoever started it may say why it ended, a moment later."""
        asyncio.get_running_loop().call_later(EXIT_NEWS_S, self._process_ended, key)

    def _process_ended(self, key: pb.ProcessKey) -> None:
        self._carry_out(self.core.process_ended(key, "its process has ended", time.monotonic()))

    async def _end_slots(self, slots: list[Slot], grace_s: float) -> None:
        for slot in slots:
            self._order_end(slot.planned.id)
        await self._all_dead(slots, grace_s)
        for slot in slots:
            if slot.phase is not Phase.WAITING:
                await self._fencer.kill(slot)
        await self._all_dead(slots, 5.0)

    def _order_end(self, role_id: str) -> None:
        if (outbox := self._outboxes.get(role_id)) is not None:
            outbox.put(sv.RoleOrder(end=pb.Empty()))

    async def _all_dead(self, slots: list[Slot], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while any(slot.phase is not Phase.WAITING for slot in slots) and time.monotonic() < deadline:
            await self.wait_changed(min(0.2, timeout_s))

    async def _announce(self) -> None:
        await self._launcher.announce(self.address)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(min(0.25, self.config.supervisor.heartbeat_s / 2))
            self.ticked_at = time.monotonic()
            self._watchdog.follow(self._here, (member for member, _ in self.core.roster.members()))
            self.core.seen(self._watchdog.look(), self.ticked_at)
            self._carry_out(self.core.tick(self.ticked_at))

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the supervisor failed at its work", exc_info=error)


def _choose_home(config: Config, nodes: list[Node]) -> Node:
    """One cell lies on one node: the supervisor's own, or the first that has the GPUs."""
    wanted = config.cluster.prefill + config.cluster.decode
    if config.cluster.device == "cpu":
        return nodes[0]
    enough = [node for node in nodes if node.gpus >= (1 if config.cluster.share_gpu else wanted)]
    return (enough or sorted(nodes, key=lambda node: -node.gpus))[0]
