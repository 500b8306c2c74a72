"""Batch sizes that decode iterations are captured at."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from alignedserve.errors import ConfigError

_LARGEST = 512  # more rows compute for so long that launching their kernels one by one costs little


def graph_sizes(configured: str, max_running: int) -> tuple[int, ...]:
    """Ascending. `configured`: numbers with commas between them, or empty: a rule.

    By the rule a batch is padded by a seventh at most beyond 8 rows, and every size up to `max_running` is covered, or
    up to 512. Raises ConfigError for what are no sizes.
    """
    if not configured.strip():
        return _rule(min(max_running, _LARGEST))
    try:
        sizes = sorted({int(part) for part in configured.split(",")})
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 1 or sizes[-1] > 65536:
        raise ConfigError(f"decode.graph_sizes must be numbers such as 1,8,64, from 1 to 65536; got {configured!r}")
    return tuple(sizes)


def _rule(largest: int) -> tuple[int, ...]:
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, _LARGEST + 1, 32)]
    return (*(size for size in sizes if size < largest), largest)


def size_for(sizes: Sequence[int], rows: int) -> int | None:
    """The smallest of the ascending `sizes` that holds `rows`; None where none does."""
    index = bisect_left(sizes, rows)
    return sizes[index] if index < len(sizes) else None
