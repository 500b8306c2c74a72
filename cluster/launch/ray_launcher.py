"""Runs roles as Ray actors, which are found again by their names."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from alignedserve.cancellation import end_tasks
from alignedserve.cluster.launch.actors import ACTORS, RankHostActor, RoleActor
from alignedserve.cluster.launch.environment import ranks_environment
from alignedserve.cluster.launch.fork_commands import ForkCommands, can_fork
from alignedserve.cluster.launch.launcher import Launcher, Running
from alignedserve.cluster.launch.node_room import NodeRoom
from alignedserve.cluster.launch.processes import end_process, is_stopped
from alignedserve.cluster.launch.ray_groups import RANKS
from alignedserve.cluster.launch.ray_places import Bundle, RayPlaces
from alignedserve.cluster.launch.units import PLACED_ALONE, describe_resources, gpu_share, plan_units, with_parts
from alignedserve.cluster.launch.unresponsive_actors import Silent, look_at_silent
from alignedserve.cluster.launch.vetting import eligible, vet_node
from alignedserve.cluster.supervisor.hang_detector import STOPPED_S
from alignedserve.cluster.supervisor.nodes import Placement
from alignedserve.cluster.supervisor.plan import MODEL_ROLES, SPARE, Node, Shape, check_gpus, resolve_device
from alignedserve.config import Config
from alignedserve.config_sources import Tree, from_tree, to_tree
from alignedserve.control.runtime import RoleSettings
from alignedserve.errors import AlignedServeError, UnavailableError, by_code
from alignedserve.proto import supervisor_pb2 as sv

logger = logging.getLogger(__name__)

NAME_WAIT_S = 10.0
DESCRIBE_TIMEOUT_S = 5.0
END_TIMEOUT_S = 2.0
ASK_TIMEOUT_S = 10.0
UNAVAILABLE_RETRY_S = 0.5
LOOPBACK = "127.0.0.1"
ALL_DEVICES_VISIBLE = {
    # Ray and NVML count GPUs by their places on the bus.
    "env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
}


class RayLauncher(Launcher):
    """`namespace` is the cluster's own in Ray. Blocking calls of Ray run in threads."""

    def __init__(self, namespace: str, config: Config, actors: Mapping[str, type[RoleActor]] = ACTORS) -> None:
        self._classes = actors  # by role
        self.namespace = namespace
        self._config = config
        self._actors: dict[str, Any] = {}  # handles by role id, of the last actor that was launched or found
        self._node_ids: dict[str, str] = {}  # Ray's id by the node's name; `nodes` adds to it
        self._here = ""  # name of this process's node; "" until `nodes`
        self._gpus = 0  # of the node with the most, as of the last `nodes`
        self._placed: dict[str, Any] = {}  # the last arguments of `_places.place`
        self._places: RayPlaces | None = None  # created by the first `place`
        self._tasks: set[asyncio.Task[None]] = set()  # watches and announcements in progress

    async def nodes(self) -> Sequence[Node]:
        own = ray.get_runtime_context().get_node_id()
        alive = [node for node in await asyncio.to_thread(ray.nodes) if node["Alive"]]
        alive.sort(key=lambda node: node["NodeID"] != own)
        nodes = []
        for node in alive:
            name = _name_of(node)
            self._node_ids[name] = node["NodeID"]
            resources = node["Resources"]
            nodes.append(Node(name, node["NodeManagerAddress"], int(resources.get("GPU", 0)), resources))
        self._gpus = max(node.gpus for node in nodes)
        self._here = nodes[0].node_id
        self.elastic = nodes[0].host != LOOPBACK  # no node can join a Ray cluster that listens on loopback
        return nodes

    async def place(
        self, cluster_id: str, shape: Shape, ids: Sequence[tuple[str, str]], room: NodeRoom, *, on_gpu: bool
    ) -> None:
        self._places = self._places or RayPlaces(self.namespace, cluster_id, self._config)
        asked: dict[str, Any] = {"shape": shape, "ids": ids, "on_gpu": on_gpu}
        room = room.renamed(self._node_ids)
        try:
            await asyncio.to_thread(self._places.place, **asked, room=room, elastic=self.elastic)
        except RayError as error:
            raise UnavailableError(f"Ray does not answer: {_brief(error)}") from error
        self._placed = asked

    async def placement(self) -> Placement:
        assert self._places is not None
        instances = [role_id for _, role_id in with_parts(self._config, self._placed["ids"])]
        try:
            found = await self._look()
            if not found.keys() >= set(instances):
                logger.warning("a placement group was removed: creating a new one")
                await asyncio.to_thread(self._places.place, **self._placed, room=NodeRoom({}, {}), elastic=self.elastic)
                found = await self._look()
            async with asyncio.timeout(ASK_TIMEOUT_S):
                nodes = tuple(await self.nodes())
        except (RayError, TimeoutError) as error:
            raise UnavailableError(f"Ray does not answer: {_brief(error)}") from error
        names = {self._node_ids[node.node_id]: node.node_id for node in nodes}
        where: dict[str, str] = {}
        parts: dict[str, list[str]] = {}
        waiting: dict[str, str] = {}
        for role, role_id in self._placed["ids"]:
            together = [role_id, *self._config.spread(role).parts(role_id)]
            lacking = next((part for part in together if part not in found or found[part].node not in names), None)
            if lacking is None:
                where[role_id], *parts[role_id] = [names[found[part].node] for part in together]
            else:
                waiting[role_id] = self._waits_for(role, found.get(lacking))
        return Placement(nodes, where, waiting, self.elastic, parts)

    def _waits_for(self, role: str, bundle: Bundle | None) -> str:
        if bundle is None:
            return "waits for a node with room"
        asked = f"waits for a node with {describe_resources(bundle.resources)}"
        if bundle.resources.get("GPU", 0) <= self._gpus:
            return asked
        asked = f"{asked}; the largest has {self._gpus} GPUs"
        if len(bundle.instances) > 1:
            return f"{asked}: {PLACED_ALONE}"
        spread = self._config.spread(role)
        if spread.nodes < spread.degrees.stages:
            return f"{asked}: {role}.nodes can spread its stages over more nodes"
        return asked

    async def _look(self) -> Mapping[str, Bundle]:
        assert self._places is not None
        async with asyncio.timeout(ASK_TIMEOUT_S):
            return await asyncio.to_thread(self._places.look)

    async def vet(self, config: Config) -> None:
        shape = Shape.configured(config)
        try:
            nodes = await asyncio.to_thread(RayPlaces(self.namespace, "", config).could_give)
            gpus = [int(resources.get("GPU", 0)) for resources in nodes.values()]
            check_gpus(config, sum(gpus), shape)
            device = resolve_device(config, max(gpus))
            share = gpu_share(config, shape, gpus) if device == "cuda" else 0.0
            first, *others = eligible(nodes, plan_units(config, with_parts(config, shape.ids()), share, max(gpus)))
            failed = await self._vet_on(first, config, device, alone=len(nodes) == 1)
            if failed is not None and others:  # nodes without instances need not have the model
                said = await asyncio.gather(*(self._vet_on(node_id, config, device, alone=False) for node_id in others))
                failed = None if None in said else failed
        except RayError as error:
            raise UnavailableError(f"Ray does not answer: {_brief(error)}") from error
        if failed is not None:
            raise failed

    async def _vet_on(self, node_id: str, config: Config, device: str, alone: bool) -> AlignedServeError | None:
        """The error on that node; None if there is none."""
        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        task = ray.remote(_vet_here).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        said: tuple[str, str] | None = await task.remote(to_tree(config), device, alone)
        return None if said is None else by_code(said[0])(said[1])

    async def release(self) -> None:
        if self._places is not None:
            await asyncio.to_thread(self._places.release)

    async def find(self) -> Sequence[Running]:
        """A process that does not answer counts as running while Ray counts its node alive. If its role is unknown, it
        is asked again for `supervisor.orphan_after_s`. After that, or if other processes on its node answer, it is
        killed."""
        named = await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True)
        ours = [entry["name"] for entry in named if entry["namespace"] == self.namespace]
        names = [name for name in ours if not name.startswith(RANKS)]
        answered: list[Running] = []
        until = time.monotonic() + self._config.supervisor.orphan_after_s
        while True:
            alive = {self._node_ids[node.node_id]: node for node in await self.nodes()}
            found = await asyncio.gather(*(self._describe(name, alive) for name in names))
            answered += [running for running in found if isinstance(running, Running)]
            silent = [each for each in found if isinstance(each, Silent)]
            known = [(each, each.identify(answered, self._device)) for each in silent]
            unknown = [each for each, running in known if running is None]
            waiting = [
                each for each in unknown if time.monotonic() < until and not any(map(each.shares_node, answered))
            ]
            await asyncio.gather(*(self._end_silent(each) for each in unknown if each not in waiting))
            if not waiting:
                break
            names = [each.name for each in silent if each in waiting or each not in unknown]
            await asyncio.sleep(UNAVAILABLE_RETRY_S)
        self._actors |= {running.settings.id: each.actor for each, running in known if running is not None}
        found_running = [*answered, *(running for _, running in known if running is not None)]
        for running in found_running:
            self._follow(running.settings)
        return found_running

    async def launch(self, settings: RoleSettings, spare_id: str = "", *, again: bool = False) -> None:
        if spare_id and await self._assume(spare_id, settings):
            return
        options = await self._forked(settings, self._options(settings), again=again)
        deadline = time.monotonic() + NAME_WAIT_S
        while True:
            try:
                self._actors[settings.id] = await asyncio.to_thread(self._create, settings, options)
            except ValueError as error:  # Ray has not yet noticed that the last actor of this name has ended
                if time.monotonic() > deadline:
                    raise UnavailableError(f"{settings.id} could not be started: {error}") from error
                await asyncio.sleep(0.05)
                await self._clear(settings.id)
            except RayError as error:
                raise UnavailableError(f"{settings.id} could not be started: {error}") from error
            else:
                self._follow(settings)
                return

    async def _forked(self, settings: RoleSettings, options: dict[str, Any], *, again: bool) -> dict[str, Any]:
        """Ray's options of a process that is forked, if it can be."""
        forks = self._forks if settings.role in (*MODEL_ROLES, SPARE) and not again else None
        if forks is None or not (command := await forks.command(settings.node_id)):
            return options
        own = options.get("runtime_env", {})
        variables = {**own.get("env_vars", {}), **ranks_environment(settings)}
        return options | {"runtime_env": {**own, "env_vars": variables, "py_executable": command}}

    async def prepare(self, settings: RoleSettings, *, again: bool = False) -> RoleSettings:
        parts = self._config.spread(settings.role).parts(settings.id) if settings.role in MODEL_ROLES else []
        if not parts:
            return settings
        try:
            await self._end_rank_hosts(settings.id)
            bundles, nodes = await self._look(), {node["NodeID"]: node for node in await asyncio.to_thread(ray.nodes)}
            starting = [self._start_rank_host(settings, part, bundles, nodes, again=again) for part in parts]
            found = await asyncio.gather(*starting, return_exceptions=True)  # so that none starts later
            failed = next((each for each in found if isinstance(each, BaseException)), None)
            if failed is not None:
                await self._end_rank_hosts(settings.id)
                raise failed
        except (RayError, TimeoutError) as error:
            raise UnavailableError(f"ranks of {settings.id} could not be started: {_brief(error)}") from error
        return replace(settings, rank_hosts=[each for each in found if isinstance(each, str)])

    async def _start_rank_host(
        self,
        settings: RoleSettings,
        part: str,
        bundles: Mapping[str, Bundle],
        nodes: Mapping[str, Mapping[str, Any]],
        *,
        again: bool,
    ) -> str:
        """Returns its address."""
        node = nodes.get(bundles[part].node) if part in bundles else None
        if node is None:
            raise UnavailableError(f"{part} waits for a node")
        theirs = replace(settings, id=part, node_id=_name_of(node), host=node["NodeManagerAddress"])
        options = {**self._options(theirs), "name": f"{RANKS}{part}-{secrets.token_hex(4)}"}
        options = await self._forked(theirs, options, again=again)
        started: Any = await asyncio.to_thread(ray.remote(RankHostActor).options(**options).remote, theirs.to_dict())
        limit_s = self._config.supervisor.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                address: str = await started.address.remote()
        except TimeoutError:
            why = f"{part} does not serve within {limit_s:g} s on node {theirs.node_id}"
            raise UnavailableError(f"{why} (supervisor.start_timeout_s)") from None
        except RayError as error:
            raise UnavailableError(f"{part} does not start on node {theirs.node_id}: {_brief(error)}") from error
        return address

    async def _end_rank_hosts(self, role_id: str) -> None:
        """Those of the instance's last process end by themselves, unless they are stopped."""
        named = await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True)
        for entry in named:
            if entry["namespace"] == self.namespace and entry["name"].startswith(f"{RANKS}{role_id}."):
                await self._clear(entry["name"])

    def _follow(self, settings: RoleSettings) -> None:
        """Have the fork server of a node agent started."""
        if settings.role == "node_agent" and self._forks is not None:
            self._forks.ask(settings.node_id, self._actors[settings.id])

    @cached_property
    def _forks(self) -> ForkCommands | None:
        """None if instances are not forked."""
        if not self._config.supervisor.fork_server:
            return None
        if not can_fork():
            logger.info("the runtime environment changes the Python of workers: instances start without fork servers")
            return None
        return ForkCommands()

    async def _clear(self, role_id: str) -> None:
        """Kill an actor that was never placed, or whose node was given up. Otherwise it would keep its name."""
        with contextlib.suppress(ValueError, RayError):
            old = await asyncio.to_thread(ray.get_actor, role_id, namespace=self.namespace)
            await asyncio.to_thread(ray.kill, old)

    async def _end_silent(self, silent: Silent) -> None:
        """End the process if it is on this node, then `_clear` it. Ray counts an actor as dead once it was told to end,
        but a stopped process keeps resources that its successor needs."""
        if silent.node.node_id == self._here and not await end_process(sv.Peer(pid=silent.pid), END_TIMEOUT_S):
            logger.warning("%s (pid %d) does not end", silent.name, silent.pid)
        await self._clear(silent.name)

    def watch(self, role_id: str, on_exit: Callable[[str], None]) -> None:
        self._keep(self._watch(self._actors[role_id], on_exit))

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def kill(self, role_id: str) -> None:
        actor = self._actors.get(role_id)
        if actor is not None:
            await asyncio.to_thread(ray.kill, actor)

    async def announce(self, supervisor_address: str, *, leave: bool = False) -> None:
        """A process that does not answer is told again until it answers or has ended."""
        telling = [self._keep(self._tell(role_id, supervisor_address, leave=leave)) for role_id in self._actors]
        if telling:
            await asyncio.wait(telling, timeout=DESCRIBE_TIMEOUT_S)

    async def _tell(self, role_id: str, supervisor_address: str, *, leave: bool) -> None:
        actor = self._actors[role_id]
        while True:
            try:
                said = actor.set_supervisor.remote(supervisor_address, *([leave] if leave else []))
                async with asyncio.timeout(DESCRIBE_TIMEOUT_S):
                    await said
            except (ActorUnavailableError, TimeoutError) as error:
                logger.warning("%s could not be told about the new supervisor yet: %s", role_id, _brief(error))
                await asyncio.sleep(UNAVAILABLE_RETRY_S)
            except RayError as error:
                logger.warning("%s could not be told about the new supervisor: %s", role_id, _brief(error))
                return
            else:
                return

    async def close(self) -> None:
        if self._forks is not None:
            await self._forks.close()
        await end_tasks(self._tasks)

    async def _assume(self, spare_id: str, settings: RoleSettings) -> bool:
        """Whether the spare has taken the role. If not, the spare is killed."""
        spare = self._actors.pop(spare_id, None)
        if spare is None:
            return False
        try:
            async with asyncio.timeout(DESCRIBE_TIMEOUT_S):
                await spare.assume.remote(settings.to_dict())
        except (RayError, TimeoutError) as error:
            logger.warning("%s did not become %s: %s", spare_id, settings.id, _brief(error))
            await asyncio.to_thread(ray.kill, spare)
            return False
        self._actors[settings.id] = spare
        return True

    def _options(self, settings: RoleSettings) -> dict[str, Any]:
        # A spare keeps its name in Ray when it takes a role, so each spare gets a unique name.
        name = f"{settings.id}-{secrets.token_hex(4)}" if settings.role == SPARE else settings.id
        options: dict[str, Any] = {
            "name": name,
            "namespace": self.namespace,
            "lifetime": "detached",
            "max_restarts": 0,
            "num_cpus": 0,
        }
        if settings.role in MODEL_ROLES and self._places is not None:
            options |= self._places.options(settings.role, settings.id)
        elif (node_id := self._node_ids.get(settings.node_id)) is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=False)
        if settings.device.startswith("cuda"):
            # A process can open memory of another GPU only if that GPU is visible to it.
            options["runtime_env"] = ALL_DEVICES_VISIBLE
        elif settings.role == SPARE and resolve_device(self._config, self._gpus) == "cuda":
            options["runtime_env"] = ALL_DEVICES_VISIBLE
        return options

    def _create(self, settings: RoleSettings, options: dict[str, Any]) -> Any:
        return ray.remote(self._classes[settings.role]).options(**options).remote(settings.to_dict(), self.namespace)

    async def _describe(self, name: str, alive: Mapping[str, Node]) -> Running | Silent | None:
        """None if it has ended, or can never start, in which case it is killed. `alive`: nodes by Ray's id."""
        try:
            actor = await asyncio.to_thread(ray.get_actor, name, namespace=self.namespace)
            asked: asyncio.Future[dict[str, Any]] = asyncio.ensure_future(actor.describe.remote())
            await asyncio.wait([asked], timeout=min(STOPPED_S, DESCRIBE_TIMEOUT_S))
            silent = None if asked.done() else await asyncio.to_thread(look_at_silent, name, actor, alive)
            if silent is not None and silent.node.node_id == self._here and is_stopped(silent.pid):
                asked.cancel()
                logger.warning("%s was found, but is stopped", name)
                return silent
            async with asyncio.timeout(DESCRIBE_TIMEOUT_S):
                said = await asked
        except ValueError:
            return None  # it has just ended
        except (ActorUnavailableError, TimeoutError) as error:
            logger.warning("%s was found, but does not answer: %s", name, _brief(error))
            silent = await asyncio.to_thread(look_at_silent, name, actor, alive)
            if silent is None:
                await self._clear(name)
            return silent
        except RayError as error:
            logger.warning("%s was found, but cannot answer: %s", name, _brief(error))
            await self._clear(name)
            return None
        settings = RoleSettings(**said["settings"])
        self._actors[settings.id] = actor  # a spare that has taken a role still has its own name in Ray
        return Running(settings, sv.ClusterView.FromString(said["view"]), int(said["pid"]))

    @property
    def _device(self) -> str:
        return "cuda:0" if resolve_device(self._config, self._gpus) == "cuda" else "cpu"

    async def _watch(self, actor: Any, on_exit: Callable[[str], None]) -> None:
        reason = ""
        while True:
            try:
                await actor.wait_ended.remote()
            except ActorUnavailableError:  # its node is unreachable: Ray will report later whether it has ended
                await asyncio.sleep(UNAVAILABLE_RETRY_S)
            except RayTaskError as error:  # its role failed; the process ends a moment later
                reason = reason or str(error.cause)
                await asyncio.sleep(0.1)
            except RayError as error:
                on_exit(reason or _brief(error))
                return


def _vet_here(tree: Tree, device: str, alone: bool) -> tuple[str, str] | None:
    """A Ray task: the code and the message of an error on this node; None if there is none."""
    try:
        vet_node(from_tree(tree), device, alone)
    except AlignedServeError as error:
        return error.code, error.message
    return None


def _name_of(node: Mapping[str, Any]) -> str:
    """The name of a node of Ray's list."""
    return f"{node['NodeManagerHostname']}-{node['NodeID'][:6]}"


def _brief(error: BaseException) -> str:
    """The most informative line of a Ray error, at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((line for line in lines if "cause:" in line.lower() or "Error" in line), lines[0] if lines else "")
    return f"{type(error).__name__}: {said}"[:300]
