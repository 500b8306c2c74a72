"""Placements by name: the choices of `--placement`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from alignedserve.errors import ConfigError
from alignedserve.scheduler.ranks.balance_route import BalanceRoute
from alignedserve.scheduler.ranks.base import Placement
from alignedserve.scheduler.ranks.shared_pool import SharedPool
from alignedserve.scheduler.ranks.sticky import LeastRequests, LeastTokens, RoundRobin

PLACEMENTS: Mapping[str, type[Placement]] = {
    "round-robin": RoundRobin,
    "least-requests": LeastRequests,
    "least-tokens": LeastTokens,
    "balance-route": BalanceRoute,
    "shared-pool": SharedPool,
}
DEFAULT = "shared-pool"
ALIASES = {"balanced": "balance-route"}


def placement_class(name: str) -> type[Placement]:
    """Raises ConfigError for an unknown name, with the nearest one."""
    found = PLACEMENTS.get(ALIASES.get(name, name))
    if found is None:
        near = difflib.get_close_matches(name, PLACEMENTS, n=1)
        meant = f"; did you mean {near[0]}? Choose" if near else "; choose"
        raise ConfigError(f"unknown placement {name!r}{meant} one of: {', '.join(PLACEMENTS)}")
    return found
