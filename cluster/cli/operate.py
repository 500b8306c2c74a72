"""Commands to a running cluster, sent to its gateway: `alignedserve scale`, `restart`, `stop` and `wait-idle`.

Each command prints what happens, waits until it is done, and returns its exit status. `COMMANDS` has their options.
"""

from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from alignedserve.admin import ADMIN_HEADER
from alignedserve.cluster.cli.status_command import ask_newest, record_of
from alignedserve.cluster.records import fetch_json, fetch_metrics, fetch_status
from alignedserve.errors import AlignedServeError, ConfigError, UnavailableError
from alignedserve.proc_stat import is_alive

ORDER_TIMEOUT_S = 15.0
POLL_S = 0.2
# Default limits, without --timeout.
SCALED_WITHIN_S = 600.0
RESTARTED_WITHIN_S = 1800.0
ENDS_WITHIN_S = 60.0  # beyond the time for open requests
SCALED_ROLES = ("prefill", "decode")

OPEN_REQUESTS = "alignedserve_gateway_open_requests"
OF_SUPERVISOR = "alignedserve_role_starts_total"  # on every page that covers the whole cluster
UNKNOWN = "an unknown number of"
IDLE_POLL_S = 0.5
METRICS_TIMEOUT_S = 5.0
GONE_AFTER_S = 5.0  # a proxy that is replaced answers again by then


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """The URL and keys of a cluster. The pids are of its roles and its supervisor, if this user runs it here."""

    url: str
    api_key: str = field(repr=False)
    admin_key: str = field(repr=False)
    pids: frozenset[int] = frozenset()
    supervisor_pid: int = 0

    def status(self) -> dict[str, Any] | None:
        """None while no gateway answers."""
        try:
            return fetch_status(self.url, api_key=self.api_key)
        except UnavailableError:
            return None

    def order(self, name: str, body: dict[str, Any], timeout_s: float = ORDER_TIMEOUT_S) -> dict[str, Any]:
        """The gateway's answer. Raises AlignedServeError with its reason, or UnavailableError if it does not answer."""
        answer = fetch_json(
            f"{self.url}/alignedserve/{name}",
            timeout_s,
            api_key=self.api_key,
            body=body,
            headers={ADMIN_HEADER: self.admin_key},
        )
        if isinstance(error := answer.get("error"), dict):
            raise AlignedServeError(str(error.get("message")))
        return answer


def find_cluster(url: str | None, api_key_file: str | None) -> RunningCluster:
    """The cluster at `url`, or this user's only one. Raises AuthenticationError, ConfigError, UnavailableError."""

    def fetch(address: str, *, api_key: str) -> tuple[str, dict[str, Any]]:
        return api_key, fetch_status(address, api_key=api_key)

    where, (api_key, status) = ask_newest(url, api_key_file, fetch, only=True)
    record = record_of(where)
    if record is None:
        return RunningCluster(where.rstrip("/"), api_key, "")
    pids = _pids_here(status.get("roles", ()), record.pid)
    return RunningCluster(where.rstrip("/"), api_key, record.admin_key, pids, record.pid)


def admin_headers(url: str) -> dict[str, str]:
    """The header that opens the requests of all API keys, if this user runs the cluster at `url`."""
    record = record_of(url)
    return {ADMIN_HEADER: record.admin_key} if record is not None else {}


def _pids_here(roles: Sequence[Mapping[str, Any]], supervisor_pid: int) -> frozenset[int]:
    """The processes on the supervisor's node, which is this machine. Another node's pid is of another process here.

    None while the cluster starts: until a gateway answers, the command that started it does, and names no nodes.
    """
    known = [role for role in roles if "node" in role]
    nodes = {role["node"] for role in known if role["role"] == "supervisor" and int(role["pid"]) == supervisor_pid}
    return frozenset(int(role["pid"]) for role in known if role["node"] in nodes)


# ---- scale


