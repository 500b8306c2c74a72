"""Identifies processes by pid and start time (of 32,768 pids one is reused within minutes), and ranks by parent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path

from alignedserve.proc_stat import is_alive, started_ticks
from alignedserve.ranks.forks import NAME


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


def ranks_of(pid: int) -> list[int]:
    """Pids of the other ranks of the instance whose process this is."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            name = (entry / "comm").read_bytes().strip()
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if parent == pid and name == NAME:
            found.append(int(entry.name))
    return found


async def wait_ended(pids: Iterable[int]) -> None:
    """Raises TimeoutError if one is still alive after 20 s."""
    async with asyncio.timeout(20.0):
        while any(map(is_alive, pids)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
