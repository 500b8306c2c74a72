"""Units: instances that are placed together, with their resources. Each is a bundle in Ray (ADR 37)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from alignedserve.cluster.supervisor.plan import Shape
from alignedserve.config import Config
from alignedserve.resources import parse_resources

ROUNDING = 1e-9  # tolerance for sums of shares
LEAST_CPU = 0.01  # a bundle must not be empty


@dataclass(frozen=True, slots=True)
class Unit:
    """Instances that share a node, and the sum of their resources."""

    instances: tuple[str, ...]
    resources: Mapping[str, float]

    def fits(self, left: Mapping[str, float]) -> bool:
        """Whether a node with these free resources has room for the unit."""
        return all(left.get(name, 0.0) >= amount - ROUNDING for name, amount in self.resources.items())


def resources_of(config: Config, role: str, gpu_share: float) -> dict[str, float]:
    """Ray resources of one instance of a role. `gpu_share` is its share of a GPU; 0: it runs on a CPU."""
    text = config.cluster.prefill_resources if role == "prefill" else config.cluster.decode_resources
    asked = parse_resources(text, f"cluster.{role}_resources")
    return asked | ({"GPU": gpu_share} if gpu_share else {})


def in_pairs(config: Config, *, on_gpu: bool) -> bool:
    """Whether paired instances share a node."""
    cluster = config.cluster
    if not cluster.prefetch or cluster.placement == "spread":
        return False
    own = cluster.prefill_resources or cluster.decode_resources
    return cluster.placement == "pairs" or (on_gpu and not own)


def plan_units(config: Config, instances: Sequence[tuple[str, str]], gpu_share: float) -> list[Unit]:
    """The units of these instances, `(role, id)`."""
    groups = [[instance] for instance in instances]
    if in_pairs(config, on_gpu=gpu_share > 0):
        groups = _pairs(instances)
    return [
        Unit(
            tuple(instance_id for _, instance_id in group),
            _together(resources_of(config, role, gpu_share) for role, _ in group),
        )
        for group in groups
    ]


def gpu_share(config: Config, shape: Shape, gpus: Sequence[int]) -> float:
    """Share of a GPU for each instance, on nodes with `gpus` GPUs, so that as few instances as possible share one."""
    if not config.cluster.share_gpu:
        return 1.0
    total, largest = max(1, sum(gpus)), max(1, *gpus, 1)
    sharers = -(-shape.instances // total)
    if in_pairs(config, on_gpu=True):  # all instances of a unit are on one node
        unit = 1 + -(-max(shape.prefill, shape.decode) // min(shape.prefill, shape.decode))
        sharers = max(sharers, -(-unit // largest))
    return 1.0 if sharers == 1 else int(1000 / sharers) / 1000


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
    # Ray allows no fractional amounts over 1.
    rounded = {name: amount if amount <= 1.0 else math.ceil(amount - 1e-9) for name, amount in total.items()}
    return {name: round(amount, 4) for name, amount in rounded.items()} or {"CPU": LEAST_CPU}


def describe_resources(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items()))