def scale(
    prefill: int | None, decode: int | None, url: str | None, timeout_s: float | None, api_key_file: str | None
) -> int:
    """Change the numbers of instances. Returns once all are ready.

    Raises ConfigError for impossible numbers, AlignedServeError with the cluster's reason if it refuses or a new
    instance cannot start, UnavailableError after `timeout_s`.
    """
    asked = {role: count for role, count in zip(SCALED_ROLES, (prefill, decode), strict=True) if count is not None}
    if not asked:
        raise ConfigError("give --prefill N, --decode N, or both")
    if least := [role for role, count in asked.items() if count < 1]:
        raise ConfigError(f"--{least[0]} must be at least 1: a cluster cannot serve without {least[0]} instances")
    cluster = find_cluster(url, api_key_file)
    target, where = cluster.order("scale", asked), cluster.url
    wanted = {role: int(target[role]) for role in SCALED_ROLES}
    print(f"{where}: changing to {_shape(wanted)}", flush=True)
    limit_s = SCALED_WITHIN_S if timeout_s is None else timeout_s
    deadline = time.monotonic() + limit_s
    while (waiting_for := _missing(cluster.status(), wanted)) is not None:
        if time.monotonic() > deadline:
            raise UnavailableError(f"{where} does not have {_shape(wanted)} after {limit_s:g} s: {waiting_for}")
        time.sleep(POLL_S)
    print(f"{where}: has {_shape(wanted)}")
    return 0


def _missing(status: dict[str, Any] | None, wanted: dict[str, int]) -> str | None:
    """What is still missing; None if nothing is. Raises AlignedServeError if the cluster has given up the change."""
    scaling = (status or {}).get("scale")
    if status is None or scaling is None:
        return "no gateway answers with its status"
    if any(scaling[role] != count for role, count in wanted.items()):
        said = scaling.get("failure") or f"another command has since requested {_shape(scaling)}"
        raise AlignedServeError(f"the cluster was not scaled to {_shape(wanted)}: {said}")
    states: dict[str, list[str]] = {role: [] for role in SCALED_ROLES}
    for entry in status["roles"]:
        if entry["role"] in states:
            states[entry["role"]].append(entry["state"])
    for role, count in wanted.items():
        if states[role] != ["ready"] * count:
            return f"{role} instances are {', '.join(states[role]) or 'missing'}"
    return None


def _shape(counts: dict[str, Any]) -> str:
    return f"{counts['prefill']} prefill and {counts['decode']} decode instances"


# ---- restart


def restart(roles: Sequence[str], url: str | None, timeout_s: float | None, api_key_file: str | None) -> int:
    """A rolling restart of these roles (empty: all roles). Shows each step: as a bar on a terminal, as lines elsewhere.

    Returns once every process is replaced.

    Raises AlignedServeError with the cluster's reason if it refuses or the restart has stopped, UnavailableError after
    `timeout_s`.
    """
    from alignedserve.cluster.cli.progress import Steps  # its import would slow every command down

    cluster = find_cluster(url, api_key_file)
    order = cluster.order("restart", {"roles": list(roles)})
    print(f"{cluster.url}: restarting {', '.join(order['roles'])}", flush=True)
    limit_s = RESTARTED_WITHIN_S if timeout_s is None else timeout_s
    deadline = time.monotonic() + limit_s
    with Steps(order.get("processes"), "process", f"{cluster.url}: ") as steps:
        while True:
            now = (cluster.status() or {}).get("restart")  # no gateway answers while the only one is replaced
            if now is not None and now["since_unix_s"] >= order["since_unix_s"]:
                if now["failure"]:
                    raise AlignedServeError(f"the rolling restart has stopped: {now['failure']}")
                if now["done"]:
                    break
                steps.show(now["doing"], now.get("replaced", 0))
            if time.monotonic() > deadline:
                last = steps.shown or "not begun"
                raise UnavailableError(f"{cluster.url} has not restarted after {limit_s:g} s: {last}")
            time.sleep(POLL_S)
    print(f"{cluster.url}: all processes of these roles were replaced")
    return 0


# ---- stop


def stop(url: str | None, timeout_s: float | None, api_key_file: str | None) -> int:
    """End the cluster. Returns once it has ended.

    Raises AlignedServeError if the cluster refuses, UnavailableError if it does not end within `timeout_s`.
    """
    cluster = find_cluster(url, api_key_file)
    answer = cluster.order("stop", {})
    grace_s, command = float(answer["grace_s"]), answer["command"]
    pids = set(cluster.pids)
    if command["pid"] and command["host"] == socket.gethostname():
        pids.add(command["pid"])
    limit_s = grace_s + ENDS_WITHIN_S if timeout_s is None else timeout_s
    print(f"{cluster.url}: ending; open requests have {grace_s:g} s to finish", flush=True)
    deadline = time.monotonic() + limit_s
    while not _has_ended(cluster, pids):
        if time.monotonic() > deadline:
            raise UnavailableError(f"{cluster.url} has not ended within {limit_s:g} s")
        time.sleep(POLL_S)
    print(f"{cluster.url}: has ended")
    return 0


