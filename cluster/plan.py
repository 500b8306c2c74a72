"""What a cluster consists of: the roles that the configuration asks for, their devices, and who prefetches for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.config import Config
from alignedserve.errors import ResourceError

# Each must have one ready instance before a request can be served, in the order in which people read them.
REQUIRED_ROLES = ("node_agent", "kv_pool", "scheduler", "prefill", "decode")
MODEL_ROLES = ("prefill", "decode")
SPARE = "spare"
# What a spare may become. An agent is quick to start, and owns memory.
SPARED_ROLES = (*MODEL_ROLES, "kv_pool", "scheduler")


@dataclass(frozen=True, slots=True)
class PlannedRole:
    """One process that should run. `device` is where its model lies ("cpu", "cuda:N"); roles without one have "cpu"."""

    role: str
    id: str
    device: str = "cpu"

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")


@dataclass(frozen=True, slots=True)
class Node:
    """A machine that processes can be started on; `host` is the address that its gRPC servers bind."""

    node_id: str
    host: str = "127.0.0.1"
    gpus: int = 0


def resolve_device(config: Config, gpus: int) -> str:
    """ "cpu" or "cuda", for "auto" by what the node has."""
    if config.cluster.device != "auto":
        return config.cluster.device
    return "cuda" if gpus else "cpu"


def check_gpus(config: Config, gpus: int) -> None:
    """Raises ResourceError where more GPUs are asked for than there are."""
    if resolve_device(config, gpus) == "cpu":
        return
    instances = config.cluster.prefill + config.cluster.decode
    asked = f"{config.cluster.prefill} prefill and {config.cluster.decode} decode instances"
    if gpus == 0:
        raise ResourceError(f"cluster.device is 'cuda' for {asked}, but this machine has no GPU; use --device cpu")
    if instances > gpus and not config.cluster.share_gpu:
        raise ResourceError(
            f"{asked} need {instances} GPUs, but there are {gpus}; ask for fewer, set cluster.share_gpu: true to let "
            "several share one, or use --device cpu"
        )


def plan_roles(config: Config, gpus: int) -> list[PlannedRole]:
    """The roles of a cluster whose instances run on a node with `gpus` GPUs; spares last.

    Raises ResourceError (`check_gpus`).
    """
    check_gpus(config, gpus)
    device = resolve_device(config, gpus)

    def on(index: int) -> str:
        return "cpu" if device == "cpu" else f"cuda:{index % gpus}"

    prefill = [PlannedRole("prefill", f"prefill-{i}", on(i)) for i in range(config.cluster.prefill)]
    decode = [
        PlannedRole("decode", f"decode-{i}", on(config.cluster.prefill + i)) for i in range(config.cluster.decode)
    ]
    single = [PlannedRole(role, f"{role}-0") for role in ("node_agent", "kv_pool", "scheduler")]
    spares = [PlannedRole(SPARE, f"{SPARE}-{i}") for i in range(config.supervisor.spares)]
    return [*single, *prefill, *decode, *spares]


def pair_up(config: Config) -> Sequence[tuple[str, str]]:
    """`(decode_id, prefill_id)`: through whose buffers a decode instance is prefetched for. None without prefetching.

    Every instance is used: with more prefill instances than decode ones a decode instance has several.
    """
    if not config.cluster.prefetch:
        return ()
    prefill, decode = config.cluster.prefill, config.cluster.decode
    if prefill >= decode:
        return [(f"decode-{p % decode}", f"prefill-{p}") for p in range(prefill)]
    return [(f"decode-{d}", f"prefill-{d % prefill}") for d in range(decode)]
