"""The share of the machine that other processes use while this process measures it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

QUIET_SHARE = 0.1  # of all processors: above it a measurement counts as disturbed
STAT = Path("/proc/stat")
IDLE = (3, 4)  # columns of the first line: idle and iowait
GUESTS = 8  # from this column on, time that earlier columns already include


class OtherWork:
    """Counts from its creation on. Time stolen by a hypervisor counts as other work too."""

    def __init__(self, pids: Sequence[int] = ()) -> None:
        """`pids`: running children whose work is not other work; they run until `share`."""
        self._pids = pids
        self._begun = self._now()

    def share(self) -> float:
        """Share of all processors' time, from 0 to 1, used neither by idling nor by this process and its children, of
        which those that are not given have ended.
        """
        (busy_s, own_s, wall_s), (busy_0_s, own_0_s, wall_0_s) = self._now(), self._begun
        whole_s = (wall_s - wall_0_s) * (os.cpu_count() or 1)
        others_s = (busy_s - busy_0_s) - (own_s - own_0_s)
        return min(1.0, max(0.0, others_s / whole_s)) if whole_s > 0 else 0.0

    def _now(self) -> tuple[float, float, float]:
        """Busy seconds of all processors, CPU seconds of this process and its children, and the time."""
        second = os.sysconf("SC_CLK_TCK")
        ticks = [int(word) for word in STAT.read_text(encoding="ascii").partition("\n")[0].split()[1 : 1 + GUESTS]]
        busy = sum(count for column, count in enumerate(ticks) if column not in IDLE)
        own_s = sum(os.times()[:4]) + sum(map(_ticks_of, self._pids)) / second
        return busy / second, own_s, time.monotonic()


def _ticks_of(pid: int) -> int:
    """Of a process, user and system time; 0 if it has ended."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0
    return int(after_name[11]) + int(after_name[12])