def _has_ended(cluster: RunningCluster, pids: set[int]) -> bool:
    """Whether none of its processes known here lives, and no gateway answers."""
    if any(map(is_alive, pids)):
        return False
    status = cluster.status()
    return status is None or "roles" not in status


# ---- wait-idle


def wait_idle(
    url: str,
    timeout_s: float,
    fetch: Callable[[str, float], str] = fetch_metrics,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Returns 0 once no gateway of the cluster at `url` holds a request, 1 if some are open after `timeout_s`.

    While there is a supervisor, any gateway reports the requests of all gateways. Without one it reports only its own,
    and is asked again. No key is needed. Also returns 0 if no gateway answers for five seconds.
    """
    from alignedserve.control.samples import value  # its import would slow every command down

    answered_at = clock()
    deadline = answered_at + timeout_s
    open_requests = UNKNOWN
    while True:
        try:
            page = fetch(url, METRICS_TIMEOUT_S)
        except UnavailableError as error:
            if clock() >= answered_at + GONE_AFTER_S:
                print(f"nothing to wait for: {error.message}")
                return 0
        else:
            count = int(value(page, OPEN_REQUESTS)) if OF_SUPERVISOR in page else None
            if count == 0:
                print(f"{url}: no request is open")
                return 0
            answered_at, open_requests = clock(), UNKNOWN if count is None else str(count)
        if clock() >= deadline:
            print(f"{url}: {open_requests} requests are open after {timeout_s:g} s")
            return 1
        sleep(IDLE_POLL_S)


# ---- the commands' options


def add_url(parser: argparse.ArgumentParser, default: str = "only") -> None:
    """Options that tell which cluster is asked, and with which key."""
    url = f"URL of a gateway, e.g. http://127.0.0.1:8000 (default: this user's {default} cluster)"
    parser.add_argument("--url", help=url)
    key = "file with the API key to send (default: ALIGNEDSERVE_API_KEY, or the file that the cluster reads)"
    parser.add_argument("--api-key-file", metavar="FILE", help=key)


def _add_order(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument("--timeout", type=float, metavar="S", help="maximum wait in seconds")


def _add_scale(parser: argparse.ArgumentParser) -> None:
    for role in SCALED_ROLES:
        parser.add_argument(f"--{role}", type=int, metavar="N", help=f"{role} instances (default: unchanged)")
    _add_order(parser)


def _add_restart(parser: argparse.ArgumentParser) -> None:
    roles = ("decode", "prefill", "kv_pool", "scheduler", "node_agent", "gateway", "supervisor")
    meaning = "replace only this role; may be given several times"
    parser.add_argument("--role", action="append", default=[], choices=roles, help=meaning)
    _add_order(parser)


def _add_wait_idle(parser: argparse.ArgumentParser) -> None:
    url = "http://127.0.0.1:8000"
    parser.add_argument("--url", default=url, help=f"URL of a gateway (default {url})")
    parser.add_argument("--timeout", type=float, default=25.0, metavar="S", help="maximum wait in seconds (default 25)")


@dataclass(frozen=True, slots=True)
class Command:
    """A command of `alignedserve`: its line in `--help`, its options, and the function that runs it."""

    summary: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


COMMANDS: Mapping[str, Command] = {
    "stop": Command(
        "End a running cluster: new requests are refused, open requests get gateway.drain_s to finish.",
        _add_order,
        lambda given: stop(given.url, given.timeout, given.api_key_file),
    ),
    "scale": Command(
        "Change the number of instances of a running cluster.",
        _add_scale,
        lambda given: scale(given.prefill, given.decode, given.url, given.timeout, given.api_key_file),
    ),
    "restart": Command(
        "Replace every process of a running cluster, one after the other, without failing a request.",
        _add_restart,
        lambda given: restart(given.role, given.url, given.timeout, given.api_key_file),
    ),
    "wait-idle": Command(
        "Return when no request is open. Used as a container's preStop hook.",
        _add_wait_idle,
        lambda given: wait_idle(given.url, given.timeout),
    ),
}
