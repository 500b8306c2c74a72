"""The times of a small cell. Copies and messages take half to `SLOWEST` times these averages."""

from __future__ import annotations

SLOWEST = 2.0
MESSAGE_S = 0.0005
PREFETCH_S = 0.005
COPY_OUT_S = 0.004


def copy_in_s(blocks: int) -> float:
    return 0.001 * (1 + blocks)


def iteration_s(longest: int) -> float:
    """The exact time of an iteration. `longest`: KV tokens of its longest request."""
    return 0.002 + 1e-5 * longest
