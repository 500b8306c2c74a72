"""Determines how a running cluster follows a changed configuration: nothing, other numbers of instances, a rolling
restart, or a new cluster.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from alignedserve.cluster.supervisor.plan import Shape
from alignedserve.cluster.supervisor.rolling import PROCESS_ROLES
from alignedserve.config import SECTIONS, Config
from alignedserve.errors import AlignedServeError, UnavailableError

if TYPE_CHECKING:
    from alignedserve.cluster.supervisor.core import SupervisorCore
    from alignedserve.cluster.supervisor.supervisor import Supervisor

logger = logging.getLogger(__name__)

COUNTS = frozenset({"cluster.prefill", "cluster.decode"})
# Besides gateway.*, batches.* and traces.*: Ray Serve replaces gateways and the supervisor anyway.
SERVES = frozenset(
    {
        "cluster.name",
        "cluster.ray_metrics",
        "kv_pool.pinned_prompts",
        "model.aliases",
        "model.chat_template",
        "model.tool_parser",
        "model.reasoning_parser",
    }
)
INSTANCES = frozenset({"prefill", "decode"})
ALL_ROLES = frozenset({*INSTANCES, *PROCESS_ROLES})
# Keys that a process reads when it starts, and that affect neither stores nor tokens (ranks: beyond rounding).
ROLLED: Mapping[str, frozenset[str]] = {
    "kv_pool.growth_reserve": frozenset({"kv_pool", "scheduler"}),
    "kv_pool.copy_timeout_s": INSTANCES,
    "kv_pool.prefix_cache": frozenset({*INSTANCES, "kv_pool", "scheduler"}),
    "kv_pool.cache_policy": frozenset({"kv_pool"}),
    "kv_pool.disk_path": frozenset({"kv_pool"}),
    "kv_pool.disk_gib": frozenset({"kv_pool"}),
    "kv_pool.pinned_fraction": frozenset({"kv_pool"}),
    "prefill.max_requests": frozenset({"prefill"}),
    "prefill.queue_tokens": frozenset({"prefill", "scheduler"}),
    "prefill.layerwise_tokens": frozenset({"prefill"}),
    "decode.watermark_blocks": frozenset({"decode"}),
    "decode.overlap": frozenset({"decode"}),
    "decode.join_iterations": frozenset({"decode", "scheduler"}),
    "decode.placement": frozenset({"decode"}),
    "cluster.threads": INSTANCES,
    "cluster.role_metrics": ALL_ROLES,
}
# On GPUs bundles and sizes of caches depend on them, which outlive an instance.
DEGREES: Mapping[str, frozenset[str]] = {
    "prefill.tensor_parallel": frozenset({"prefill"}),
    "prefill.pipeline_parallel": frozenset({"prefill"}),
    "decode.tensor_parallel": frozenset({"decode"}),
    "decode.pipeline_parallel": frozenset({"decode"}),
    "decode.expert_parallel": frozenset({"decode"}),
    "cluster.tensor_parallel": INSTANCES,
    "cluster.pipeline_parallel": INSTANCES,
}
SCHEDULER = frozenset({"scheduler", "decode", "prefill"})  # instances plan their own iterations by these
DIVIDES_MEMORY = frozenset({"scheduler.max_batch_share", "scheduler.max_batch_blocks"})
RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Change:
    """`replaced_for`: changed keys that require a new cluster; empty: the running one can go on. `shape`: other numbers
    of instances. `rolled`: roles for a rolling restart."""

    replaced_for: tuple[str, ...] = ()
    shape: Shape | None = None
    rolled: frozenset[str] = frozenset()

    @property
    def is_none(self) -> bool:
        return self == NO_CHANGE

    def __str__(self) -> str:
        if self.replaced_for:
            return f"a new cluster replaces it because of {', '.join(self.replaced_for)}"
        parts = [f"changing to {self.shape}"] if self.shape else []
        parts += [f"a rolling restart of {', '.join(sorted(self.rolled))}"] if self.rolled else []
        return "; ".join(parts) or "everything goes on"


NO_CHANGE = Change()


def compare(old: Config, new: Config, *, on_gpus: bool = False) -> Change:
    """The change from one configuration to the other. A key that is not listed here requires a new cluster."""
    replaced, rolled, counts = [], frozenset[str](), False
    for key in differing(old, new):
        section = key.partition(".")[0]
        if key in COUNTS:
            counts = True
        elif section in ("gateway", "batches", "traces") or key in SERVES:
            continue
        elif section in ("supervisor", "log"):
            rolled |= ALL_ROLES
        elif section == "scheduler" and key not in DIVIDES_MEMORY:
            rolled |= SCHEDULER
        elif key in ROLLED:
            rolled |= ROLLED[key]
        elif key in DEGREES and not on_gpus:
            rolled |= DEGREES[key]
        else:
            replaced.append(key)
    if replaced:
        return Change(tuple(replaced))
    return Change(shape=Shape.configured(new) if counts else None, rolled=rolled)


def compare_all(old: Iterable[tuple[str, Config]], new: Config, *, on_gpus: bool = False) -> Change:
    """The combined change of processes, each a role and the configuration it was started with, without numbers of
    instances."""
    changes = [(role, compare(one, new, on_gpus=on_gpus)) for role, one in old]
    replaced = {key: None for _, change in changes for key in change.replaced_for}
    return Change(tuple(replaced), rolled=frozenset(role for role, change in changes if role in change.rolled))


def differing(old: Config, new: Config) -> list[str]:
    """Keys whose values differ."""
    return [
        f"{name}.{key.name}"
        for name in SECTIONS
        for key in fields(getattr(new, name))
        if _value(old, name, key.name) != _value(new, name, key.name)
    ]


def _value(config: Config, section: str, key: str) -> Any:
    return getattr(getattr(config, section), key)


async def follow(change: Change, supervisor: Supervisor) -> None:
    """Apply a changed configuration to the running cluster step by step. Returns when the last step has begun."""
    logger.info("the configuration has changed: %s", change)
    if change.shape is not None:
        try:
            await _when_at_rest(supervisor, partial(supervisor.scale, change.shape.prefill, change.shape.decode))
        except AlignedServeError as error:
            logger.error("cannot change to %s: %s", change.shape, error.message)
            supervisor.core.scaling.failure = error.message
        supervisor.core.scaling.followed = change.shape
        supervisor.core.view_version += 1
    if change.rolled:
        await _when_at_rest(supervisor, partial(supervisor.restart, change.rolled))


async def _when_at_rest(supervisor: Supervisor, begin: Callable[[], Awaitable[object]]) -> None:
    """Begin once nothing else is in progress, and not during a pause, because a successor would not know of it."""
    core = supervisor.core
    while True:
        while not core.was_ready or not _at_rest(core) or core.paused:
            await supervisor.wait_changed(0.5)
        try:
            await begin()
        except UnavailableError as error:  # another command came first, or no node agent answered
            if core.ending or core.failure is not None:
                raise
            logger.warning("the changed configuration will be applied later: %s", error.message)
            await asyncio.sleep(RETRY_S)
        else:
            return


def _at_rest(core: SupervisorCore) -> bool:
    return core.roster.all_ready() and not core.scaling.draining and not core.rolling.running
