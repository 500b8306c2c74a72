"""`alignedserve scale`: another number of instances in a running cluster, and the wait until they are there."""

from __future__ import annotations

import time
from typing import Any

from alignedserve.cluster.cli.orders import find_cluster
from alignedserve.errors import AlignedServeError, ConfigError, UnavailableError

POLL_S = 0.2
TIMEOUT_S = 600.0
ROLES = ("prefill", "decode")


def scale(
    prefill: int | None, decode: int | None, url: str | None, timeout_s: float | None, api_key_file: str | None
) -> int:
    """The exit status; prints the new shape.

    Raises ConfigError for what no cluster can have, AlignedServeError with the cluster's reason where it refuses or a
    new instance cannot start, UnavailableError where it takes longer than `timeout_s`.
    """
    asked = {role: count for role, count in zip(ROLES, (prefill, decode), strict=True) if count is not None}
    if not asked:
        raise ConfigError("give --prefill N, --decode N, or both")
    if least := [role for role, count in asked.items() if count < 1]:
        raise ConfigError(f"--{least[0]} must be at least 1: a cluster without {least[0]} instances serves nothing")
    cluster = find_cluster(url, api_key_file)
    target, where = cluster.order("scale", asked), cluster.url
    wanted = {role: int(target[role]) for role in ROLES}
    print(f"{where}: going to {_shape(wanted)}", flush=True)
    limit_s = TIMEOUT_S if timeout_s is None else timeout_s
    deadline = time.monotonic() + limit_s
    while (waiting_for := _missing(cluster.status(), wanted)) is not None:
        if time.monotonic() > deadline:
            raise UnavailableError(f"{where} does not have {_shape(wanted)} after {limit_s:g} s: {waiting_for}")
        time.sleep(POLL_S)
    print(f"{where}: has {_shape(wanted)}")
    return 0


def _missing(status: dict[str, Any] | None, wanted: dict[str, int]) -> str | None:
    """What is not as it should be yet. Raises AlignedServeError where the cluster has given the change up."""
    scaling = (status or {}).get("scale")
    if status is None or scaling is None:
        return "the gateway cannot be asked"
    if any(scaling[role] != count for role, count in wanted.items()):
        said = scaling.get("failure") or f"it is to have {_shape(scaling)} now: somebody else has scaled it"
        raise AlignedServeError(f"the cluster does not grow to {_shape(wanted)}: {said}")
    states: dict[str, list[str]] = {role: [] for role in ROLES}
    for entry in status["roles"]:
        if entry["role"] in states:
            states[entry["role"]].append(entry["state"])
    for role, count in wanted.items():
        if states[role] != ["ready"] * count:
            return f"{role} instances are {', '.join(states[role]) or 'not there'}"
    return None


def _shape(counts: dict[str, Any]) -> str:
    return f"{counts['prefill']} prefill and {counts['decode']} decode instances"
