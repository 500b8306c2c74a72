"""Changes the number of instances: checks for room, adds and removes instances, and pairs them.

Instances are numbered from 0, and those with the highest numbers are removed. A removed instance drains first: it stays
in the cluster, with its pairs, until neither it nor the scheduler has a request that needs it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from alignedserve.cluster.launch.node_room import NodeRoom
from alignedserve.cluster.launch.units import Unit, plan_units, with_parts
from alignedserve.cluster.supervisor.managed_process import Phase, Slot
from alignedserve.cluster.supervisor.nodes import NodeBook
from alignedserve.cluster.supervisor.plan import PlannedRole, Shape, check_gpus, gpus_of, resolve_device
from alignedserve.cluster.supervisor.roster import DRAINED, Roster
from alignedserve.config import Config
from alignedserve.device_memory import PREFILL, most_share
from alignedserve.errors import ConfigError, ResourceError, UnavailableError
from alignedserve.memory import describe_bytes
from alignedserve.model import ModelInfo
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.ranks.degrees import part_number
from alignedserve.scheduler.core.pairing import pair_up
from alignedserve.sizing import StorePlan, instance_bytes
from alignedserve.transfer.pair_choice import choose_pair_channel
from alignedserve.transfer.topology import PeerAccess, Place, link_rank

logger = logging.getLogger(__name__)

PROCESS_BYTES = 300 << 20  # a worker without a model: interpreter, torch, gRPC
DRAIN_LIMIT_S = 120.0


class Scaling:
    """Changes the roster's slots. The core decides about their processes."""

    def __init__(self, config: Config, roster: Roster, nodes: NodeBook, shape: Shape) -> None:
        self.shape = shape  # the numbers of instances that are wanted now
        self.followed = Shape.configured(config)
        """The configured numbers that were applied last. Those of this configuration may have yet to be applied."""
        self.pairs: list[tuple[str, str]] = []  # (decode id, prefill id), sorted; updated by `pair`
        self.failure = ""  # why the last change failed; cleared by the next
        self._config = config
        self._roster = roster
        self._nodes = nodes
        self._before = shape  # the numbers to return to if a growth fails
        self.pair()

    # ---- a change

    def grows(self, shape: Shape) -> bool:
        return shape.prefill > self.shape.prefill or shape.decode > self.shape.decode

    def check(self, shape: Shape, model_info: str, store_plan: str, free_bytes: Mapping[str, int]) -> None:
        """Raises UnavailableError if the change is impossible now, ResourceError if there is no room."""
        if draining := [slot.planned.id for slot in self._draining()]:
            raise UnavailableError(f"{', '.join(draining)} must end first; try again in a moment")
        if not model_info or not store_plan:
            raise UnavailableError("the cluster is still starting; try again when it is ready")
        if self.grows(shape):
            self._check_gpus(shape)
            self._check_memory(shape, model_info, store_plan, free_bytes)

    def _check_gpus(self, shape: Shape) -> None:
        if self._nodes.elastic:
            return  # further nodes may bring GPUs
        check_gpus(self._config, self._nodes.gpus, shape)
        if self._on_cpu() or not self._config.cluster.share_gpu:
            return
        each = -(-gpus_of(self._config, Shape.configured(self._config)) // self._nodes.gpus)
        if gpus_of(self._config, shape) > each * self._nodes.gpus:
            raise ResourceError(
                f"{shape} do not fit {self._nodes.gpus} GPUs: each was divided for {each} at the start; start "
                "the cluster with the largest number of instances that you may need"
            )

    def _check_memory(self, shape: Shape, model_info: str, store_plan: str, free_bytes: Mapping[str, int]) -> None:
        if not free_bytes:
            raise UnavailableError("no node agent reported its free memory; try again in a moment")
        new = self._new(shape)
        room, units = self.room(new, model_info, store_plan, free_bytes), self._units(new)
        if room.fits(units):
            return
        needed = [room.needed(unit) for unit in units]
        largest = f", {describe_bytes(max(needed))} of it on one node" if len(needed) > 1 else " on one node"
        them = f"{len(new)} more instances need" if len(new) > 1 else f"{new[0][1]} needs"
        raise ResourceError(
            f"{them} {describe_bytes(sum(needed))} of host memory{largest} (weights, cache, "
            f"buffers and processes), but only {room}"
        )

    def room(
        self, instances: Sequence[tuple[str, str]], model_info: str, store_plan: str, free_bytes: Mapping[str, int]
    ) -> NodeRoom:
        """Free memory of nodes, and the needs of these new instances, `(role, id)`; 0 before the stores are planned.

        An unused node has the memory that Ray reports, less its future shard. It counts only if all of the instances
        may run there.
        """
        if not model_info or not store_plan:
            return NodeRoom(free_bytes, {})
        model, plan = ModelInfo.from_json(model_info), StorePlan.from_json(store_plan)
        shard_bytes = 2 * PROCESS_BYTES + plan.pool * model.geometry(plan.block_size).block_bytes
        asked = [unit.resources for unit in self._units(instances)]
        fresh = {
            node.node_id: max(0, int(node.resources.get("memory", 0)) - shard_bytes)
            for node in self._nodes.unused()
            if all(node.resources.get(name, 0) >= amount for resources in asked for name, amount in resources.items())
        }
        needed = {
            part: self._needed_bytes(role, part, model, plan) for role, part in with_parts(self._config, instances)
        }
        return NodeRoom({**fresh, **free_bytes}, needed)

    def _units(self, instances: Sequence[tuple[str, str]]) -> list[Unit]:
        """The units of these instances, with a nominal share of a GPU. The launcher sets the real share."""
        return plan_units(self._config, with_parts(self._config, instances), 0.0 if self._on_cpu() else 0.001)

    def _needed_bytes(self, role: str, part: str, model: ModelInfo, plan: StorePlan) -> int:
        """Host memory in bytes of an instance, or of its part of this id on a further node: on a CPU with its weights
        and cache, and of an instance its buffers; on GPUs without them.
        """
        if not self._on_cpu():
            return PROCESS_BYTES
        block_bytes = model.geometry(plan.block_size).block_bytes
        share = most_share(model, self._config.spread(role), part_number(part))
        cache = plan.prefill_cache if role == PREFILL else plan.decode_cache
        needed = PROCESS_BYTES + int(share * (cache * block_bytes + instance_bytes(self._config, role, model)))
        if role == PREFILL and self._config.cluster.prefetch and not part_number(part):
            needed += (plan.batch_buffer + plan.requests_buffer) * block_bytes
        return needed

    def _on_cpu(self) -> bool:
        return resolve_device(self._config, self._nodes.gpus) == "cpu"

    def change(self, shape: Shape, now: float) -> None:
        """Add missing slots, and mark surplus ones as draining."""
        logger.info("from %s to %s", self.shape, shape)
        wanted = {role_id for _, role_id in shape.ids()}
        for role, role_id in self._new(shape):
            slot = self._roster.add(PlannedRole(role, role_id, self._device(role)))
            slot.launch_at = now
        for _, role_id in self.shape.ids():
            if role_id not in wanted:
                self._roster.slots[role_id].draining_since = now
        self._before, self.shape = self.shape, shape
        self.failure = ""
        self.pair()

    def give_up(self, reason: str, now: float) -> None:
        """Revert to the numbers before, because an added instance cannot start."""
        failed, before = self.shape, self._before
        self.change(before, now)
        self.failure = f"{reason}; the cluster stays with {before}"
        logger.error("cannot change to %s: %s", failed, self.failure)

    def settle(self) -> None:
        """Complete the change once all instances are ready. It is not reverted after that."""
        if self._roster.all_ready():
            self._before = self.shape

    @property
    def growing(self) -> bool:
        """Whether a change that adds instances is in progress."""
        return not set(self.shape.ids()) <= set(self._before.ids())

    def is_new(self, slot: Slot) -> bool:
        """Whether it was added by a change that is not complete yet."""
        return not slot.draining and (slot.planned.role, slot.planned.id) not in self._before.ids()

    def has_place(self, slot: Slot) -> bool:
        """Whether there is a node for its next process."""
        return self._nodes.planned(slot) is not None

    def adopt(self, view: sv.ClusterView, found: Iterable[PlannedRole], now: float) -> None:
        """Take over the view of an earlier supervisor. `found` are the running processes."""
        for planned in found:
            slot = self._roster.slots.get(planned.id)
            if slot is not None:
                slot.planned, slot.used = planned, True
            elif planned.id in view.draining:
                slot = self._roster.add(planned)
                slot.draining_since, slot.used = now, True
        self.pairs = [(pair.decode_id, pair.prefill_id) for pair in view.pairs]
        self.pair()

    # ---- removed instances

    def _draining(self) -> list[Slot]:
        return [slot for slot in self._roster.slots.values() if slot.draining]

    @property
    def draining(self) -> list[str]:
        return [slot.planned.id for slot in self._draining()]

    def due(self, now: float) -> list[tuple[Slot, bool]]:
        """Draining slots whose processes can end now. True: its drain took too long, and requests may be lost."""
        due = []
        for slot in self._draining():
            if not slot.used and slot.phase in (Phase.WAITING, Phase.STARTING, Phase.JOINED):
                due.append((slot, False))  # it never had a request
            elif slot.phase is Phase.JOINED:
                late = slot.draining_since is not None and now - slot.draining_since > DRAIN_LIMIT_S
                if late or (self._is_drained(slot) and self._scheduler_agrees(slot)):
                    due.append((slot, late))
        return due

    @staticmethod
    def _is_drained(slot: Slot) -> bool:
        return slot.member is not None and slot.member.state == DRAINED

    def _scheduler_agrees(self, slot: Slot) -> bool:
        schedulers = (other for other in self._roster.slots.values() if other.planned.role == "scheduler")
        return any(
            other.ready and other.member is not None and slot.planned.id in other.member.beat.drained
            for other in schedulers
        )

    def forget(self, slot: Slot) -> None:
        """The process of a draining instance has ended. In a rolling restart a successor takes its place."""
        self._roster.remove(slot.planned.id)
        if (slot.planned.role, slot.planned.id) in self.shape.ids():
            self._roster.add(slot.planned)
        self.pair()

    # ---- inside

    def pair(self) -> None:
        """Update the pairs. A pair whose instances have both served is kept, because its buffers may hold requests.

        A pair is added for an instance that would otherwise have none, or only pairs with a draining instance.
        """
        if not self._config.cluster.prefetch:
            return
        slots = self._roster.slots
        kept = [pair for pair in self.pairs if all(name in slots and slots[name].used for name in pair)]
        lasting = {name for pair in kept if not any(slots[name].draining for name in pair) for name in pair}
        where = {name: (slot.place, slot.reaches) for name, slot in slots.items()}
        wanted = pair_up(self.shape.prefill, self.shape.decode, lambda d, p: _known_rank(*where[d], *where[p]))
        added = [pair for pair in wanted if not lasting.issuperset(pair)]
        self.pairs = sorted(kept + added)  # independent of the order of joining

    def link_rank(self, decode_id: str, prefill_id: str) -> int:
        """Rank of the link of two instances, 0 for the best, as far as their places are known."""
        ours, theirs = self._roster.slots[decode_id], self._roster.slots[prefill_id]
        return _known_rank(ours.place, ours.reaches, theirs.place, theirs.reaches)

    def channel_problem(self) -> ResourceError | None:
        """The error of a pair, of which both processes have joined, that cannot have the configured channel."""
        cluster, slots = self._config.cluster, self._roster.slots
        for names in self.pairs:
            ours, theirs = (slots[name] for name in names)
            if not (ours.member and theirs.member):
                continue
            reach, places = _reach(ours.reaches, theirs.reaches), (ours.place, theirs.place)
            first, second = zip(names, places, strict=True)
            try:
                choose_pair_channel(cluster.channel, first, second, reach, allow_slow=cluster.allow_slow_channel)
            except ResourceError as error:
                return error
        return None

    def _new(self, shape: Shape) -> list[tuple[str, str]]:
        return [(role, role_id) for role, role_id in shape.ids() if role_id not in self._roster.slots]

    def _device(self, role: str) -> str:
        """The device of a new instance until its node is known."""
        return "cpu" if self._on_cpu() else self._nodes.free_device(role)


@lru_cache(4096)
def _known_rank(first: Place, reached: tuple[str, ...], second: Place, reached_back: tuple[str, ...]) -> int:
    """The rank of a link. Unknown facts are assumed to be the best: one node, devices that reach each other."""
    node_id = first.node_id if first.node_id and second.node_id else second.node_id
    return link_rank(replace(first, node_id=node_id), second, _reach(reached, reached_back))


def _reach(reached: tuple[str, ...], reached_back: tuple[str, ...]) -> PeerAccess:
    def reach(device: str, other: str) -> bool:
        return not (reached or reached_back) or other in reached or device in reached_back

    return reach


def next_shape(shape: Shape, prefill: int, decode: int) -> Shape:
    """`shape` with other numbers; 0: unchanged. Raises ConfigError for numbers out of range."""
    wanted = Shape(prefill or shape.prefill, decode or shape.decode)
    if not (1 <= wanted.prefill <= 1024 and 1 <= wanted.decode <= 1024):
        raise ConfigError(f"there must be between 1 and 1024 instances of a role, not {wanted}")
    return wanted
