"""Environment variables of a role's process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from alignedserve.cluster.supervisor.plan import MODEL_ROLES, SPARE
from alignedserve.config_sources import from_tree
from alignedserve.control.runtime import RoleSettings
from alignedserve.memory import usable_cores
from alignedserve.model import SHIPPED_MODELS
from alignedserve.ranks.degrees import part_number
from alignedserve.ranks.forks import RANKS_VARIABLE


def role_environment(settings: RoleSettings) -> dict[str, str]:
    """Variables that must be set before a role imports anything."""
    cluster: dict[str, Any] = settings.config.get("cluster", {})
    holds_model = settings.role in (*MODEL_ROLES, SPARE)
    threads = int(cluster.get("threads", 0)) or usable_cores()
    variables = {
        # Otherwise Ray sets the number of threads to an actor's num_cpus. Waiting threads sleep, so that prefill and
        # decode can both use every core.
        "OMP_NUM_THREADS": str(threads if holds_model else 1),
        "OMP_WAIT_POLICY": "passive",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "GRPC_ENABLE_FORK_SUPPORT": "0",
    }
    if holds_model:
        # By default oneDNN and torch each cache 1,024 compiled products of 256 KiB, one for each number of rows of each
        # layer. They would grow to half a GiB, and in bfloat16 a miss costs no more than a hit (docs/measurements).
        variables |= {
            name: os.environ.get(name, "64") for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
        }
        variables |= ranks_environment(settings)
    else:
        variables["MALLOC_ARENA_MAX"] = "2"  # threads that mostly wait need no separate heaps
    if is_local_model(str(settings.config.get("model", {}).get("path", ""))):
        variables["HF_HUB_OFFLINE"] = "1"
    return variables


def ranks_environment(settings: RoleSettings) -> dict[str, str]:
    """What has a fork server prepare the other ranks of an instance, or of any that a spare may become."""
    config = from_tree(settings.config)
    here = [len(config.spread(role).ranks(0)) for role in MODEL_ROLES if settings.role in (role, SPARE)]
    ranks = 1 + config.spread(settings.role).ranks_of(settings.id) if is_rank_host(settings) else max(here, default=1)
    return {RANKS_VARIABLE: str(ranks - 1)} if ranks > 1 else {}


def is_rank_host(settings: RoleSettings) -> bool:
    """Whether it is not an instance, but the process that has ranks of it on a further node (`Spread.parts`)."""
    return settings.role in MODEL_ROLES and part_number(settings.id) > 0


def is_local_model(path: str) -> bool:
    return path in SHIPPED_MODELS or Path(path).expanduser().is_dir()


def telemetry_environment() -> dict[str, str]:
    """OpenTelemetry's variables of this process, for the gateways on all nodes."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("OTEL_")}
