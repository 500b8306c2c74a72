"""`alignedserve wait-idle`: returns when no request is open, as a container asks before it is ended."""

from __future__ import annotations

import time
from collections.abc import Callable

from alignedserve.cluster.records import fetch_metrics
from alignedserve.control.samples import value
from alignedserve.errors import UnavailableError

OPEN_REQUESTS = "alignedserve_gateway_open_requests"
OF_SUPERVISOR = "alignedserve_role_starts_total"  # on every page that has the whole cluster
UNKNOWN = "an unknown number of"
POLL_S = 0.5
ASK_TIMEOUT_S = 5.0
GONE_AFTER_S = 5.0  # a proxy that is replaced answers again by then


def wait_idle(
    url: str,
    timeout_s: float,
    fetch: Callable[[str, float], str] = fetch_metrics,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """The exit status: 0 once no gateway of the cluster at `url` holds a request, 1 if some are open after `timeout_s`.

    Any gateway tells of all of them while there is a supervisor, and asks for no key; without one it tells of itself,
    and is asked again. Where none answers for five seconds, nothing is waited for.
    """
    answered_at = clock()
    deadline = answered_at + timeout_s
    open_requests = UNKNOWN
    while True:
        try:
            page = fetch(url, ASK_TIMEOUT_S)
        except UnavailableError as error:
            if clock() >= answered_at + GONE_AFTER_S:
                print(f"nobody to wait for: {error.message}")
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
        sleep(POLL_S)
