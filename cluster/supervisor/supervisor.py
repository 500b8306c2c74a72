"""The supervisor's server: processes join it, learn of each other, and are started, watched and ended by it.

It decides nothing itself (`core.py` does) and starts nothing itself (a `Launcher` does), and knows nothing of Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any

import grpc

from alignedserve.cancellation import end_tasks
from alignedserve.cluster.launch.launcher import Launcher
from alignedserve.cluster.node.watchdog import Watchdog
from alignedserve.cluster.runtime_dir import agent_socket
from alignedserve.cluster.supervisor import handover
from alignedserve.cluster.supervisor.actions import Action, End, Fence, FenceGuest, Launch
from alignedserve.cluster.supervisor.collector import Collector, cluster_metrics
from alignedserve.cluster.supervisor.core import SupervisorCore
from alignedserve.cluster.supervisor.fencer import Fencer
from alignedserve.cluster.supervisor.integrity import check_cluster
from alignedserve.cluster.supervisor.managed_process import Phase, Slot
from alignedserve.cluster.supervisor.placing import FRESH_S, Placing
from alignedserve.cluster.supervisor.plan import Node, Shape, check_gpus, plan_processes
from alignedserve.cluster.supervisor.recent_events import RecentEvents
from alignedserve.cluster.supervisor.redeploy import NO_CHANGE, Change, follow
from alignedserve.cluster.supervisor.role_settings import Identity, device_of, role_settings
from alignedserve.cluster.supervisor.rolling import ORDER, SERVE_ROLES
from alignedserve.config import Config
from alignedserve.config_sources import to_tree, to_yaml
from alignedserve.control.convert import failure_to_proto
from alignedserve.control.link import Outbox, first_message, follow_on, serve_stream
from alignedserve.control.role import new_incarnation
from alignedserve.control.rpc import RpcServer
from alignedserve.control.samples import with_label
from alignedserve.errors import AlignedServeError, ResourceError
from alignedserve.proc_stat import started_ticks
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.proto import supervisor_pb2_grpc as sv_grpc

logger = logging.getLogger(__name__)

EXIT_REPORT_S = 0.05


class Supervisor(sv_grpc.SupervisorServicer):
    """Life: `start` → `end_all` (ends every process) → `close`; without `end_all` the roles wait for a successor."""

    def __init__(self, config: Config, launcher: Launcher, identity: Identity, *, replaceable: bool = False) -> None:
        """`replaceable`: Ray Serve starts a successor, so node agents may end this process when it hangs."""
        self.config = config  # with the resolved device once `start` has found it
        self.identity = identity  # the cluster's; a successor keeps it
        self.address = ""  # host:port of its gRPC server; "" until `start`
        self.core: SupervisorCore  # all decisions and state of processes; created by `start`
        self._tree: Mapping[str, Any] = {}  # `config` as a tree, for processes and successors; set by `start`
        self._launcher = launcher  # starts, finds and kills processes
        self._replaceable = replaceable
        # The incarnation is 0 until `start`, then newer than any in the cluster.
        self._process = pb.ProcessKey(role="supervisor", id="supervisor-0", incarnation=0)
        self._started_unix_s = time.time()  # for the status; never changes
        self._outboxes: dict[str, Outbox[sv.RoleOrder]] = {}  # by id, of processes with an open stream
        self._told_version = 0  # of the view that was last sent to all processes; 0: none
        self._collector = Collector(self._outboxes)  # asks all processes for their metrics
        self.events = RecentEvents()  # of this supervisor, from `start` to `close`
        self._fencer = Fencer(lambda: self.core.roster, launcher, identity.token)  # ends processes
        self._watchdog = Watchdog(self._on_dead)  # watches the processes of this node
        self._here = ""  # id of this process's node; "" until `start`
        self._changed = asyncio.Event()  # set, and replaced by a new one, when a view is sent
        self._tasks: set[asyncio.Task[None]] = set()  # in progress; a task that is done leaves
        self._server: RpcServer | None = None  # created by `start`
        self._launches = 0  # starts of processes that this supervisor has begun, for the metrics
        self._following: asyncio.Task[None]  # runs `_placing.follow`; from the end of `start` to `end_all`
        self._placing: Placing  # reserves room, and finds nodes; created by `start`
        self._leaving = handover.Leaving(self._pause)  # the hand-over to a successor, if one asks for it
        self._closed = False  # from `close` on: events are ignored
        self.ticked_at = time.monotonic()  # of the last tick, in monotonic seconds; old if this process hangs
        self.stop_asked = asyncio.Event()  # set by `Stop`, or when a stop of a dead predecessor goes on
        self.code = ""
        """Its package version and environment. A successor with another one replaces every process."""
        self.application = ""  # label of metrics if there may be other applications
        self.predecessor: handover.Predecessor | None = None
        """The supervisor that has led the cluster until now, if any. It is told to leave as late as possible."""
        self.command = (0, "")  # pid and host of the command that ends this cluster, if any

    # ---- life

    async def start(self, change: Change = NO_CHANGE) -> None:
        """Serve, find running processes and start the missing ones. `change` says how running processes follow the
        configuration. Raises ResourceError if no node has the required resources."""
        self.events.start()
        nodes = list(await self._launcher.nodes())
        self._here = self._fencer.here = nodes[0].node_id
        found = await self._launcher.find()
        device = device_of(self.config, nodes, found)
        self.config = self.config.on_device(device)
        self._tree = to_tree(self.config)
        told = handover.newest_view(found, self.predecessor)
        self._process.incarnation = new_incarnation(handover.newest_incarnation(told))
        shape = Shape(told.prefill, told.decode) if told.prefill else Shape.configured(self.config)
        self.core = SupervisorCore(
            self.config,
            plan_processes(self.config, device, shape),
            shape=shape,
            first_version=max(time.time_ns() // 1_000_000, told.version + 1_000_000),  # also if the clock was set back
            agent_socket=self._agent_socket,
        )
        self._placing = Placing(
            self.core, self._launcher, self.identity.cluster_id, self._fencer, self._carry_out, self._leaving
        )
        now = time.monotonic()
        handover.adopt(self.core, told, found, now)
        if change.shape is not None:
            self.core.scaling.followed = Shape(told.followed_prefill, told.followed_decode)
        if not self._launcher.elastic:
            check_gpus(self.config, sum(node.gpus for node in nodes), shape)
        await self._placing.settle(now)
        self.core.expect(handover.known_processes(found, told), now)  # node agents have their slots now
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
        handover.log_found(found, self.predecessor)
        announced = self._launcher.announce(self.address)
        if self.predecessor is None:
            self._spawn(announced)
        else:  # it releases the processes once they can find this supervisor
            await announced
            has_let_go = await self.predecessor.leave_to(self.address)
            leaving = self._launcher.announce(self.address, leave=True)
            if has_let_go:
                self._spawn(leaving)  # it has no effect on processes that have joined
            else:
                await leaving
                await handover.wait_followed(self._launcher, self._process.incarnation)
        self._carry_out(self.core.begin(time.monotonic(), [running.settings.id for running in found]))
        if not change.is_none:
            self._spawn(follow(change, self))
        if told.stop_asked and self.predecessor is None:
            self._spawn(self._go_on_to_the_end())
        self._spawn(self._tick())
        self._following = self._spawn(self._placing.follow())

    def announce_end(self, grace_s: float = 0.0) -> None:
        """Tell all processes that `end_all` follows. Gateways get `grace_s` seconds for open requests."""
        self.core.end(grace_s)
        self._publish()

    def retire_gateways(self) -> bool:
        """Make Ray Serve end all gateways. Returns whether there are any."""
        self.core.rolling.retire_all()
        self.core.view_version += 1
        self._publish()
        return bool(self.core.roster.guests)

    async def wait_drained(self, timeout_s: float) -> bool:
        """Wait until no gateway holds a request. False after `timeout_s`. Call it after `announce_end`."""
        deadline = time.monotonic() + timeout_s
        while not self.core.roster.guests_drained():
            if time.monotonic() >= deadline:
                return False
            await self.wait_changed(0.2)
        return True

    async def end_all(self, grace_s: float = 8.0) -> None:
        """Tell all processes to end, and kill the rest after `grace_s`, node agents last. Returns when all are dead."""
        self.announce_end()
        agents = [slot for slot in self.core.roster.slots.values() if slot.planned.role == "node_agent"]
        others = [slot for slot in self.core.roster.slots.values() if slot.planned.role != "node_agent"]
        try:
            await self._end_slots(others, grace_s)
        finally:  # before the node agents end, which do this if the supervisor is killed
            self._following.cancel()
            await self._launcher.release()
        await self._end_slots(agents, min(grace_s, 3.0))

    async def close(self) -> None:
        self._closed = True
        self._let_roles_go()
        if self._server is not None:
            await self._server.stop()
        await end_tasks(self._tasks)
        self._watchdog.close()
        self.events.stop()
        await self._launcher.close()

    def _let_roles_go(self) -> None:
        """End the streams of all processes, so that they look for the leading supervisor."""
        for outbox in self._outboxes.values():
            outbox.close()

    @property
    def left_to(self) -> str:
        """The address of the successor that leads the cluster now; "" while it is this one."""
        return self._leaving.address

    def _pause(self, paused: bool) -> None:
        self.core.paused = paused

    async def wait_left(self) -> None:
        """Wait until a successor leads the cluster. `close` then lets the processes join it."""
        await self._leaving.wait()

    async def wait_changed(self, timeout_s: float) -> None:
        """Wait until the state of a process changes, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    # ---- gRPC

    async def Join(
        self, requests: AsyncIterator[sv.RoleReport], context: grpc.aio.ServicerContext[sv.RoleReport, sv.RoleOrder]
    ) -> AsyncIterator[sv.RoleOrder]:
        hello: sv.RoleHello = await first_message(requests, "hello", context)
        if self.left_to:  # no refusal, which would end the process: it will find the successor
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the supervisor at {self.left_to} leads the cluster")
        key = hello.process
        refusal = self.core.joined(hello, time.monotonic(), time.time())
        if refusal is not None:
            logger.warning("refused %s/%d: %s", key.id, key.incarnation, refusal.message)
            yield sv.RoleOrder(refused=refusal)
            return
        logger.info("%s joined: pid %d at %s", key.id, hello.pid, hello.address)
        outbox: Outbox[sv.RoleOrder] = Outbox()
        follow_on(self._outboxes, key.id, outbox)
        outbox.put(sv.RoleOrder(view=self.core.view()))
        self._publish()
        try:
            async for order in serve_stream(requests, outbox, lambda report: self._on_report(key, report)):
                yield order
        finally:
            if self._outboxes.get(key.id) is outbox:  # otherwise it has joined again meanwhile
                del self._outboxes[key.id]
                self._carry_out(self.core.broke(key, time.monotonic()))

    async def GetStatus(
        self, request: pb.Empty, context: grpc.aio.ServicerContext[pb.Empty, sv.ClusterStatus]
    ) -> sv.ClusterStatus:
        return await self.status()

    async def GetLive(
        self, request: sv.LiveQuery, context: grpc.aio.ServicerContext[sv.LiveQuery, sv.LiveState]
    ) -> sv.LiveState:
        lives = {member.key.id: member.beat.live for member, _ in self.core.roster.members() if member.beat.live}
        status = await self.status(fresh=False)
        config = to_yaml(self.config, docs=False) if request.config else ""
        return sv.LiveState(status=status, lives=lives, events=self.events.newest(), config=config)

    async def CheckIntegrity(
        self, request: pb.Empty, context: grpc.aio.ServicerContext[pb.Empty, sv.IntegrityReport]
    ) -> sv.IntegrityReport:
        return await self.check_integrity()

    async def check_integrity(self) -> sv.IntegrityReport:
        """Make every process recount its stores and check its state now."""
        return await check_cluster(self.core.roster, self.identity.token)

    async def Scale(
        self, request: sv.ScaleRequest, context: grpc.aio.ServicerContext[sv.ScaleRequest, sv.ScaleReply]
    ) -> sv.ScaleReply:
        try:
            return await self.scale(request.prefill, request.decode)
        except AlignedServeError as error:
            return sv.ScaleReply(refused=failure_to_proto(error))

    async def scale(self, prefill: int = 0, decode: int = 0) -> sv.ScaleReply:
        """Begin to change the numbers of instances; 0: unchanged. Raises AlignedServeError if that is impossible."""
        free_bytes = await self._fencer.free_memory_bytes()
        with self._leaving.finishes():
            self._carry_out(self.core.scale(prefill, decode, free_bytes, time.monotonic()))
            try:
                await self._placing.look()
            except ResourceError as error:
                self.core.scaling.give_up(error.message, time.monotonic())
                self._carry_out(self.core.tick(time.monotonic()))
                raise
        shape = self.core.scaling.shape
        return sv.ScaleReply(prefill=shape.prefill, decode=shape.decode)

    async def RestartRoles(
        self, request: sv.RestartRequest, context: grpc.aio.ServicerContext[sv.RestartRequest, sv.RestartReply]
    ) -> sv.RestartReply:
        try:
            await self.restart(list(request.roles))
        except AlignedServeError as error:
            return sv.RestartReply(refused=failure_to_proto(error))
        return sv.RestartReply(restart=self.core.rolling.state)

    async def restart(self, roles: Collection[str] = ()) -> None:
        """Begin a rolling restart of these roles; by default of all roles whose processes are started again. Raises
        AlignedServeError if that is impossible."""
        free_bytes = await self._fencer.free_memory_bytes()
        known = ORDER if self._replaceable else ORDER[: -len(SERVE_ROLES)]
        self._carry_out(self.core.restart(roles or known, free_bytes, time.monotonic(), time.time_ns()))

    async def HandOver(
        self, request: sv.HandOverRequest, context: grpc.aio.ServicerContext[sv.HandOverRequest, sv.HandOverReply]
    ) -> sv.HandOverReply:
        await self._leaving.asked(request.address)
        if request.address:  # from now on the successor leads the processes
            self._let_roles_go()
        config, view = json.dumps(self._tree), self.core.view()
        resizing = self.core.scaling.followed != Shape.configured(self.config)
        return sv.HandOverReply(config=config, code=self.code, view=view, resizing=resizing)

    async def Stop(self, request: pb.Empty, context: grpc.aio.ServicerContext[pb.Empty, sv.StopReply]) -> sv.StopReply:
        self._stop()
        grace_s, (pid, host) = self.config.gateway.drain_s, self.command
        return sv.StopReply(grace_s=grace_s, command_pid=pid, command_host=host)

    def _stop(self) -> None:
        self.core.stop_asked = True
        self.announce_end(self.config.gateway.drain_s)
        self.stop_asked.set()

    async def _go_on_to_the_end(self) -> None:
        """Continue the stop that a supervisor began before it died. Open requests need every role once more."""
        until_s = time.monotonic() + self.config.gateway.drain_s
        while not self.core.was_ready and time.monotonic() < until_s:
            await self.wait_changed(0.2)
        self._stop()

    async def status(self, *, fresh: bool = True) -> sv.ClusterStatus:
        """All living processes and, with `fresh`, the metrics of this moment."""
        if fresh:
            await self._collector.refresh()
        status = self.core.status(self.identity.cluster_id)
        status.peers.append(self._as_peer())
        status.metrics = cluster_metrics(self.core.roster, self._launches)
        if self.application:
            status.metrics = with_label(status.metrics, "application", self.application)
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
            started_ticks=started_ticks(os.getpid()),
        )

    def _on_report(self, key: pb.ProcessKey, report: sv.RoleReport) -> None:
        if report.WhichOneof("body") == "heartbeat":
            self._carry_out(self.core.heard(key, report.heartbeat, time.monotonic()))
            self._collector.heard(key.id)
            if key.role == "gateway":
                self.events.count(key, report.heartbeat.gauges, time.monotonic())
            if key.role == "node_agent" and key.id in self._outboxes:
                self._outboxes[key.id].put(sv.RoleOrder(heard=pb.Empty()))

    def _carry_out(self, actions: list[Action]) -> None:
        if self._closed:  # late events are ignored: the processes belong to a successor
            return
        for action in actions:
            match action:
                case Launch():
                    self._leaving.finish(self._spawn(self._launch(action)))
                case End():
                    self._order_end(action.role_id)
                case Fence():
                    self._spawn(self._end_process(action))
                case FenceGuest():
                    self._spawn(self._end_guest(action))
        self._publish()

    def _publish(self) -> None:
        """Send the view to all processes if it has changed."""
        if self.core.view_version == self._told_version:
            return
        self._told_version = self.core.view_version
        order = sv.RoleOrder(view=self.core.view())
        for outbox in self._outboxes.values():
            outbox.put(order)
        self._changed.set()
        self._changed = asyncio.Event()

    def _agent_socket(self, node: Node, number: int) -> str:
        return agent_socket(self.identity.cluster_id, number, here=node.node_id == self._here)

    async def _launch(self, action: Launch) -> None:
        role_id, reason = action.planned.id, "it was not to be started any more"
        self._launches += 1
        try:
            await self._placing.look(FRESH_S)
            if await self._start(role_id, action.generation):
                return
        except AlignedServeError as error:
            reason = error.message
        except Exception as error:
            logger.exception("%s could not be started", role_id)
            reason = repr(error)
        # Whatever the cause, the slot must not wait for a process that was not started.
        self._exited(role_id, action.generation, reason)

    async def _start(self, role_id: str, generation: int) -> bool:
        """Whether the process was still to be started, and has been."""
        if (slot := self.core.roster.starting(role_id, generation)) is None:
            return False
        again = slot.failures > 1
        asked = role_settings(self.core, slot, self._tree, self.identity, self.address)
        if (settings := await self._placing.prepare(asked, generation, again=again)) is None:
            return False
        spare_id = self.core.take_spare(slot, time.monotonic())  # not earlier: a start may be given up until here
        self._publish()
        await self._launcher.launch(settings, spare_id, again=again)
        self._watch(role_id, generation)
        return True

    def _watch(self, role_id: str, generation: int) -> None:
        self._launcher.watch(role_id, lambda reason: self._exited(role_id, generation, reason))

    def _exited(self, role_id: str, generation: int, reason: str) -> None:
        self._carry_out(self.core.ended(role_id, generation, reason, time.monotonic()))

    async def _end_process(self, fence: Fence) -> None:
        logger.warning("ending %s: %s", fence.role_id, fence.reason)
        slots = self.core.roster.slots
        slot = slots[fence.role_id]

        def still_wanted() -> bool:
            """A removed process leaves its slot when it ends; its id may be reused."""
            there = slots.get(fence.role_id) is slot
            return there and slot.phase is Phase.ENDING and slot.generation == fence.generation

        if await self._fencer.end(fence.role_id, fence.hello, still_wanted):
            self._exited(fence.role_id, fence.generation, fence.reason)

    async def _end_guest(self, fence: FenceGuest) -> None:
        key = fence.hello.process
        logger.warning("ending %s: %s", key.id, fence.reason)
        roster = self.core.roster
        if await self._fencer.end(key.id, fence.hello, lambda: bool(roster.member(key) or roster.found(key))):
            self._carry_out(self.core.process_ended(key, fence.reason, time.monotonic()))

    def _on_dead(self, key: pb.ProcessKey) -> None:
        """The kernel reports the end first. The launcher may report the reason a moment later."""
        asyncio.get_running_loop().call_later(EXIT_REPORT_S, self._process_ended, key)

    def _process_ended(self, key: pb.ProcessKey) -> None:
        self._carry_out(self.core.process_ended(key, "its process has ended", time.monotonic()))

    async def _end_slots(self, slots: list[Slot], grace_s: float) -> None:
        for slot in slots:
            self._order_end(slot.planned.id)
        await self._all_dead(slots, grace_s)
        await asyncio.gather(*(self._fencer.kill(slot) for slot in slots if slot.phase is not Phase.WAITING))
        await self._all_dead(slots, 5.0)

    def _order_end(self, role_id: str) -> None:
        if (outbox := self._outboxes.get(role_id)) is not None:
            outbox.put(sv.RoleOrder(end=pb.Empty()))

    async def _all_dead(self, slots: list[Slot], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while any(slot.phase is not Phase.WAITING for slot in slots) and time.monotonic() < deadline:
            await self.wait_changed(min(0.2, timeout_s))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(min(0.25, self.config.supervisor.heartbeat_s / 2))
            self.ticked_at = time.monotonic()
            self._watchdog.follow(self._here, self.core.roster.watched())
            self.core.seen(self._watchdog.look(), self.ticked_at)
            self._carry_out(self.core.tick(self.ticked_at))

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the supervisor failed at its work", exc_info=error)
