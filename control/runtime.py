"""The base of every role's process: its settings, its gRPC server and its connection to the supervisor."""

from __future__ import annotations

import asyncio
import gc
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import grpc

from alignedserve import logs
from alignedserve.cancellation import end_tasks
from alignedserve.config import Config
from alignedserve.config_sources import from_tree
from alignedserve.control.convert import failure_to_proto
from alignedserve.control.metrics_port import MetricsPort
from alignedserve.control.role import ORPHANED, RoleHost, new_incarnation
from alignedserve.control.rpc import RpcServer
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.proto import supervisor_pb2_grpc as sv_grpc
from alignedserve.ranks.degrees import devices_in
from alignedserve.registry import Registry

logger = logging.getLogger(__name__)

LOCATE_TIMEOUT_S = 1.0  # the node agent may hang, too

ROLES: Registry[type[RoleServer]] = Registry(
    "role",
    {
        "prefill": "alignedserve.prefill_worker.actor:PrefillServer",
        "decode": "alignedserve.decode_worker.actor:DecodeServer",
        "kv_pool": "alignedserve.kv_pool.actor:KvPoolServer",
        "scheduler": "alignedserve.scheduler.process.actor:SchedulerServer",
        "node_agent": "alignedserve.cluster.node.node_agent:NodeAgentServer",
        "spare": "alignedserve.cluster.launch.spare:SpareServer",
    },
)


@dataclass(frozen=True, slots=True)
class RoleSettings:
    """The settings that a role's process is started with: plain values, so that any launcher can pass them on.

    `config` is a tree from `config_sources.to_tree`. `agent_socket` is the Unix socket of this node's node agent, which
    may start later than the role. `device` is "cpu" or "cuda:N", or of several ranks the GPUs that they have by turns,
    "cuda:N,M"; if `pinned`, it is the predecessor's and must not be changed. `after` is the predecessor's incarnation.
    `rank_hosts`: addresses of the processes that have the instance's ranks on other nodes, in order.
    """

    role: str
    id: str
    config: Mapping[str, Any]
    cluster_id: str
    token: str = field(repr=False)
    node_id: str = ""
    host: str = "127.0.0.1"
    agent_socket: str = ""
    supervisor_address: str = ""
    device: str = "cpu"
    pinned: bool = False
    after: int = 0
    rank_hosts: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def devices(self) -> list[str]:
        """Those of its ranks, the first one's first."""
        return devices_in(self.device)


