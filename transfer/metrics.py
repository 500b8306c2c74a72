"""Prometheus text of an instance's channels."""

from __future__ import annotations

from collections.abc import Iterable

from alignedserve.transfer.channel import Channel


def channel_lines(instance: str, channels: Iterable[Channel]) -> list[str]:
    """What each channel of the instance has moved: copies, failed ones, bytes, and the seconds it was copying.

    And of each store that is to be page-locked how many bytes are, and how many will be.
    """
    lines = []
    locked = {}
    for channel in channels:
        labels = (
            f'source="{channel.source.store_id}",destination="{channel.destination.store_id}",'
            f'channel="{channel.name}",instance="{instance}"'
        )
        if (progress := channel.page_locked()) is not None:
            locked[progress.store_id] = progress
        counters = channel.counters()
        for name in ("copies", "failed", "bytes", "busy_s"):
            metric = "busy_seconds" if name == "busy_s" else name
            lines.append(f"alignedserve_transfer_{metric}_total{{{labels}}} {getattr(counters, name)!r}")
    for progress in locked.values():
        labels = f'store="{progress.store_id}",instance="{instance}"'
        lines.append(f"alignedserve_page_locked_bytes{{{labels}}} {progress.locked_bytes}")
        lines.append(f"alignedserve_page_lockable_bytes{{{labels}}} {progress.total_bytes}")
    return lines
