"""How long the steps of a small cell take. Copies and messages: on average; each takes half to `SLOWEST` times that."""

from __future__ import annotations

SLOWEST = 2.0
MESSAGE_S = 0.0005
PREFETCH_S = 0.005
COPY_OUT_S = 0.004


def copy_in_s(blocks: int) -> float:
    return 0.001 * (1 + blocks)


def iteration_s(longest: int) -> float:
    """Exactly. `longest`: KV tokens of the longest request in it."""
    return 0.002 + 1e-5 * longest
