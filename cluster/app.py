"""The Ray Serve application: a gateway, and the supervisor that lives and dies with it.

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

from ray import serve
from ray.serve import Application
from ray.serve.schema import LoggingConfig

from alignedserve import logs
from alignedserve.admin import admin_key
from alignedserve.cluster import haproxy_exec
from alignedserve.cluster.actors import ACTORS, RoleActor
from alignedserve.cluster.ray_launcher import RayLauncher
from alignedserve.cluster.records import Record
from alignedserve.cluster.runtime_dir import cluster_dir, new_cluster_id, new_token, remove_cluster_dir
from alignedserve.cluster.supervisor import Identity, Supervisor
from alignedserve.config import Config
from alignedserve.config_sources import Tree, from_tree, to_tree
from alignedserve.gateway.serve_ports import close_internal_port

logger = logging.getLogger(__name__)

GUESTS_LEAVE_S = 10.0  # beyond gateway.drain_s
ROLES_END_S = 8.0
REPLICA_ENDS_S = 8.0  # as above
ATTENDED_WITHIN_S = 5.0  # a command that is there looks once a second
COMMAND_ENDS_S = 15.0
REPLACED_WITHIN_S = 30.0
HUNG_AFTER_S = 5.0
RETRY_AFTER_S = 30.0
LOGGING = LoggingConfig(enable_access_log=False, log_level="WARNING")


@serve.deployment(
    name="Supervisor",
    num_replicas=1,
    max_ongoing_requests=1000,
    ray_actor_options={"num_cpus": 0},
    health_check_period_s=1,
    health_check_timeout_s=10,  # a hung one is ended by an agent; by Serve, every role would end with it
    graceful_shutdown_wait_loop_s=0.1,
    logging_config=LOGGING,
)
class SupervisorDeployment:
    """Hosts the supervisor in a replica, and ends what it started when the application is deleted.

    Serve awaits `__del__` once, when the application is deleted or Serve is shut down. A replica that is killed gets
    no such chance: its successor finds the roles by their names and goes on with them, and where there is none they end
    themselves after `supervisor.orphan_after_s`.
    """

    async def __init__(self, tree: Tree, actors: Mapping[str, type[RoleActor]] = ACTORS) -> None:  # type: ignore[misc]
        close_internal_port()
        self._config = from_tree(tree)
        logs.setup(self._config.log, "supervisor", "supervisor-0")
        context = serve.get_replica_context()
        launcher = RayLauncher(f"alignedserve-{context.app_name}", self._config, actors)
        self._identity = await _identity(launcher, tree)
        self._record = Record(
            self._identity.cluster_id,
            http_url(self._config),
            os.getpid(),
            time.time(),
            self._config.cluster.name,
            self._config.gateway.api_key_file,
            admin_key(self._identity.token),
        )
        self._supervisor = Supervisor(self._config, launcher, self._identity, replaceable=True)
        self._ended = False
        self._failed_at = 0.0
        self._attended_at = -math.inf
        await self._supervisor.start()
        self._record.write()
        self._stopper = asyncio.get_running_loop().create_task(self._delete_when_asked(context.app_name))

    async def join_info(self) -> dict[str, Any]:
        """What a gateway replica needs in order to join."""
        return {
            "supervisor_address": self._supervisor.address,
            "token": self._identity.token,
            "cluster_id": self._identity.cluster_id,
            "node_id": self._supervisor.home.node_id,
            "host": self._supervisor.home.host,
            "agent_socket": self._identity.agent_socket,
            "model_path": self._config.model.path,
            "config": to_tree(self._config),
        }

    async def progress(self, pid: int = 0, host: str = "") -> dict[str, Any]:
        """How far the start is, as plain values; and whether somebody asked for the end.

        `pid` and `host` are those of the command that sees to the end of this cluster; it asks once a second.
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
        }

    async def drain(self, grace_s: float) -> dict[str, Any]:
        """Gateways take nothing new, and have `grace_s` for what they hold; how far that is.

        Called again it can only make the time shorter.
        """
        self._supervisor.announce_end(grace_s)
        drained = await self._supervisor.wait_drained(0.0)
        return {"drained": drained, "open": self._supervisor.core.roster.open_requests()}

    async def check_health(self) -> None:
        """Raises where the supervisor could not start the cluster; ends the process where it does its work no more.

        Serve replaces it then: where nobody waits at a terminal, a start is tried until it succeeds.
        """
        failure = self._supervisor.core.failure
        if failure is not None:
            self._failed_at = self._failed_at or time.monotonic()
            if time.monotonic() - self._failed_at > RETRY_AFTER_S:
                raise RuntimeError(f"the cluster cannot start, and is tried again: {failure.message}")
        if not self._ended and self._idle_s() > HUNG_AFTER_S:
            await asyncio.sleep(1.0)  # where it was the event loop that stood still, the supervisor is next
            if self._idle_s() > HUNG_AFTER_S:
                logger.error("the supervisor has looked at nothing for %.0f s", self._idle_s())
                # Ended in order, it would take every role with it; killed, its successor goes on with them.
                os.kill(os.getpid(), signal.SIGKILL)

    def _idle_s(self) -> float:
        return time.monotonic() - self._supervisor.ticked_at

    async def __del__(self) -> None:
        """End everything: gateways leave first, so that what they are serving is not cut off."""
        if self.__dict__.get("_ended", True):  # also where the constructor did not come that far
            return
        self._ended = True
        self._stopper.cancel()
        self._record.remove()
        grace_s = self._config.gateway.drain_s
        self._supervisor.announce_end(grace_s)
        deadline = time.monotonic() + grace_s + GUESTS_LEAVE_S
        while self._supervisor.core.roster.guests and time.monotonic() < deadline:
            await self._supervisor.wait_changed(0.1)
            self._supervisor.core.tick(time.monotonic())
        await self._supervisor.end_all(ROLES_END_S)
        await self._supervisor.close()
        remove_cluster_dir(self._identity.cluster_id)

    async def _delete_when_asked(self, app_name: str) -> None:
        """`alignedserve stop` ends the application: the command that deployed it does so, or else this."""
        supervisor = self._supervisor
        await supervisor.stop_asked.wait()
        await supervisor.wait_drained(self._config.gateway.drain_s + GUESTS_LEAVE_S)
        if time.monotonic() - self._attended_at < ATTENDED_WITHIN_S:
            await asyncio.sleep(COMMAND_ENDS_S)
        logger.info("deleting the application: somebody asked for its end")
        await asyncio.to_thread(serve.delete, app_name, _blocking=False)


