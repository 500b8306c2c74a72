"""Prefix lengths in cells, their division into contiguous ranges of equal cost, and those that match a batch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

FINE_BITS = 5  # a cell is at most 1/32 as wide as its lengths; below 64 tokens each length has a cell


def cell_of(tokens: int) -> int:
    """The index of the cell of a prefix length; never less for more tokens."""
    shift = max(0, tokens.bit_length() - FINE_BITS - 1)
    return (shift << FINE_BITS) + (tokens >> shift)


def first_tokens(cell: int) -> int:
    """The shortest length in the cell."""
    shift = max(0, (cell >> FINE_BITS) - 1)
    return (cell - (shift << FINE_BITS)) << shift


def divide(costs: Sequence[float], parts: int) -> list[int]:
    """The first cells of the ranges 1 to `parts` - 1; range 0 begins at cell 0, and the last never ends.

    `costs`: of each cell. Each boundary is the cell edge nearest to its share of the cost, so that the cost of each
    range differs from an equal share by at most that of the most expensive cell.
    """
    sums = list(accumulate(costs, initial=0.0))
    found = []
    for part in range(1, parts):
        wanted = sums[-1] * part / parts
        edge = bisect_left(sums, wanted)
        if edge and wanted - sums[edge - 1] < sums[edge] - wanted:
            edge -= 1
        found.append(edge)
    return found


def join_range(shortest_tokens: int, longest_tokens: int, window: float) -> tuple[int, int]:
    """Prefix lengths that match a running batch: within `window` (a share) of its own."""
    return int(shortest_tokens * (1.0 - window)), int(longest_tokens * (1.0 + window)) + 1
