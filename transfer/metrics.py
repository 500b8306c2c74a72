"""Prometheus text of an instance's channels."""

from __future__ import annotations

from collections.abc import Collection

from alignedserve.memory import describe_bytes
from alignedserve.transfer.channel import Channel, PageLocked


def locking(channels: Collection[Channel]) -> str:
    """Progress of page-locking, for status texts; empty once all is locked."""
    words = ""
    for progress in _page_locked(channels):
        done, total = progress.locked_bytes, progress.total_bytes
        if done < total:
            words += f"; {progress.store_id}: {describe_bytes(done)} of {describe_bytes(total)} locked"
    return words


def _page_locked(channels: Collection[Channel]) -> Collection[PageLocked]:
    """One entry for each store, whichever channels use it."""
    found = [progress for channel in channels if (progress := channel.page_locked()) is not None]
    return {progress.store_id: progress for progress in found}.values()


def channel_lines(instance: str, channels: Collection[Channel]) -> list[str]:
    """Totals of each channel of the instance: copies, failed ones, bytes, and seconds it was copying.

    Also, for each store that is to be page-locked, its locked bytes and its lockable bytes.
    """
    lines = []
    for channel in channels:
        labels = (
            f'source="{channel.source.store_id}",destination="{channel.destination.store_id}",'
            f'channel="{channel.name}",instance="{instance}"'
        )
        counters = channel.counters()
        for name in ("copies", "failed", "bytes", "busy_s"):
            metric = "busy_seconds" if name == "busy_s" else name
            lines.append(f"alignedserve_transfer_{metric}_total{{{labels}}} {getattr(counters, name)!r}")
    for progress in _page_locked(channels):
        labels = f'store="{progress.store_id}",instance="{instance}"'
        lines.append(f"alignedserve_page_locked_bytes{{{labels}}} {progress.locked_bytes}")
        lines.append(f"alignedserve_page_lockable_bytes{{{labels}}} {progress.total_bytes}")
    return lines
