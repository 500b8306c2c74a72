"""Roles as Ray actors, found again by their names."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from alignedserve.cluster.actors import ACTORS, RoleActor
from alignedserve.cluster.launcher import Launcher, Running
from alignedserve.cluster.plan import SPARE, Node, resolve_device
from alignedserve.config import Config
from alignedserve.control.runtime import RoleSettings
from alignedserve.errors import UnavailableError
from alignedserve.proto import supervisor_pb2 as sv

logger = logging.getLogger(__name__)

NAME_WAIT_S = 10.0
DESCRIBE_TIMEOUT_S = 5.0
ALL_DEVICES_VISIBLE = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}


class RayLauncher(Launcher):
    """`namespace` is the cluster's own within its Ray cluster. Blocking calls of Ray run in threads."""

    def __init__(self, namespace: str, config: Config, actors: Mapping[str, type[RoleActor]] = ACTORS) -> None:
        self._classes = actors
        self._namespace = namespace
        self._config = config
        self._actors: dict[str, Any] = {}
        self._node_ids: dict[str, str] = {}
        self._gpus = 0
        self._watches: set[asyncio.Task[None]] = set()

    async def nodes(self) -> Sequence[Node]:
        own = ray.get_runtime_context().get_node_id()
        alive = [node for node in await asyncio.to_thread(ray.nodes) if node["Alive"]]
        alive.sort(key=lambda node: node["NodeID"] != own)
        nodes = []
        for node in alive:
            name = f"{node['NodeManagerHostname']}-{node['NodeID'][:6]}"
            self._node_ids[name] = node["NodeID"]
            # One node needs nobody from outside: nothing of ours listens beyond the machine.
            host = node["NodeManagerAddress"] if len(alive) > 1 else "127.0.0.1"
            nodes.append(Node(name, host, int(node["Resources"].get("GPU", 0))))
        self._gpus = max(node.gpus for node in nodes)
        return nodes

    async def find(self) -> Sequence[Running]:
        named = await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True)
        ids = [entry["name"] for entry in named if entry["namespace"] == self._namespace]
        found = await asyncio.gather(*(self._describe(role_id) for role_id in ids))
        return [running for running in found if running is not None]

    async def launch(self, settings: RoleSettings, spare_id: str = "") -> None:
        if spare_id and await self._assume(spare_id, settings):
            return
        options = self._options(settings)
        deadline = time.monotonic() + NAME_WAIT_S
        while True:
            try:
                self._actors[settings.id] = await asyncio.to_thread(self._create, settings, options)
            except ValueError as error:  # Ray has not yet noticed that the last one of this name has ended
                if time.monotonic() > deadline:
                    raise UnavailableError(f"{settings.id} could not be started: {error}") from error
                await asyncio.sleep(0.05)
            except RayError as error:
                raise UnavailableError(f"{settings.id} could not be started: {error}") from error
            else:
                return

    def watch(self, role_id: str, on_exit: Callable[[str], None]) -> None:
        task = asyncio.get_running_loop().create_task(self._watch(self._actors[role_id], on_exit))
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)

    async def kill(self, role_id: str) -> None:
        actor = self._actors.get(role_id)
        if actor is not None:
            await asyncio.to_thread(ray.kill, actor)

    async def announce(self, supervisor_address: str) -> None:
        for role_id, actor in self._actors.items():
            if role_id.startswith("node_agent"):
                try:
                    await asyncio.wait_for(actor.set_supervisor.remote(supervisor_address), DESCRIBE_TIMEOUT_S)
                except (RayError, TimeoutError) as error:
                    logger.warning("%s could not be told of the new supervisor: %s", role_id, _brief(error))

    async def close(self) -> None:
        for task in list(self._watches):
            task.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)

    async def _assume(self, spare_id: str, settings: RoleSettings) -> bool:
        """Whether the spare has taken the role; one that cannot is killed."""
        spare = self._actors.pop(spare_id, None)
        if spare is None:
            return False
        try:
            await asyncio.wait_for(spare.assume.remote(settings.to_dict()), DESCRIBE_TIMEOUT_S)
        except (RayError, TimeoutError) as error:
            logger.warning("%s did not become %s: %s", spare_id, settings.id, _brief(error))
            await asyncio.to_thread(ray.kill, spare)
            return False
        self._actors[settings.id] = spare
        return True

    def _options(self, settings: RoleSettings) -> dict[str, Any]:
        # A spare's name is nobody's place: it keeps it when it has taken a role, and the next spare is there already.
        name = f"{settings.id}-{secrets.token_hex(4)}" if settings.role == SPARE else settings.id
        options: dict[str, Any] = {
            "name": name,
            "namespace": self._namespace,
            "lifetime": "detached",
            "max_restarts": 0,
            "num_cpus": 0,
        }
        if (node_id := self._node_ids.get(settings.node_id)) is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=False)
        if settings.device.startswith("cuda"):
            instances = self._config.cluster.prefill + self._config.cluster.decode
            options["num_gpus"] = self._gpu_share(instances)
            # Memory of another process's GPU can be opened only where that GPU is visible.
            options["runtime_env"] = ALL_DEVICES_VISIBLE
        elif settings.role == SPARE and resolve_device(self._config, self._gpus) == "cuda":
            options["runtime_env"] = ALL_DEVICES_VISIBLE
        return options

    def _gpu_share(self, instances: int) -> float:
        if not self._config.cluster.share_gpu:
            return 1
        gpus = int(ray.cluster_resources().get("GPU", 1)) or 1
        return 1 if gpus >= instances else int(1000 / -(-instances // gpus)) / 1000

    def _create(self, settings: RoleSettings, options: dict[str, Any]) -> Any:
        return ray.remote(self._classes[settings.role]).options(**options).remote(settings.to_dict())

    async def _describe(self, role_id: str) -> Running | None:
        try:
            actor = await asyncio.to_thread(ray.get_actor, role_id, namespace=self._namespace)
            said: dict[str, Any] = await asyncio.wait_for(actor.describe.remote(), DESCRIBE_TIMEOUT_S)
        except ValueError:
            return None  # it has just ended
        except (RayError, TimeoutError) as error:
            logger.warning("%s was found, but does not answer: %s", role_id, _brief(error))
            await asyncio.to_thread(ray.kill, actor)
            return None
        settings = RoleSettings(**said["settings"])
        self._actors[settings.id] = actor  # a spare that has taken a role still has its own name in Ray
        return Running(settings, sv.ClusterView.FromString(said["view"]))

    async def _watch(self, actor: Any, on_exit: Callable[[str], None]) -> None:
        reason = ""
        while True:
            try:
                await actor.wait_ended.remote()
            except RayTaskError as error:  # its role failed; the process ends a moment later
                reason = reason or str(error.cause)
                await asyncio.sleep(0.1)
            except RayError as error:
                on_exit(reason or _brief(error))
                return


def _brief(error: BaseException) -> str:
    """The line of Ray's many that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((line for line in lines if "cause:" in line.lower() or "Error" in line), lines[0] if lines else "")
    return f"{type(error).__name__}: {said}"[:300]
