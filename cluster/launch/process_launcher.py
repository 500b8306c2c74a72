"""Runs roles as plain child processes, for tests and without Ray."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from alignedserve.cluster.launch.environment import role_environment
from alignedserve.cluster.launch.launcher import Launcher, Running
from alignedserve.cluster.launch.node_room import NodeRoom
from alignedserve.cluster.launch.plain_places import PlainPlaces
from alignedserve.cluster.launch.rank_hosts import PlainRankHost, start_rank_host
from alignedserve.cluster.launch.vetting import vet_node
from alignedserve.cluster.node.node_agent import VIEW_INFO
from alignedserve.cluster.supervisor.nodes import Placement
from alignedserve.cluster.supervisor.plan import MODEL_ROLES, Node, Shape, check_gpus, resolve_device
from alignedserve.config import Config
from alignedserve.control.runtime import RoleSettings
from alignedserve.errors import AlignedServeError, UnavailableError
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.transfer.segments import SegmentClient

NODE_ID = "local"


class Process(Protocol):
    """What the launcher needs of an `asyncio.subprocess.Process`."""

    @property
    def pid(self) -> int: ...

    @property
    def stdin(self) -> asyncio.StreamWriter | None: ...

    async def wait(self) -> int: ...

    def kill(self) -> None: ...


async def start_process(role: str, module: str, environment: Mapping[str, str], output: int | None) -> Process:
    """`python -m module`, in a session of its own. `output`: its stdout and stderr, None: this process's."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        stdin=asyncio.subprocess.PIPE,
        stdout=output,
        stderr=output,
        env=environment,
        start_new_session=True,
    )


@dataclass(slots=True)
class _Child:
    settings: RoleSettings
    process: Process
    reaper: asyncio.Task[int]


