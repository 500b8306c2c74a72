"""Units: instances that are placed together, with their resources. Each is a bundle in Ray (ADR 37)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from alignedserve.cluster.supervisor.plan import Shape, gpus_of
from alignedserve.config import Config
from alignedserve.ranks.degrees import part_number
from alignedserve.resources import parse_resources

MOST_SHARERS = 1000
ROUNDING = 1e-9  # tolerance for sums of shares
LEAST_CPU = 0.01  # a bundle must not be empty
PLACED_ALONE = "with cluster.placement: spread each instance is placed by itself"


@dataclass(frozen=True, slots=True)
class Unit:
    """Instances that share a node, and the sum of their resources."""

    instances: tuple[str, ...]
    resources: Mapping[str, float]

    def fits(self, left: Mapping[str, float]) -> bool:
        """Whether a node with these free resources has room for the unit."""
        return all(left.get(name, 0.0) >= amount - ROUNDING for name, amount in self.resources.items())


def with_parts(config: Config, instances: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """These instances, `(role, id)`, and after them what they have on further nodes (`Spread.parts`)."""
    parts = [(role, part) for role, role_id in instances for part in config.spread(role).parts(role_id)]
    return [*instances, *parts]


def resources_of(config: Config, role: str, gpu_share: float, role_id: str = "") -> dict[str, float]:
    """Ray resources of an instance on its first node, or of the part `role_id` on another one.

    `gpu_share` is each rank's share of a GPU; 0: it runs on a CPU.
    """
    text = config.cluster.prefill_resources if role == "prefill" else config.cluster.decode_resources
    asked = parse_resources(text, f"cluster.{role}_resources")
    return asked | ({"GPU": _whole_over_one(config.spread(role).ranks_of(role_id) * gpu_share)} if gpu_share else {})


def _whole_over_one(amount: float) -> float:
    """Ray allows no fractional amounts over 1."""
    return amount if amount <= 1.0 else math.ceil(amount - ROUNDING)


def in_pairs(config: Config, *, on_gpu: bool) -> bool:
    """Whether paired instances share a node."""
    cluster = config.cluster
    if not cluster.prefetch or cluster.placement == "spread":
        return False
    own = cluster.prefill_resources or cluster.decode_resources
    return cluster.placement == "pairs" or (on_gpu and not own)


def plan_units(
    config: Config, instances: Sequence[tuple[str, str]], gpu_share: float, node_gpus: int = 0
) -> list[Unit]:
    """The units of these instances and parts of instances, `(role, id)`.

    `node_gpus`: of the largest node, 0 if that is not known. Unless `pairs` is configured, partners that it has no GPUs
    for are units of their own.
    """
    groups: list[Sequence[tuple[str, str]]] = [[instance] for instance in instances]
    if in_pairs(config, on_gpu=gpu_share > 0):
        firsts = [instance for instance in instances if not part_number(instance[1])]
        groups = [*_pairs(firsts), *([part] for part in instances if part not in firsts)]
        if node_gpus and config.cluster.placement != "pairs":
            groups = [part for group in groups for part in _divided(config, group, gpu_share, node_gpus)]
    return [_unit(config, group, gpu_share) for group in groups]


def _unit(config: Config, group: Sequence[tuple[str, str]], gpu_share: float) -> Unit:
    resources = _together(resources_of(config, role, gpu_share, role_id) for role, role_id in group)
    return Unit(tuple(instance_id for _, instance_id in group), resources)


def _divided(
    config: Config, group: Sequence[tuple[str, str]], gpu_share: float, node_gpus: int
) -> list[Sequence[tuple[str, str]]]:
    """The first instance with as many of its partners as a node has GPUs for, and each of the others alone."""
    fitting = len(group)
    while fitting > 1 and _unit(config, group[:fitting], gpu_share).resources.get("GPU", 0.0) > node_gpus:
        fitting -= 1
    return [group[:fitting], *([other] for other in group[fitting:])]


def gpu_share(config: Config, shape: Shape, gpus: Sequence[int]) -> float:
    """Share of a GPU for each rank, on nodes with `gpus` GPUs, so that as few as possible share one."""
    if not config.cluster.share_gpu:
        return 1.0
    total, largest = max(1, sum(gpus)), max(1, *gpus, 1)
    fewest = min(shape.prefill, shape.decode)
    whole = Shape(-(-shape.prefill // fewest), -(-shape.decode // fewest))
    # All instances of a unit are on one node.
    units = [whole] if in_pairs(config, on_gpu=True) else [Shape(1, 0), Shape(0, 1)]
    sharers = -(-gpus_of(config, shape) // total)
    while sharers < MOST_SHARERS:
        share = 1.0 if sharers == 1 else int(1000 / sharers) / 1000
        if max(_whole_gpus(config, unit, share) for unit in units) <= largest:
            break
        sharers += 1  # amounts over one are rounded up
    return share


def _whole_gpus(config: Config, unit: Shape, share: float) -> float:
    """GPUs that the instances of a unit ask for together, on one node."""
    each = {role: _whole_over_one(config.spread(role).most_ranks * share) for role in ("prefill", "decode")}
    return _whole_over_one(unit.prefill * each["prefill"] + unit.decode * each["decode"])


def _pairs(instances: Sequence[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Groups of one instance of the smaller role and its partners of the other, by index."""
    prefill = [instance for instance in instances if instance[0] == "prefill"]
    decode = [instance for instance in instances if instance[0] == "decode"]
    few, many = sorted((prefill, decode), key=len)
    if not few:
        return [[instance] for instance in many]
    return [[instance, *many[number :: len(few)]] for number, instance in enumerate(few)]


def _together(asked: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for resources in asked:
        for name, amount in resources.items():
            total[name] = total.get(name, 0.0) + amount
    return {name: round(_whole_over_one(amount), 4) for name, amount in total.items()} or {"CPU": LEAST_CPU}


def describe_resources(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items()))
