"""The take-over of an application's running processes by a supervisor that starts, under its own configuration."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from alignedserve.cluster.launch.launcher import Launcher, Running
from alignedserve.cluster.runtime_dir import new_cluster_id, new_token, remove_cluster_dir
from alignedserve.cluster.supervisor.handover import Predecessor, newest_view
from alignedserve.cluster.supervisor.plan import SPARE, Shape
from alignedserve.cluster.supervisor.redeploy import (
    ALL_ROLES,
    DEGREES,
    NO_CHANGE,
    Change,
    compare,
    compare_all,
    differing,
)
from alignedserve.cluster.supervisor.role_settings import Identity
from alignedserve.cluster.supervisor.supervisor import Supervisor
from alignedserve.config import Config
from alignedserve.config_sources import from_tree, known_keys
from alignedserve.proto import supervisor_pb2 as sv

logger = logging.getLogger(__name__)

ROLES_END_S = 8.0
LOOK_S = 0.25
UNHEALTHY_S = 5.0  # time until Ray Serve ends a gateway that reports unhealthy


@dataclass(frozen=True, slots=True)
class Inheritance:
    """`before` is the configuration of the running processes; None: nothing runs."""

    identity: Identity
    change: Change = NO_CHANGE
    predecessor: Predecessor | None = None
    before: Config | None = None


def from_nothing() -> Inheritance:
    """A new cluster."""
    return Inheritance(Identity(new_cluster_id(), new_token()))


async def inherit(launcher: Launcher, config: Config, code: str) -> Inheritance:
    """Find the application's running processes, and pause the supervisor that leads them. `code`: this version.

    Raises AlignedServeError if running processes would have to end for a cluster that could not start.
    """
    found = await launcher.find()
    running, new = _started_with(found), _on_their_device(config, found)
    other_degrees = any(DEGREES.keys() & differing(one, new) for _, one in running)
    if other_degrees or compare_all(running, new).replaced_for:
        # Before any other process learns of this one: if it fails, the running cluster goes on.
        await launcher.vet(config)
        found = await launcher.find()  # again, because the check may have taken long
    if not found:
        return from_nothing()
    settings = found[0].settings
    started_with, wanted = _started_with(found), _on_their_device(config, found)
    on_gpus = _on_gpus(found)
    change = compare_all(started_with, wanted, on_gpus=on_gpus)
    told = newest_view(found)
    predecessor, said = await _predecessor(told, settings.token, launcher)
    if said is not None:
        led = compare(_read(json.loads(said.config)), wanted, on_gpus=on_gpus)
        if led.replaced_for and not change.replaced_for:
            await launcher.vet(config)
        shape = led.shape or (Shape.configured(wanted) if said.resizing else None)
        rolled = change.rolled | led.rolled | (ALL_ROLES if said.code != code else frozenset())
        change = Change(change.replaced_for or led.replaced_for, shape, rolled)
    elif told.followed_prefill and Shape(told.followed_prefill, told.followed_decode) != Shape.configured(wanted):
        change = replace(change, shape=Shape.configured(wanted))
    identity = Identity(settings.cluster_id, settings.token)
    before = started_with[0][1] if started_with else wanted
    return Inheritance(identity, change, predecessor, before)


async def end_predecessors(inheritance: Inheritance, launcher: Launcher) -> None:
    """End the running cluster. Its gateways leave first, within the time for open requests. Ray Serve has started their
    successors by then, and new requests wait at its proxies."""
    before = inheritance.before
    assert before is not None
    logger.warning("%s", inheritance.change)
    supervisor = Supervisor(before, launcher, inheritance.identity, replaceable=True)
    supervisor.predecessor = inheritance.predecessor
    await supervisor.start()
    deadline = time.monotonic() + UNHEALTHY_S + before.gateway.drain_s + ROLES_END_S
    joined_by = time.monotonic() + UNHEALTHY_S
    while (supervisor.retire_gateways() or time.monotonic() < joined_by) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(LOOK_S)
    await supervisor.end_all(ROLES_END_S)
    await supervisor.close()
    remove_cluster_dir(inheritance.identity.cluster_id)


def _started_with(found: Sequence[Running]) -> list[tuple[str, Config]]:
    """The running roles and their configurations."""
    living = [running.settings for running in found if running.settings.role != SPARE]
    return [(settings.role, _read(settings.config)) for settings in living]


def _on_their_device(config: Config, found: Sequence[Running]) -> Config:
    return config.on_device("cuda" if _on_gpus(found) else "cpu")


def _on_gpus(found: Sequence[Running]) -> bool:
    return any(running.settings.device.startswith("cuda") for running in found)


async def _predecessor(
    told: sv.ClusterView, token: str, launcher: Launcher
) -> tuple[Predecessor | None, sv.HandOverReply | None]:
    """The predecessor, also if it does not answer but may live; it is told to leave later."""
    if not told.HasField("supervisor"):
        return None, None
    alive = {node.node_id for node in await launcher.nodes()}
    if told.supervisor.node_id and told.supervisor.node_id not in alive:
        logger.info("the supervisor at %s is lost with its node", told.supervisor.address)
        return None, None
    predecessor = Predecessor(told.supervisor, token)
    said = await predecessor.pause()
    return (None, None) if predecessor.ended else (predecessor, said)


def _read(tree: Mapping[str, Mapping[str, Any]]) -> Config:
    """A configuration, possibly of another version of the package: unknown keys are ignored."""
    known = set(known_keys())
    return from_tree(
        {
            section: {key: value for key, value in keys.items() if f"{section}.{key}" in known}
            for section, keys in tree.items()
        }
    )
