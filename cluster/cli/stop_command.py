"""`alignedserve stop`: has a running cluster end, and waits until it has."""

from __future__ import annotations

import socket
import time

from alignedserve.cluster.cli.orders import RunningCluster, find_cluster
from alignedserve.cluster.launch.processes import is_alive
from alignedserve.errors import UnavailableError

POLL_S = 0.2
ENDS_S = 60.0  # beyond what open requests have


def stop(url: str | None, timeout_s: float | None, api_key_file: str | None) -> int:
    """The exit status. Raises AlignedServeError where the cluster refuses, UnavailableError where it does not end."""
    cluster = find_cluster(url, api_key_file)
    answer = cluster.order("stop", {})
    grace_s, command = float(answer["grace_s"]), answer["command"]
    pids = set(cluster.pids)
    if command["pid"] and command["host"] == socket.gethostname():
        pids.add(command["pid"])
    limit_s = grace_s + ENDS_S if timeout_s is None else timeout_s
    print(f"{cluster.url}: ending; open requests have {grace_s:g} s", flush=True)
    deadline = time.monotonic() + limit_s
    while not _has_ended(cluster, pids):
        if time.monotonic() > deadline:
            raise UnavailableError(f"{cluster.url} has not ended within {limit_s:g} s")
        time.sleep(POLL_S)
    print(f"{cluster.url}: has ended")
    return 0


def _has_ended(cluster: RunningCluster, pids: set[int]) -> bool:
    """None of its processes that are known here live, and nothing answers."""
    if any(map(is_alive, pids)):
        return False
    status = cluster.status()
    return status is None or "roles" not in status
