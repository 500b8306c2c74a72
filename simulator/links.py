"""Links for KV: one direction of one instance's link to the pool, or to its peers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Link:
    """Copies run one after the other, at `bandwidth` bytes a second, each with `latency_s` in addition."""

    bandwidth: float
    latency_s: float
    free_s: float = 0.0
    moved_bytes: int = 0


def transfer(now_s: float, size: int, *links: Link) -> float:
    """Queue a copy of `size` bytes over all these links at once (a sender's and a receiver's).

    Returns when it is done.
    """
    begin_s = max(now_s, *(link.free_s for link in links))
    end_s = begin_s + size / min(link.bandwidth for link in links)
    for link in links:
        link.free_s = end_s
        link.moved_bytes += size
    return end_s + max(link.latency_s for link in links)
