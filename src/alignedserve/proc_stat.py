"""What the kernel tells of a process (`/proc/PID/stat`). Light: every command imports it."""

from __future__ import annotations

from pathlib import Path


def _fields(pid: int) -> list[str]:
    """The fields after the name, which may contain spaces and brackets: state, parent, …"""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def is_alive(pid: int) -> bool:
    """Whether a process with this pid runs. A zombie has ended."""
    try:
        return _fields(pid)[0] not in ("Z", "X")
    except OSError:
        return False


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process with this pid. One that a debugger has stopped is none."""
    try:
        return _fields(pid)[0] == "T"
    except OSError:
        return False


def started_ticks(pid: int) -> int:
    """The start time of the process, in the kernel's clock ticks since boot. Raises OSError if it does not exist."""
    return int(_fields(pid)[19])


def parent_of(pid: int) -> int:
    """The pid of its parent. Raises OSError if it does not exist."""
    return int(_fields(pid)[1])