async def _identity(launcher: RayLauncher, tree: Tree) -> Identity:
    """That of the processes which run already, or a new one.

    Processes of another configuration belong to the application that this one replaces, which is about to end them.
    """
    deadline = time.monotonic() + REPLACED_WITHIN_S
    while found := await launcher.find():
        if all(running.settings.config == tree for running in found):
            first = found[0].settings
            return Identity(first.cluster_id, first.token, first.agent_socket)
        if time.monotonic() > deadline:
            for running in found:
                await launcher.kill(running.settings.id)
        await asyncio.sleep(0.2)
    cluster_id = new_cluster_id()
    return Identity(cluster_id, new_token(), str(cluster_dir(cluster_id) / "agent.sock"))


def http_url(config: Config) -> str:
    """Where HTTP is served on this machine: Serve's own options count, whoever set them."""
    host, port = config.gateway.host, config.gateway.port
    with contextlib.suppress(Exception):  # its place in Serve is not a public one
        from ray.serve.context import _get_global_client

        client: Any = _get_global_client()
        host = os.environ.get(haproxy_exec.HOST) or client.http_config.host
        port = client.http_config.port
    shown = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{port}{config.gateway.route_prefix.rstrip('/')}"


def supervisor_deployment(config: Config) -> Any:
    """Serve gives it the time that it takes: gateways end first, and they have open requests."""
    ends_s = config.gateway.drain_s + GUESTS_LEAVE_S + 2 * ROLES_END_S + 5
    return cast(Any, SupervisorDeployment).options(graceful_shutdown_timeout_s=ends_s)


def build(args: dict[str, Any]) -> Application:
    """The application for a configuration (its sections as nested values; what is left out has its default).

    Raises ConfigError for a key or a value that is none.
    """
    from alignedserve.gateway.app import Gateway

    config = from_tree(args)
    tree = to_tree(config)
    supervisor = supervisor_deployment(config).bind(tree)
    gateway = cast(Any, Gateway).options(
        num_replicas=config.gateway.replicas,
        graceful_shutdown_timeout_s=config.gateway.drain_s + REPLICA_ENDS_S,
        logging_config=LOGGING,
    )
    return cast(Application, gateway.bind(tree, supervisor))
