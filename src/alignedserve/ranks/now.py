"""What an instance of several ranks tells of each: in its status, and as metrics."""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from alignedserve.memory import describe_bytes
from alignedserve.metrics import Page

BARRIERS = ("attention", "experts")
"""Of whose last one in each layer ranks that share experts wait."""
WINDOW_S = 2.0  # over which the share of waiting is told, at least
_SECONDS = struct.Struct("d")
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


@dataclass(frozen=True, slots=True)
class RankNow:
    """One rank. `node`: "" for the first one's. `layers`: of its stage; None if there is one, or it has not loaded.

    `resident_bytes`: of its process, with memory that it shares. `waited_s`: for others within passes, since its start;
    NaN: unknown, as over NCCL.
    """

    rank: int
    pid: int
    node: str = ""
    layers: range | None = None
    weight_bytes: int = 0
    resident_bytes: int = 0
    waited_s: float = 0.0

    def describe(self, waiting: float | None) -> str:
        """`waiting`: the share of the last seconds that it waited."""
        where = f"pid {self.pid}" + (f" on {self.node}" if self.node else "")
        said = []
        if self.layers is not None:
            last = self.layers.stop - 1
            said.append(f"layer {last}" if len(self.layers) == 1 else f"layers {self.layers.start}-{last}")
        if self.resident_bytes:
            said.append(describe_bytes(self.resident_bytes))
        if waiting is not None and not math.isnan(waiting):
            said.append(f"waits {waiting:.0%}")
        return ": ".join(filter(None, (where, ", ".join(said))))


class RankWatch:
    """Tells the share of time that each rank waits, from one call to another that is at least WINDOW_S later."""

    def __init__(self) -> None:
        self._at: tuple[float, list[float]] | None = None  # when the window began, and what each had waited
        self._shares: list[float] | None = None  # of the last window

    def describe(self, degrees: object, ranks: Sequence[RankNow], now_s: float) -> str:
        """For example "2 ranks (pid 12: 512.0 MiB, waits 20%; pid 13: 498.0 MiB, waits 35%)"."""
        waited = [rank.waited_s for rank in ranks]
        if self._at is None or len(self._at[1]) != len(waited):
            self._at, self._shares = (now_s, waited), None
        elif (passed_s := now_s - self._at[0]) >= WINDOW_S:
            self._shares = [
                min((after - before) / passed_s, 1.0) for before, after in zip(self._at[1], waited, strict=True)
            ]
            self._at = (now_s, waited)
        shares: Sequence[float | None] = self._shares or [None] * len(ranks)
        said = "; ".join(rank.describe(share) for rank, share in zip(ranks, shares, strict=True))
        return f"{degrees} ({said})" if said else str(degrees)


class WaitedFile:
    """Anonymous memory in which the ranks of a node write for how long they have waited, without a message."""

    def __init__(self, ranks: int, descriptor: int | None = None) -> None:
        """`descriptor`: of one that another process has made for so many ranks."""
        size = ranks * _SECONDS.size
        self.descriptor = os.memfd_create("alignedserve-waited") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, size)
        self._memory = mmap.mmap(self.descriptor, size)

    def note(self, index: int, seconds: float) -> None:
        _SECONDS.pack_into(self._memory, index * _SECONDS.size, seconds)

    def of(self, index: int) -> float:
        seconds: float = _SECONDS.unpack_from(self._memory, index * _SECONDS.size)[0]
        return seconds


def resident_bytes(pid: int) -> int:
    """Of a process, with memory that it shares; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


def show_ranks(page: Page, ranks: Sequence[RankNow]) -> None:
    for each in ranks:
        rank = str(each.rank)
        meaning = "of an instance of several ranks: seconds in which a rank waited for others within passes, over Gloo"
        if not math.isnan(each.waited_s):
            page.counter("rank_waited_seconds_total", meaning, each.waited_s, rank=rank)
        meaning = "of an instance of several ranks: bytes of a rank's part of the weights"
        page.gauge("rank_weight_bytes", meaning, each.weight_bytes, rank=rank)
        meaning = "of an instance of several ranks: resident memory of a rank's process, with what it shares"
        page.gauge("rank_resident_bytes", meaning, each.resident_bytes, rank=rank)
