"""The processes that a configuration requires, and their devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from alignedserve.config import Config
from alignedserve.errors import ResourceError
from alignedserve.ranks.degrees import device_of

# Each must have one ready instance before a request can be served. In display order.
REQUIRED_ROLES = ("node_agent", "kv_pool", "scheduler", "prefill", "decode")
MODEL_ROLES = ("prefill", "decode")
SPARE = "spare"
# Roles that a spare may take. A node agent starts quickly, and owns memory.
SPARED_ROLES = (*MODEL_ROLES, "kv_pool", "scheduler")


@dataclass(frozen=True, slots=True)
class PlannedRole:
    """One process that should run. `device` holds its model ("cpu", "cuda:N", of several ranks "cuda:N,M"); roles
    without a model have "cpu".

    `node_id` is its node; empty: not known yet.
    """

    role: str
    id: str
    device: str = "cpu"
    node_id: str = ""

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")


@dataclass(frozen=True, slots=True)
class Shape:
    """The target number of instances. They are numbered from 0."""

    prefill: int
    decode: int

    def __str__(self) -> str:
        return f"{self.prefill} prefill and {self.decode} decode instances"

    @classmethod
    def configured(cls, config: Config) -> Shape:
        return cls(config.cluster.prefill, config.cluster.decode)

    @property
    def instances(self) -> int:
        return self.prefill + self.decode

    def ids(self) -> list[tuple[str, str]]:
        """`(role, id)` of each instance."""
        counts = (("prefill", self.prefill), ("decode", self.decode))
        return [(role, f"{role}-{number}") for role, count in counts for number in range(count)]


@dataclass(frozen=True, slots=True)
class Node:
    """A machine on which processes can be started; `host` is the address that its gRPC servers bind.

    `resources`: its total resources in Ray, including `memory` in bytes; empty: unknown.
    """

    node_id: str
    host: str = "127.0.0.1"
    gpus: int = 0
    resources: Mapping[str, float] = field(default_factory=dict, hash=False)


def resolve_device(config: Config, gpus: int) -> str:
    """ "cpu" or "cuda"; "auto" is resolved by the node's number of GPUs."""
    if config.cluster.device != "auto":
        return config.cluster.device
    return "cuda" if gpus else "cpu"


def gpus_of(config: Config, shape: Shape) -> int:
    """GPUs of instances that share none: one for each rank."""
    return shape.prefill * config.degrees("prefill").ranks + shape.decode * config.degrees("decode").ranks


def check_gpus(config: Config, gpus: int, shape: Shape | None = None) -> None:
    """Raises ResourceError if the instances need more GPUs than there are; ConfigError if the channel does not reach
    them. `shape`: by default the configured one.
    """
    if resolve_device(config, gpus) == "cpu":
        return
    for role in MODEL_ROLES:
        config.degrees(role).require_channel(config.cluster.channel, "cuda")
    shape = shape or Shape.configured(config)
    needed, asked = gpus_of(config, shape), str(shape)
    if needed > shape.instances:
        asked += f" of {needed} ranks together"
    if gpus == 0:
        raise ResourceError(f"cluster.device is 'cuda' for {asked}, but this machine has no GPU; use --device cpu")
    if needed > gpus and not config.cluster.share_gpu:
        raise ResourceError(
            f"{asked} need {needed} GPUs, but there are {gpus}; use fewer, set cluster.share_gpu: true to let "
            "several share one, or use --device cpu"
        )


def plan_roles(config: Config, gpus: int, shape: Shape | None = None) -> list[PlannedRole]:
    """The roles of a cluster whose instances run on a node with `gpus` GPUs; spares last.

    It is the only node, and has no name. Raises ResourceError (`check_gpus`).
    """
    shape = shape or Shape.configured(config)
    check_gpus(config, gpus, shape)
    device = resolve_device(config, gpus)

    def on(role: str, index: int) -> str:
        if device == "cpu":
            return device
        here = {name: len(config.spread(name).ranks(0)) for name in MODEL_ROLES}
        first = index * (each := here[role]) + (shape.prefill * here["prefill"] if role == "decode" else 0)
        return device_of(dict.fromkeys(number % gpus for number in range(first, first + each)))

    prefill = [PlannedRole("prefill", f"prefill-{i}", on("prefill", i)) for i in range(shape.prefill)]
    decode = [PlannedRole("decode", f"decode-{i}", on("decode", i)) for i in range(shape.decode)]
    single = [PlannedRole(role, f"{role}-0") for role in ("node_agent", "kv_pool", "scheduler")]
    spares = [PlannedRole(SPARE, f"{SPARE}-{i}") for i in range(config.supervisor.spares)]
    return [*single, *prefill, *decode, *spares]


def plan_processes(config: Config, device: str, shape: Shape) -> list[PlannedRole]:
    """The planned processes without node agents and shards, before their nodes are known.

    `device`: "cpu" or "cuda". An instance gets GPUs of its node when it is placed.
    """
    placeholder = "cuda:0" if device == "cuda" else device
    instances = [PlannedRole(role, role_id, placeholder) for role, role_id in shape.ids()]
    spares = [PlannedRole(SPARE, f"{SPARE}-{i}") for i in range(config.supervisor.spares)]
    return [PlannedRole("scheduler", "scheduler-0"), *instances, *spares]
