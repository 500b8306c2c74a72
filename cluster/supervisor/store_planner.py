"""Plans the sizes of stores once for a cluster's life, as soon as model and memory are known."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace

from alignedserve.cluster.supervisor.managed_process import ManagedProcess
from alignedserve.cluster.supervisor.nodes import NodeBook
from alignedserve.cluster.supervisor.plan import MODEL_ROLES, SPARE
from alignedserve.cluster.supervisor.roster import Roster
from alignedserve.config import Config
from alignedserve.device_memory import DECODE, FREE_GAUGE, PREFILL, TOTAL_GAUGE, DeviceMemory, describe_plan, most_share
from alignedserve.model import ModelInfo
from alignedserve.sizing import HostMemory, plan_stores

logger = logging.getLogger(__name__)

MEMORY_GAUGE = "memory_available_bytes"


class StorePlanner:
    """`model_info` and `store_plan` are JSON, as the view carries them; empty until they are known.

    The weights in `model_info` are those that the newest prefill instance has loaded: the model's files may change
    meanwhile.
    """

    def __init__(self, config: Config, roster: Roster, nodes: NodeBook) -> None:
        self.model_info = ""
        self.store_plan = ""
        self._newest = 0  # the incarnation of the prefill instance whose weights are in `model_info`
        self._config = config
        self._roster = roster
        self._nodes = nodes
        self._devices: dict[str, tuple[str, DeviceMemory]] = {}  # instance -> role, and its GPU
        self._memory_bytes: dict[str, int] = {}  # of each node, by node agent

    def adopt(self, model_info: str, store_plan: str) -> None:
        """Keep the plan of an earlier supervisor, because the stores exist."""
        self.model_info = self.model_info or model_info
        self.store_plan = self.store_plan or store_plan

    def note(self, member: ManagedProcess) -> bool:
        """Note what a process reports about the model or memory. Returns whether anything became known.

        Raises ResourceError if the stores do not fit.
        """
        before = (self.model_info, self.store_plan)
        # The node agent's first report counts, because it was up before any weights were loaded.
        if MEMORY_GAUGE in member.beat.gauges:
            self._memory_bytes.setdefault(member.key.id, int(member.beat.gauges[MEMORY_GAUGE]))
        self.model_info = self.model_info or member.beat.model_info
        if member.key.role == "prefill" and member.beat.model_info and member.key.incarnation > self._newest:
            self._newest = member.key.incarnation
            weights = ModelInfo.from_json(member.beat.model_info).weights
            self.model_info = replace(ModelInfo.from_json(self.model_info), weights=weights).to_json()
        self._note_device(member)
        if self.model_info and not self.store_plan and (hosts := self._hosts(ModelInfo.from_json(self.model_info))):
            self._plan(ModelInfo.from_json(self.model_info), hosts)
        return before != (self.model_info, self.store_plan)

    def degraded(self) -> Iterator[str]:
        """Instances that have other weights than the newest prefill instance: the model's files have changed."""
        for member, _ in self._roster.members():
            info = member.beat.model_info
            if not info or info == self.model_info:  # this is called often
                continue
            if ModelInfo.from_json(info).weights != ModelInfo.from_json(self.model_info).weights:
                yield (
                    f"{member.key.id}: it has other weights than the newest prefill instance, since the model's files "
                    "have changed: `alignedserve restart` makes all instances load them"
                )

    def _hosts(self, model: ModelInfo) -> list[HostMemory] | None:
        """The memory and instances of each node; None while not all of it is known."""
        slots = self._roster.slots.values()
        planned = [self._nodes.planned(slot) for slot in slots if slot.planned.role in MODEL_ROLES]
        instances = [role for role in planned if role is not None]
        if len(instances) < len(planned):
            return None
        if any(role.on_gpu and role.id not in self._devices for role in instances):
            return None
        agents = {slot.planned.node_id: slot.planned.id for slot in slots if slot.planned.role == "node_agent"}
        if not agents or not self._memory_bytes.keys() >= set(agents.values()):
            return None
        shards = {slot.planned.node_id for slot in slots if slot.planned.role == "kv_pool"}
        shares = defaultdict[tuple[str, str], float](float)
        firsts = Counter(role.node_id for role in instances if role.role == PREFILL)
        for instance in instances:
            spread, nodes = self._config.spread(instance.role), self._nodes.nodes_of(instance)
            if nodes is None or not agents.keys() >= set(nodes):
                return None
            for number, node_id in enumerate(nodes):
                shares[node_id, instance.role] += most_share(model, spread, number)
        spares = sum(slot.planned.role == SPARE for slot in slots)
        return [
            HostMemory(
                node_id,
                self._memory_bytes[agent_id],
                shares[node_id, PREFILL],
                shares[node_id, DECODE],
                spares if node_id == self._nodes.home.node_id else 0,
                firsts[node_id],
                shard=node_id in shards,
            )
            for node_id, agent_id in agents.items()
        ]

    def _note_device(self, member: ManagedProcess) -> None:
        """Note the memory that a worker's GPU had before anything was loaded. A successor may report another figure."""
        gauges, key = member.beat.gauges, member.key
        slot = self._roster.slots.get(key.id)
        if slot is None or not slot.planned.on_gpu or TOTAL_GAUGE not in gauges:
            return
        total, free = int(gauges[TOTAL_GAUGE]), int(gauges[FREE_GAUGE])
        self._devices[key.id] = (
            key.role,
            DeviceMemory(key.id, member.hello.device, total, free, member.hello.node_id),
        )

    def _plan(self, model: ModelInfo, hosts: list[HostMemory]) -> None:
        devices = [self._devices[instance] for instance in sorted(self._devices)]
        plan = plan_stores(self._config, model, hosts, devices)
        self.store_plan = plan.to_json()
        logger.info("stores, in blocks: %s", self.store_plan)
        for line in describe_plan(self._config, plan.devices, devices):
            logger.info("%s", line)