class ProcessLauncher(Launcher):
    """Each role runs `role_main` in its own session, so that Ctrl-C reaches only the process that started the cluster.

    The children end when this process does. `environment` is added to their environment. Their output goes to files in
    `output_dir`, or to this process's output. `gpus` is this machine's number of GPUs. `module` is the module that they
    run; tests use their own.

    `nodes` simulates several nodes on this machine, each with a name, an address and a node agent; `gpus` is ignored
    then. `placed` fixes the nodes of instances, and of their parts on further nodes, by id. Others go to the node with
    the fewest. `config`: over how many nodes instances are spread.
    """

    def __init__(
        self,
        *,
        gpus: int = 0,
        nodes: Sequence[Node] = (),
        placed: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        output_dir: Path | None = None,
        module: str = "alignedserve.cluster.launch.role_main",
        config: Config | None = None,
    ) -> None:
        self._module = module
        self._config = config or Config()
        self._nodes = list(nodes) or [Node(NODE_ID, "127.0.0.1", gpus)]  # changed by `add_node` and `kill_node`
        self._places = PlainPlaces(self._nodes, placed or {})  # the nodes of instances
        self._environment = dict(environment or {})
        self._output_dir = output_dir
        self._children: dict[str, _Child] = {}  # the last process of each role id, also after its end
        self._rank_hosts: dict[str, PlainRankHost] = {}  # the last process of each part of an instance on another node

    @property
    def pids(self) -> dict[str, int]:
        """Pids of the children that have not ended, by role id."""
        return {role_id: child.process.pid for role_id, child in self._children.items() if not child.reaper.done()}

    @property
    def rank_host_pids(self) -> dict[str, int]:
        """Pids of the processes that have ranks on further nodes, by the id of their part of an instance."""
        return {part_id: host.process.pid for part_id, host in self._rank_hosts.items()}

    async def nodes(self) -> Sequence[Node]:
        return list(self._nodes)

    async def place(
        self, cluster_id: str, shape: Shape, ids: Sequence[tuple[str, str]], room: NodeRoom, *, on_gpu: bool
    ) -> None:
        self._places.place({role_id: self._parts(role, role_id) for role, role_id in ids})

    async def placement(self) -> Placement:
        return self._places.placement()

    async def vet(self, config: Config) -> None:
        gpus = sum(node.gpus for node in self._nodes)
        check_gpus(config, gpus)
        await asyncio.to_thread(vet_node, config, resolve_device(config, gpus), len(self._nodes) == 1)

    async def release(self) -> None:
        self._places.place({})

    def add_node(self, node: Node) -> None:
        """Add a node."""
        self._nodes.append(node)

    async def kill_node(self, node_id: str) -> None:
        """Kill all processes of a node and remove it. Instances that are fixed to it have no place then."""
        self._nodes[:] = [node for node in self._nodes if node.node_id != node_id]
        for role_id, child in self._children.items():
            if child.settings.node_id == node_id:
                await self.kill(role_id)
        for rank_host in self._rank_hosts.values():
            if rank_host.settings.node_id == node_id:
                await rank_host.end()

    async def find(self) -> Sequence[Running]:
        living = [child for child in self._children.values() if not child.reaper.done()]
        told = (child.settings for child in living)
        agents = list({settings.agent_socket: settings for settings in told if settings.agent_socket}.values())
        views = await asyncio.gather(*(asyncio.to_thread(_ask_agent, settings) for settings in agents))
        newest = max(views, key=lambda view: view.version, default=sv.ClusterView())
        return [Running(child.settings, newest, child.process.pid) for child in living]

    def _parts(self, role: str, role_id: str) -> list[str]:
        return self._config.spread(role).parts(role_id)

    async def launch(self, settings: RoleSettings, spare_id: str = "", *, again: bool = False) -> None:
        if all(node.node_id != settings.node_id for node in self._nodes):
            raise UnavailableError(f"{settings.id} could not be started: node {settings.node_id} does not exist")
        old = self._children.get(settings.id)
        if old is not None:
            await old.reaper
        spare = self._children.pop(spare_id, None)
        if spare is not None and not spare.reaper.done():
            spare.settings = settings
            self._children[settings.id] = spare
            await self._tell(spare.process, json.dumps({"assume": settings.to_dict()}))
            return
        environment = self._environment_of(settings)
        try:
            with self._output(settings.id) as output:
                process = await start_process(settings.role, self._module, environment, output)
        except OSError as error:
            raise UnavailableError(f"{settings.id} could not be started: {error}") from error
        reaper = asyncio.get_running_loop().create_task(process.wait())
        self._children[settings.id] = _Child(settings, process, reaper)
        await self._tell(process, json.dumps(settings.to_dict()))

    async def prepare(self, settings: RoleSettings, *, again: bool = False) -> RoleSettings:
        addresses = []
        for part_id in self._parts(settings.role, settings.id) if settings.role in MODEL_ROLES else ():
            if (old := self._rank_hosts.pop(part_id, None)) is not None:
                await old.end()
            node_id = self._places.node_of(part_id)
            node = next((node for node in self._nodes if node.node_id == node_id), None)
            if node is None:
                raise UnavailableError(f"{part_id} could not be started: its node does not exist")
            theirs = replace(settings, id=part_id, node_id=node.node_id, host=node.host)
            with self._output(part_id) as output:
                started = await start_rank_host(theirs, self._environment_of(theirs), output)
            self._rank_hosts[part_id] = started
            addresses.append(started.address)
        return replace(settings, rank_hosts=addresses)

    def _environment_of(self, settings: RoleSettings) -> dict[str, str]:
        return {**os.environ, **role_environment(settings), **self._environment}

    def watch(self, role_id: str, on_exit: Callable[[str], None]) -> None:
        child = self._children[role_id]
        child.reaper.add_done_callback(
            lambda reaper: None if reaper.cancelled() else on_exit(_describe_exit(reaper.result()))
        )

    async def kill(self, role_id: str) -> None:
        child = self._children.get(role_id)
        if child is not None and not child.reaper.done():
            with contextlib.suppress(ProcessLookupError):
                child.process.kill()

    async def announce(self, supervisor_address: str, *, leave: bool = False) -> None:
        said = json.dumps({"supervisor_address": supervisor_address, "leave": leave})
        for child in self._children.values():
            if not child.reaper.done():
                await self._tell(child.process, said)

    async def close(self) -> None:
        """Does nothing. `end` ends the children."""

    async def end(self) -> None:
        """Kill all remaining children, and wait for them."""
        for role_id in list(self._children):
            await self.kill(role_id)
        for rank_host in self._rank_hosts.values():
            await rank_host.end()
        await asyncio.gather(*(child.reaper for child in self._children.values()))
        self._children.clear()

    async def _tell(self, process: Process, line: str) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended, and its reaper reports that
            process.stdin.write(line.encode() + b"\n")
            await process.stdin.drain()

    def _output(self, role_id: str) -> contextlib.AbstractContextManager[int | None]:
        if self._output_dir is None:
            return contextlib.nullcontext(None)
        self._output_dir.mkdir(parents=True, exist_ok=True)
        return _opened(self._output_dir / f"{role_id}.out")


def _ask_agent(settings: RoleSettings) -> sv.ClusterView:
    """The last view that roles received, from their node agent; empty if it does not answer."""
    try:
        info = SegmentClient(settings.agent_socket, settings.token).info()
    except (AlignedServeError, OSError):
        return sv.ClusterView()
    return sv.ClusterView.FromString(base64.b64decode(info.get(VIEW_INFO, "")))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _describe_exit(status: int) -> str:
    if status >= 0:
        return f"its process ended with status {status}"
    try:
        return f"its process was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"its process was ended by signal {-status}"
