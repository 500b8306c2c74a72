"""Processes of this machine, by pidfd: to end one for certain, and never another that got its number."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

# /proc counts start times in ticks of 10 ms, and clocks may be adjusted between the two readings.
CLOCK_SLACK_S = 0.05


@dataclass(slots=True)
class ProcessHandle:
    """A process that cannot be mistaken: the kernel's descriptor stays with it when its pid is used again."""

    pid: int
    descriptor: int

    def signal(self, number: int) -> None:
        """Send a signal; nothing happens where the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, number)

    async def wait_ended(self, timeout_s: float) -> bool:
        """Whether it ended within the time (its memory is unmapped then, even if nobody has collected its status)."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[bool] = loop.create_future()
        loop.add_reader(self.descriptor, lambda: _resolve(ended))
        try:
            return await asyncio.wait_for(ended, timeout_s)
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(self.descriptor)

    def close(self) -> None:
        os.close(self.descriptor)


def open_process(pid: int, started_before_unix_s: float) -> ProcessHandle | None:
    """A handle to the process of this user that has had this pid since before the given time.

    None where there is none any more: ended, or its number belongs to another process now.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        # Read after opening: whoever has the number now is whom the descriptor refers to.
        own = os.stat(f"/proc/{pid}").st_uid == os.geteuid()
        if own and start_unix_s(pid) <= started_before_unix_s + CLOCK_SLACK_S:
            return ProcessHandle(pid, descriptor)
    except (OSError, ValueError, IndexError):
        pass
    os.close(descriptor)
    return None


def start_unix_s(pid: int) -> float:
    """When the process was started. Raises OSError where there is none."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s)


def is_alive(pid: int) -> bool:
    """Whether a process has this pid and has not ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _resolve(ended: asyncio.Future[bool]) -> None:
    if not ended.done():
        ended.set_result(True)
