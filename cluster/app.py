"""The Ray Serve application: the gateways and the supervisor.

`serve deploy` takes `alignedserve.cluster.app:build` as an import path; the configuration's sections are its `args`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Mapping
from typing import Any, cast

import ray
from ray import serve
from ray.serve import Application
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, LoggingConfig

from alignedserve import __version__, logs
from alignedserve.admin import admin_key
from alignedserve.cluster.launch.actors import ACTORS, RoleActor
from alignedserve.cluster.launch.environment import telemetry_environment
from alignedserve.cluster.launch.preflight import check_model_if_here
from alignedserve.cluster.launch.ray_groups import NAMESPACE
from alignedserve.cluster.launch.ray_launcher import RayLauncher
from alignedserve.cluster.monitoring.ray_metrics import keep_showing, ray_collects
from alignedserve.cluster.records import Record
from alignedserve.cluster.runtime_dir import remove_cluster_dir
from alignedserve.cluster.serve import haproxy_exec
from alignedserve.cluster.supervisor.handover import newer_leader
from alignedserve.cluster.supervisor.inheritance import end_predecessors, from_nothing, inherit
from alignedserve.cluster.supervisor.supervisor import Supervisor
from alignedserve.config import Config
from alignedserve.config_sources import Tree, from_arguments, from_tree, to_tree
from alignedserve.errors import ConfigError, ModelError
from alignedserve.gateway.serve import ray_private
from alignedserve.scheduler.systems import served_settings

logger = logging.getLogger(__name__)

GUESTS_LEAVE_S = 10.0  # beyond gateway.drain_s
ROLES_END_S = 8.0
REPLICA_ENDS_S = 8.0  # beyond gateway.drain_s
ATTENDED_WITHIN_S = 5.0  # `alignedserve serve` asks for the progress once a second
COMMAND_ENDS_S = 15.0
HUNG_AFTER_S = 5.0
RETRY_AFTER_S = 30.0
LOOK_S = 8.0  # includes the 5 s after which a role counts as not answering
LOGGING = LoggingConfig(enable_access_log=False, log_level="WARNING")


@serve.deployment(
    name="Supervisor",
    num_replicas=1,
    max_ongoing_requests=1000,
    ray_actor_options={"num_cpus": 0},
    health_check_period_s=1,
    health_check_timeout_s=10,  # a node agent ends a hung supervisor sooner; if Serve did, all roles would end
    graceful_shutdown_wait_loop_s=0.1,
    logging_config=LOGGING,
)
class SupervisorDeployment:
    """Hosts the supervisor in a replica, and ends what it started when the application is deleted.

    Serve awaits `__del__` once: when the application is deleted, when Serve is shut down, and when it replaces or moves
    the replica, in which case the roles continue. If the replica is killed, `__del__` does not run. Its successor then
    finds the roles by their names and takes them over. Without a successor they end after `supervisor.orphan_after_s`.
    """

    async def __init__(self, tree: Tree, actors: Mapping[str, type[RoleActor]] = ACTORS) -> None:  # type: ignore[misc]
        self._ended = False
        self._begun = asyncio.Event()
        try:
            await self._begin(tree, actors)
        except BaseException:
            self._ended = True
            raise
        finally:
            self._begun.set()

    async def _begin(self, tree: Tree, actors: Mapping[str, type[RoleActor]]) -> None:
        ray_private.close_internal_port()
        self._config = from_tree(tree)
        logs.setup(self._config.log, "supervisor", "supervisor-0")
        context = serve.get_replica_context()
        launcher = RayLauncher(f"{NAMESPACE}{context.app_name}", self._config, actors)
        inheritance = await inherit(launcher, self._config, _code())
        if inheritance.change.replaced_for:
            await end_predecessors(inheritance, launcher)
            launcher, inheritance = RayLauncher(launcher.namespace, self._config, actors), from_nothing()
        self._identity, self._launcher = inheritance.identity, launcher
        self._record = Record(
            self._identity.cluster_id,
            await asyncio.to_thread(http_url, self._config, context.app_name),
            os.getpid(),
            time.time(),
            context.app_name,
            self._config.gateway.api_key_file,
            admin_key(self._identity.token),
        )
        self._supervisor = Supervisor(self._config, launcher, self._identity, replaceable=True)
        self._supervisor.code, self._supervisor.application = _code(), context.app_name
        self._supervisor.predecessor = inheritance.predecessor
        self._tree = tree
        self._failed_at = 0.0
        self._attended_at = -math.inf
        try:
            await self._supervisor.start(inheritance.change)
        except BaseException:
            if inheritance.before is None:  # otherwise the next supervisor takes over the running roles
                await launcher.release()
            raise
        working = (self._record.keep_writing(), self._delete_when_asked(context.app_name), self._leave())
        self._tasks = [asyncio.get_running_loop().create_task(work) for work in working]
        self._showing: asyncio.Task[None] | None = None
        if self._config.cluster.ray_metrics and ray_collects():
            self._showing = asyncio.get_running_loop().create_task(keep_showing(self._metrics))
            self._tasks.append(self._showing)
        await asyncio.sleep(0)  # writes the record before the replica counts as started

    async def join_info(self, tree: Tree | None = None) -> dict[str, Any]:
        """What a gateway replica needs to join. `state` is "" unless this supervisor leads a cluster with the
        configuration `tree`: during a redeploy, another one will soon."""
        leads = not self._supervisor.left_to and tree in (None, self._tree)
        return {
            **(await self.progress() if leads else {"state": "", "failure": None}),
            "supervisor_address": self._supervisor.left_to or self._supervisor.address,
            "token": self._identity.token,
            "cluster_id": self._identity.cluster_id,
            "node_id": self._supervisor.core.nodes.home.node_id,
            "host": self._supervisor.core.nodes.home.host,
            "model_path": self._config.model.path,
            "config": to_tree(self._config),
            "after": self._supervisor.core.roster.newest(),
        }

    async def progress(self, pid: int = 0, host: str = "") -> dict[str, Any]:
        """The cluster's processes and warnings, as plain values, and whether a stop was requested.

        `pid` and `host` are those of the command that will end this cluster. It calls this once a second.
        """
        if pid:
            self._attended_at = time.monotonic()
            self._supervisor.command = (pid, host)
        status = await self._supervisor.status(fresh=False)
        return {
            "state": status.state,
            "stop": self._supervisor.stop_asked.is_set(),
            "missing": list(status.missing),
            "degraded": list(status.degraded),
            "failure": {"code": status.failure.code, "message": status.failure.message}
            if status.failure.code
            else None,
            "roles": [
                {"role": p.process.role, "id": p.process.id, "pid": p.pid, "state": p.state, "holds": p.holds}
                for p in status.peers
            ],
            "warnings": self._supervisor.events.warnings(),
        }

    async def _metrics(self) -> str:
        return (await self._supervisor.status(fresh=False)).metrics

    async def drain(self, grace_s: float) -> dict[str, Any]:
        """Make gateways refuse new requests, and give them `grace_s` for open ones. Returns whether they have drained,
        and the number of open requests.

        A further call can only shorten the time.
        """
        self._supervisor.announce_end(grace_s)
        drained = await self._supervisor.wait_drained(0.0)
        return {"drained": drained, "open": self._supervisor.core.roster.open_requests()}

    async def check_health(self) -> None:
        """Raises if the cluster could not start, or if a rolling restart replaces this supervisor. Kills this process
        if the supervisor hangs.

        Serve then replaces the replica. Without a command that waits, the start is retried until it succeeds.
        """
        if self._ended:
            return
        if self._supervisor.core.rolling.supervisor_due:
            raise RuntimeError("a rolling restart replaces this supervisor")
        failure = self._supervisor.core.failure
        if failure is not None:
            self._failed_at = self._failed_at or time.monotonic()
            if time.monotonic() - self._failed_at > RETRY_AFTER_S:
                raise RuntimeError(f"the cluster cannot start; retrying: {failure.message}")
        if self._idle_s() > HUNG_AFTER_S:
            await asyncio.sleep(1.0)  # if the event loop was blocked, the supervisor runs now
            if self._idle_s() > HUNG_AFTER_S:
                logger.error("the supervisor has made no progress for %.0f s", self._idle_s())
                # An orderly end would end every role. After a kill, the successor takes them over.
                os.kill(os.getpid(), signal.SIGKILL)

    def _idle_s(self) -> float:
        return time.monotonic() - self._supervisor.ticked_at

    async def __del__(self) -> None:
        """End everything. Gateways leave first, so that open requests can finish."""
        if self.__dict__.get("_ended", True):  # True: the constructor has not begun
            return
        await self._begun.wait()
        if self._ended:
            return
        self._ended = True
        for task in self._tasks:
            task.cancel()
        # `left_to` is read last, because a successor may take over during the two checks.
        if await self._is_replaced() or await self._is_succeeded() or self._supervisor.left_to:
            await self._supervisor.close()
            return
        try:
            self._record.remove()
            await self._see_guests_off()
        finally:
            left_to = self._supervisor.left_to  # redeployed meanwhile: the roles belong to a successor
            try:
                if not left_to:
                    await self._supervisor.end_all(ROLES_END_S)
            finally:
                await self._supervisor.close()
        if not left_to:
            remove_cluster_dir(self._identity.cluster_id)

    async def _see_guests_off(self) -> None:
        grace_s, supervisor = self._config.gateway.drain_s, self._supervisor
        supervisor.announce_end(grace_s)
        deadline = time.monotonic() + grace_s + GUESTS_LEAVE_S
        while supervisor.core.roster.guests and not supervisor.left_to and time.monotonic() < deadline:
            await supervisor.wait_changed(0.1)
            supervisor.core.tick(time.monotonic())

    async def _is_replaced(self) -> bool:
        """Whether Serve starts a successor of this supervisor: in a rolling restart, or if its node is drained, as
        `ray start --block` does on SIGTERM. False if the application is deleted, and if the cluster cannot start, which
        is then retried with new processes."""
        core = self._supervisor.core
        if core.failure is not None and not core.rolling.supervisor_due:
            return False
        try:
            async with asyncio.timeout(LOOK_S):
                deleted = await asyncio.to_thread(is_deleted, self._supervisor.application)
        except Exception:  # whatever Serve raises; without a successor, the roles end by themselves
            logger.warning("cannot determine whether the application is deleted", exc_info=True)
            return True
        return not deleted

    async def _is_succeeded(self) -> bool:
        """Whether roles follow a newer supervisor that could not tell this one. It will end them."""
        try:
            async with asyncio.timeout(LOOK_S):
                leader = await newer_leader(self._launcher, self._supervisor.core.incarnation)
        except Exception:  # whatever Ray raises while it shuts down
            logger.warning("cannot determine whether another supervisor leads the cluster", exc_info=True)
            return False
        if leader:
            logger.warning("the supervisor at %s leads the cluster; leaving all roles to it", leader)
        return bool(leader)

    async def _leave(self) -> None:
        """Wait until a successor leads the cluster in a redeploy, then let the roles join it and end nothing."""
        await self._supervisor.wait_left()
        self._ended = True
        if self._showing is not None:  # the successor shows the cluster's metrics
            self._showing.cancel()
        await self._supervisor.close()

    async def _delete_when_asked(self, app_name: str) -> None:
        """Delete the application after `alignedserve stop`, unless the command that deployed it does so."""
        supervisor = self._supervisor
        await supervisor.stop_asked.wait()
        await supervisor.wait_drained(self._config.gateway.drain_s + GUESTS_LEAVE_S)
        if time.monotonic() - self._attended_at < ATTENDED_WITHIN_S:
            await asyncio.sleep(COMMAND_ENDS_S)
        logger.info("deleting the application: a stop was requested")
        await asyncio.to_thread(ray_private.begin_deleting, app_name)


def is_deleted(app_name: str) -> bool:
    """Whether the application is deleted or being deleted, alone or with all of Serve. Blocks."""
    found = serve.status().applications.get(app_name)
    return found is None or found.status == ApplicationStatus.DELETING


def http_url(config: Config, app_name: str | None = None) -> str:
    """The URL of HTTP on this machine. Serve's own options override the configuration.

    With `app_name`, the route prefix is the application's in Serve; this blocks.
    """
    host, port, prefix = config.gateway.host, config.gateway.port, config.gateway.route_prefix
    with contextlib.suppress(Exception):  # Serve has ended, or is ending
        host, port, of_app = ray_private.http_place(app_name)
        host, prefix = os.environ.get(haproxy_exec.HOST) or host, of_app or prefix
    shown = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{port}{prefix.rstrip('/')}"


def _code() -> str:
    """Package version and runtime environment. If they change, a redeploy replaces every process."""
    return f"{__version__} {ray.get_runtime_context().get_runtime_env_string()}"


def supervisor_deployment(config: Config) -> Any:
    """The supervisor's deployment. Its shutdown timeout includes the time for open requests, because gateways end
    first. In a redeploy, the new supervisor is up before the old one ends, and takes over from it (`handover.py`)."""
    ends_s = 2 * LOOK_S + config.gateway.drain_s + GUESTS_LEAVE_S + 2 * ROLES_END_S + 5
    return cast(Any, SupervisorDeployment).options(graceful_shutdown_timeout_s=ends_s, max_surge_percent=100)


class ArgumentError(ConfigError, RayServeException):
    """An invalid configuration, or a model that cannot work. For a RayServeException, `serve status` shows only the
    message."""


def build(args: dict[str, Any]) -> Application:
    """The application for a configuration: sections as nested values, or `section.key` with a string each. Missing keys
    have their defaults. The application is up once it can answer.

    Raises ArgumentError for an unknown key, an invalid value, or a model folder on this machine that cannot work.
    """
    try:
        config = from_arguments(args, served_settings)
        check_model_if_here(config)
    except (ConfigError, ModelError) as error:
        raise ArgumentError(error.message) from error
    return application(config, wait_ready=True)


def application(config: Config, *, wait_ready: bool) -> Application:
    """With `wait_ready`, gateways come up when the cluster can answer. Otherwise they come up at once, and report what
    is missing.

    In a redeploy, new replicas are up before old ones end (`max_surge_percent`).
    """
    from alignedserve.gateway.serve.app import Gateway

    tree = to_tree(config)
    supervisor = supervisor_deployment(config).bind(tree)
    gateway = cast(Any, Gateway).options(
        **_replicas(config),
        max_surge_percent=100,
        graceful_shutdown_timeout_s=config.gateway.drain_s + REPLICA_ENDS_S,
        logging_config=LOGGING,
    )
    return cast(Application, gateway.bind(tree, supervisor, wait_ready, telemetry_environment()))


def _replicas(config: Config) -> dict[str, Any]:
    """Serve's options for the number of gateways. A gateway's load is its number of open requests."""
    gateway = config.gateway
    if not gateway.max_replicas:
        return {"num_replicas": gateway.replicas}
    limits = {"min_replicas": gateway.replicas, "max_replicas": gateway.max_replicas}
    return {"autoscaling_config": limits | {"target_ongoing_requests": gateway.replica_requests}}
