"""A whole cluster without Ray: the supervisor in this process, each role a plain child process.

For tests, benchmarks, and machines where Ray is not installed. Everything ends with the context:

    async with LocalCluster(config) as cluster:
        await cluster.wait_ready()
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from alignedserve.cluster.launch.gpus import count_gpus
from alignedserve.cluster.launch.process_launcher import NODE_ID, ProcessLauncher
from alignedserve.cluster.runtime_dir import new_cluster_id, new_token, remove_cluster_dir
from alignedserve.cluster.supervisor.plan import MODEL_ROLES, SPARE, Node, Shape
from alignedserve.cluster.supervisor.role_settings import Identity
from alignedserve.cluster.supervisor.supervisor import Supervisor
from alignedserve.config import Config
from alignedserve.config_sources import to_tree
from alignedserve.control.convert import failure_from_proto
from alignedserve.errors import AccountingError, UnavailableError
from alignedserve.proto import supervisor_pb2 as sv


class LocalCluster:
    """Leaving the context ends every process and removes every file, also after an error.

    If there was no error, every store is recounted first. Raises AccountingError if one does not match its state.

    `environment` is added to that of the roles. Their output goes to a file each in `output_dir`, or to this process's
    output. `nodes` and `placed` simulate several nodes on this machine, as in `ProcessLauncher`.
    """

    def __init__(
        self,
        config: Config,
        *,
        environment: Mapping[str, str] | None = None,
        output_dir: Path | None = None,
        gpus: int | None = None,
        nodes: Sequence[Node] = (),
        placed: Mapping[str, str] | None = None,
        module: str = "alignedserve.cluster.launch.role_main",
    ) -> None:
        self.config = config
        self.cluster_id = new_cluster_id()
        self.token = new_token()
        self.node_id = nodes[0].node_id if nodes else NODE_ID
        self.launcher = ProcessLauncher(
            nodes=nodes,
            placed=placed,
            gpus=count_gpus() if gpus is None else gpus,
            environment=environment,
            output_dir=output_dir,
            module=module,
            config=config,
        )
        self.supervisor: Supervisor

    async def __aenter__(self) -> Self:
        try:
            await self._start_supervisor()
        except BaseException:
            remove_cluster_dir(self.cluster_id)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self.check_integrity()
        finally:
            await self._end()

    async def check_integrity(self) -> sv.IntegrityReport:
        """Raises AccountingError if a process that answers reports a store or state that fails its check."""
        report = await self.supervisor.check_integrity()
        wrong = [f"{book.store}: {book.problem}" for book in report.books if book.problem and not book.unknown]
        if wrong:
            raise AccountingError("; ".join(wrong))
        return report

    async def _end(self) -> None:
        try:
            await self.supervisor.end_all()
            await self.supervisor.close()
        finally:
            await self.launcher.end()
            remove_cluster_dir(self.cluster_id)

    async def restart_supervisor(self) -> None:
        """Replace the supervisor as if it had died: its successor finds the processes and takes them over."""
        await self.supervisor.close()
        await self._start_supervisor()

    async def scale(self, prefill: int = 0, decode: int = 0, timeout_s: float = 120.0) -> None:
        """Change the numbers of instances (0: unchanged). Returns when all are ready and surplus ones have ended.

        Raises AlignedServeError if that is impossible, UnavailableError after `timeout_s`.
        """
        reply = await self.supervisor.scale(prefill, decode)
        deadline = time.monotonic() + timeout_s
        wanted = Shape(reply.prefill, reply.decode)
        while not self._has(wanted):
            if (scaling := self.supervisor.core.scaling).failure:
                raise UnavailableError(scaling.failure)
            if time.monotonic() > deadline:
                raise UnavailableError(f"the cluster does not have {wanted} after {timeout_s:g} s")
            await self.supervisor.wait_changed(0.1)

    def _has(self, shape: Shape) -> bool:
        slots = [slot for slot in self.supervisor.core.roster.slots.values() if slot.planned.role != SPARE]
        instances = [slot.planned.id for slot in slots if slot.planned.role in MODEL_ROLES]
        return sorted(instances) == sorted(role_id for _, role_id in shape.ids()) and all(slot.ready for slot in slots)

    async def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Returns when every role is ready.

        Raises the error of a role that could not start, UnavailableError after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while (state := self.supervisor.core.state()) != "ready":
            failure = self.supervisor.core.failure
            if failure is not None:
                raise failure_from_proto(failure)
            if time.monotonic() > deadline:
                missing = ", ".join(self.supervisor.core.roster.missing() + self.supervisor.core.degraded())
                raise UnavailableError(f"the cluster is {state} after {timeout_s:g} s; not ready: {missing}")
            await self.supervisor.wait_changed(0.5)

    async def wait_spares(self, count: int, timeout_s: float = 60.0) -> None:
        """Returns when `count` spares wait for a role. Raises UnavailableError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while sum(peer.process.role == SPARE and peer.state == "ready" for peer in self.view().peers) < count:
            if time.monotonic() > deadline:
                raise UnavailableError(f"{count} spares were not ready within {timeout_s:g} s")
            await self.supervisor.wait_changed(0.5)

    async def status(self) -> sv.ClusterStatus:
        return await self.supervisor.status()

    def view(self) -> sv.ClusterView:
        """The view that every role receives."""
        return self.supervisor.core.view()

    def peer(self, role_id: str) -> sv.Peer:
        """A role in the view. Raises UnavailableError if it has not joined."""
        for peer in self.view().peers:
            if peer.process.id == role_id:
                return peer
        raise UnavailableError(f"{role_id} has not joined")

    def address(self, role_id: str) -> str:
        return self.peer(role_id).address

    @property
    def agent_socket(self) -> str:
        """The socket of the node agent on the supervisor's node; empty if no instance is there."""
        return self.supervisor.core.nodes.agent_socket(self.node_id)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the roles, by id."""
        return self.launcher.pids

    def kill(self, role_id: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.pids[role_id], number)

    async def wait_restarted(self, role_id: str, old_incarnation: int, timeout_s: float = 60.0) -> sv.Peer:
        """The role's successor, once it is ready. Raises UnavailableError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for peer in self.view().peers:
                newer = peer.process.id == role_id and peer.process.incarnation > old_incarnation
                if newer and peer.state == "ready":
                    return peer
            await self.supervisor.wait_changed(0.2)
        raise UnavailableError(f"{role_id} did not come back within {timeout_s:g} s")

    def join_info(self) -> dict[str, Any]:
        """What a gateway needs to join."""
        return {
            "supervisor_address": self.supervisor.address,
            "token": self.token,
            "cluster_id": self.cluster_id,
            "node_id": self.node_id,
            "host": self.supervisor.core.nodes.home.host,
            "agent_socket": self.agent_socket,
            "model_path": self.config.model.path,
            "config": to_tree(self.config),
        }

    async def _start_supervisor(self) -> None:
        identity = Identity(self.cluster_id, self.token)
        self.supervisor = Supervisor(self.config, self.launcher, identity)
        await self.supervisor.start()
