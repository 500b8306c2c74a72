"""Batch sizes for which CUDA graphs of decode iterations are captured."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from alignedserve.errors import ConfigError

_LARGEST = 1024  # with more rows, launching kernels one by one costs little of the pass


def graph_sizes(configured: str, max_running: int) -> tuple[int, ...]:
    """Batch sizes in ascending order: those in `configured`, comma-separated, or those of a rule if it is empty.

    The rule covers every batch up to `max_running` rows, at most 1,024. Beyond 8 rows it pads a batch by at most a
    seventh. Raises ConfigError for invalid sizes.
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
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, _LARGEST + 1, 64)]
    return (*(size for size in sizes if size < largest), largest)


def size_for(sizes: Sequence[int], rows: int) -> int | None:
    """The smallest of the ascending `sizes` that holds `rows`; None if all are smaller."""
    index = bisect_left(sizes, rows)
    return sizes[index] if index < len(sizes) else None
