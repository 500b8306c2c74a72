"""How many requests a decode instance runs at most if `decode.max_running` is 0: from its cache (ADR 54)."""

from __future__ import annotations

LEAST, MOST = 256, 1024
STEP = 64  # of the graph sizes beyond 512
REQUEST_TOKENS = 768  # of cache for each request


def automatic_max_running(cache_tokens: int) -> int:
    """The maximum for a cache of this many tokens: a multiple of 64 between 256 and 1,024."""
    return min(MOST, max(LEAST, cache_tokens // REQUEST_TOKENS // STEP * STEP))


def choices() -> range:
    """All values that `automatic_max_running` can have, largest first."""
    return range(MOST, LEAST - 1, -STEP)
