"""Identifies processes by pid and start time: where there are only 32,768 pids, one is reused within minutes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from alignedserve.proc_stat import is_alive, started_ticks


def noted(pids: Iterable[int]) -> dict[int, int]:
    """Of each running process, when it has started."""
    return {pid: started_ticks(pid) for pid in pids}


def still_alive(processes: Mapping[int, int]) -> list[int]:
    """Pids of those that have not ended."""
    return [pid for pid, started in processes.items() if is_alive(pid) and _started(pid) == started]


def _started(pid: int) -> int:
    try:
        return started_ticks(pid)
    except OSError:  # it has ended meanwhile
        return -1