class RoleServer(ABC):
    """The base class of every role. Subclasses override the hooks below, which all run on the role's event loop.

    Lifecycle: `start` (serves, joins, then runs `on_start` in the background) → `wait` for the end → `close`. The event
    loop, the process and its log belong to the host (`cluster/launch/role_main.py`; for a gateway, Ray Serve).
    An exception in `on_start` sets the state "failed" with the error, and the supervisor decides what to do.
    """

    role: ClassVar[str]

    def __init__(self, settings: RoleSettings) -> None:
        self.settings = settings  # as the process was started; they never change
        self.config: Config = from_tree(settings.config)  # `settings.config`, as values
        # Its incarnation is newer than the predecessor's; it never changes.
        self.process = pb.ProcessKey(role=self.role, id=settings.id, incarnation=new_incarnation(settings.after))
        self.state = "starting"  # sent with each heartbeat; changed by `set_state` and `fail`
        self.progress = 0  # grows with its work; sent with each heartbeat, so that a hang is noticed
        self.busy = False
        """Whether there is work to do now. If so, `progress` must grow."""
        self.step_s = 0.0  # longest step of its work in seconds; sets how long it may be without progress
        self.address = ""  # host:port of its gRPC server; "" until `start`
        self.host: RoleHost | None = None  # the stream to the supervisor, and the last view; None until `start`
        self._supervisor_address = ""  # as told by `set_supervisor` last; "": never
        self.failure: BaseException | None = None
        """Why the state is "failed"."""
        self.orphaned = False
        """Whether the role ends because there is no supervisor any more."""
        self.end_reason = ""
        """Why the role must end; "" while it must not."""
        self._ended = asyncio.Event()  # set by `end`, with `end_reason`
        self._start_task: asyncio.Task[None] | None = None  # runs `on_start`; None until `start`
        self._server = RpcServer(settings.token, settings.host)  # serves this role's services from `start` to `close`
        self._metrics_port: MetricsPort | None = None  # with `cluster.role_metrics`, from `start` to `close`
        self._shown_metrics = ""  # of the last heartbeat

    # ---- hooks

    @abstractmethod
    def servicers(self) -> Sequence[tuple[Callable[[Any, Any], None], object]]:
        """A pair `(add_…Servicer_to_server, servicer)` for each service of the role."""

    @abstractmethod
    async def on_start(self) -> None:
        """Prepares the role for work. The role calls `set_state("ready")` here or later."""

    async def on_view(self, view: sv.ClusterView) -> None:  # noqa: B027  # not every role follows the view
        """Handles a new view of the cluster."""

    async def on_close(self) -> None:  # noqa: B027
        """Releases all resources."""

    def describe(self) -> sv.Heartbeat:
        """The next heartbeat, without state and failure. It may set `progress`, `busy` and `step_s`."""
        return sv.Heartbeat()

    async def check_integrity(self) -> list[sv.BookCheck]:
        """Recounts all stores and state of this process, including those that other threads own."""
        return []

    async def locate_supervisor(self) -> str | None:
        """The address of a restarted supervisor, from the node agent or from `set_supervisor`; None if unknown."""
        if not self.settings.agent_socket:
            return self._supervisor_address or None
        from alignedserve.errors import AlignedServeError
        from alignedserve.transfer.segments import SegmentClient

        client = SegmentClient(self.settings.agent_socket, self.settings.token, timeout_s=LOCATE_TIMEOUT_S)
        try:
            info = await asyncio.to_thread(client.info)
        except (AlignedServeError, OSError):
            return self._supervisor_address or None
        address = info.get("supervisor_address")
        return str(address) if address else None

    # ---- life

    async def start(self) -> None:
        """Serves, joins the supervisor, runs `on_start` in the background. Raises ConfigError as `RpcServer.start`."""
        self._server.add(sv_grpc.add_RoleServicer_to_server, _Describer(self))
        for register, servicer in self.servicers():
            self._server.add(register, servicer)
        self.address = await self._server.start()
        if self.config.cluster.role_metrics:
            try:
                self._metrics_port = MetricsPort(self.settings.host, lambda: self._shown_metrics)
            except OSError as error:  # the role serves without
                logger.warning("no page of metrics can be served on %s: %s", self.settings.host, error)
        self.host = RoleHost(
            self.process,
            self.address,
            self.settings.supervisor_address,
            self.settings.token,
            self.heartbeat,
            self._on_view,
            self.end,
            node_id=self.settings.node_id,
            device=self.settings.device,
            metrics_port=0 if self._metrics_port is None else self._metrics_port.port,
            heartbeat_s=self.config.supervisor.heartbeat_s,
            orphan_after_s=self.config.supervisor.orphan_after_s,
            locate=self.locate_supervisor,
        )
        self.host.start()
        self._start_task = asyncio.get_running_loop().create_task(self._get_ready())

    async def _get_ready(self) -> None:
        try:
            await self.on_start()
        except asyncio.CancelledError:
            raise
        except Exception as error:  # reported to the supervisor, which decides
            logger.exception("%s cannot start", self.settings.id)
            self.fail(error)

    async def _on_view(self, view: sv.ClusterView) -> None:
        try:
            await self.on_view(view)
        except Exception as error:  # a role that cannot follow the cluster must not serve
            logger.exception("%s cannot follow the cluster's view", self.settings.id)
            self.fail(error)

    def set_state(self, state: str) -> None:
        """Changes the state ("starting", "loading", "ready", "draining") and reports it. "failed" is final."""
        if state != self.state and self.state != "failed":
            logger.info("%s -> %s", self.state, state)
            self.state = state
            self.report()

    def fail(self, error: BaseException) -> None:
        """The role cannot continue: sets the state "failed" and reports the error to the supervisor."""
        self.failure = error
        self.state = "failed"
        self.report()

    def report(self) -> None:
        if self.host is not None:
            self.host.report()

    def heartbeat(self) -> sv.Heartbeat:
        try:
            beat = self.describe()
        except Exception as error:  # the heartbeat itself must go out: it carries the failure
            logger.exception("%s cannot describe itself", self.settings.id)
            beat, self.state, self.failure = sv.Heartbeat(), "failed", error
        self._shown_metrics = beat.metrics
        beat.state = self.state
        beat.progress = self.progress
        beat.busy = self.busy
        beat.step_s = self.step_s
        if alarm := logs.alarm():
            beat.alarms.append(alarm)
        if self.failure is not None:
            beat.failure.CopyFrom(failure_to_proto(self.failure))
        return beat

    def end(self, reason: str) -> None:
        """Ends the role: `wait` returns. The first reason is kept."""
        self.orphaned = reason.startswith(ORPHANED)
        if not self.end_reason:
            logger.info("ending: %s", reason)
            self.end_reason = reason
            self._ended.set()

    def set_supervisor(self, address: str) -> None:
        """Notes the supervisor's address, from the launcher. It is used where no node agent answers."""
        self._supervisor_address = address

    def leave_for(self, address: str) -> None:
        """Calls `set_supervisor`, and connects there now, even if the previous supervisor still answers."""
        self.set_supervisor(address)
        if self.host is not None:
            self.host.leave(address)

    async def wait(self) -> None:
        """Returns when the role must end."""
        await self._ended.wait()

    async def close(self) -> None:
        if self._start_task is not None:
            await end_tasks([self._start_task])
        if self._metrics_port is not None:
            await asyncio.to_thread(self._metrics_port.close)
        await self.on_close()
        if self.host is not None:
            await self.host.close()
        await self._server.stop()


class _Describer(sv_grpc.RoleServicer):
    def __init__(self, role: RoleServer) -> None:
        self._role = role

    async def Describe(self, request: pb.Empty, context: grpc.aio.ServicerContext[Any, Any]) -> sv.Heartbeat:
        return self._role.heartbeat()

    async def CheckIntegrity(
        self, request: pb.Empty, context: grpc.aio.ServicerContext[Any, Any]
    ) -> sv.IntegrityReport:
        return sv.IntegrityReport(books=await self._role.check_integrity())


def new_role(settings: RoleSettings) -> RoleServer:
    """Creates the role that the settings name. Call it on a running event loop."""
    return role_class(settings.role)(settings)


def role_class(role: str) -> type[RoleServer]:
    """The class of a role. Raises ConfigError if there is none.

    Garbage collection is paused while it is imported, because it would take a sixth of the time that torch and
    transformers need. What was imported stays, so that later collections need not visit it.
    """
    gc.disable()
    try:
        return ROLES.get(role)
    finally:
        gc.freeze()
        gc.enable()
