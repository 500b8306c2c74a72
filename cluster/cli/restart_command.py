"""`alignedserve restart`: a rolling restart of a running cluster, and the wait until it is done."""

from __future__ import annotations

import time
from collections.abc import Sequence

from alignedserve.cluster.cli.orders import find_cluster
from alignedserve.errors import AlignedServeError, UnavailableError

POLL_S = 0.2
TIMEOUT_S = 1800.0


def restart(roles: Sequence[str], url: str | None, timeout_s: float | None, api_key_file: str | None) -> int:
    """The exit status; prints each step.

    Raises AlignedServeError with the cluster's reason where it refuses or has stopped, UnavailableError where it takes
    longer than `timeout_s`.
    """
    cluster = find_cluster(url, api_key_file)
    order = cluster.order("restart", {"roles": list(roles)})
    print(f"{cluster.url}: restarting {', '.join(order['roles'])}", flush=True)
    limit_s = TIMEOUT_S if timeout_s is None else timeout_s
    deadline = time.monotonic() + limit_s
    shown = ""
    while True:
        now = (cluster.status() or {}).get("restart")  # nobody answers while its only gateway changes
        if now is not None and now["since_unix_s"] >= order["since_unix_s"]:
            if now["failure"]:
                raise AlignedServeError(f"the rolling restart has stopped: {now['failure']}")
            if now["done"]:
                break
            if now["doing"] not in ("", shown):
                shown = now["doing"]
                print(f"{cluster.url}: {shown}", flush=True)
        if time.monotonic() > deadline:
            raise UnavailableError(f"{cluster.url} is not done after {limit_s:g} s: {shown or 'it has not begun'}")
        time.sleep(POLL_S)
    print(f"{cluster.url}: every process of them is new")
    return 0
