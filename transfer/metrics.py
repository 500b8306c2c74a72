"""Metrics of an instance's channels."""

from __future__ import annotations

from collections.abc import Collection

from alignedserve.memory import describe_bytes
from alignedserve.metrics import Page
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


def show_channels(page: Page, channels: Collection[Channel]) -> None:
    """What each channel has moved, and of each store that is to be page-locked how far that has come."""
    for channel in channels:
        counters = channel.counters()
        ends = {
            "source": channel.source.store_id,
            "destination": channel.destination.store_id,
            "channel": channel.name,
        }
        page.counter("transfer_copies_total", "copies over a channel", counters.copies, **ends)
        page.counter("transfer_failed_total", "copies that failed", counters.failed, **ends)
        page.counter("transfer_bytes_total", "bytes copied", counters.bytes, **ends)
        meaning = "seconds in which the channel copied"
        page.counter("transfer_busy_seconds_total", meaning, counters.busy_s, **ends)
    for progress in _page_locked(channels):
        meaning = "on a GPU: bytes of the store that are page-locked so far"
        page.gauge("page_locked_bytes", meaning, progress.locked_bytes, store=progress.store_id)
        meaning = "on a GPU: bytes that will be page-locked"
        page.gauge("page_lockable_bytes", meaning, progress.total_bytes, store=progress.store_id)
