"""`alignedserve wait-idle`: returns when no request is open, as a container asks before it is ended."""

from __future__ import annotations

import time
from collections.abc import Callable

from alignedserve.cluster.records import fetch_metrics
from alignedserve.control.samples import value
from alignedserve.errors import UnavailableError

OPEN_REQUESTS = "alignedserve_gateway_open_requests"
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

    Any gateway tells of all of them, and asks for no key. Where none answers for five seconds, nothing is waited for.
    """
    answered_at = clock()
    deadline = answered_at + timeout_s
    open_requests = "an unknown number of"
    while True:
        try:
            count = int(value(fetch(url, ASK_TIMEOUT_S), OPEN_REQUESTS))
        except UnavailableError as error:
            if clock() >= answered_at + GONE_AFTER_S:
                print(f"nobody to wait for: {error.message}")
                return 0
        else:
            if not count:
                print(f"{url}: no request is open")
                return 0
            answered_at, open_requests = clock(), str(count)
        if clock() >= deadline:
            print(f"{url}: {open_requests} requests are open after {timeout_s:g} s")
            return 1
        sleep(POLL_S)
