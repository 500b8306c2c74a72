"""Processes of this machine, held by pidfd, so that a signal never reaches another process that reuses the pid."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from alignedserve.proc_stat import started_ticks
from alignedserve.proto import supervisor_pb2 as sv


@dataclass(slots=True)
class ProcessHandle:
    """A process and its pidfd, which refers to it even if its pid is reused."""

    pid: int
    descriptor: int

    def signal(self, number: int) -> None:
        """Send a signal. Has no effect if the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, number)

    async def wait_ended(self, timeout_s: float) -> bool:
        """Whether it ended within the time. Its memory is unmapped then, even if it is still a zombie."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[bool] = loop.create_future()
        loop.add_reader(self.descriptor, lambda: _resolve(ended))
        try:
            async with asyncio.timeout(timeout_s):
                return await ended
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(self.descriptor)

    def close(self) -> None:
        os.close(self.descriptor)


def open_process(who: sv.RoleHello | sv.Peer) -> ProcessHandle | None:
    """A handle to this process of this user and machine.

    None if the process has ended, or its pid belongs to another process now. Processes are distinguished by their start
    time in kernel ticks, because a comparison by the clock would fail after the clock is set forward.
    """
    pid = who.pid
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        # Read after opening: the process with this pid now is the one that the descriptor refers to.
        own = os.stat(f"/proc/{pid}").st_uid == os.geteuid()
        if own and who.started_ticks in (started_ticks(pid), 0):  # 0: unknown
            return ProcessHandle(pid, descriptor)
    except (OSError, ValueError, IndexError):
        pass
    os.close(descriptor)
    return None


async def end_process(who: sv.RoleHello | sv.Peer, timeout_s: float) -> bool:
    """Kill the process that `open_process` finds. Returns whether it has ended, within the time or before."""
    handle = open_process(who)
    if handle is None:
        return True
    try:
        handle.signal(signal.SIGKILL)
        return await handle.wait_ended(timeout_s)
    finally:
        handle.close()


@dataclass(frozen=True, slots=True)
class Sight:
    """The kernel's state of a process. `cpu_s` is the processor time in seconds since its start."""

    stopped: bool
    traced: bool
    cpu_s: float


def look_at(pid: int) -> Sight | None:
    """The state of a process; None if it does not exist or has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] in "ZX":
        return None
    ticks = int(fields[11]) + int(fields[12])
    # T: stopped by SIGSTOP. t: stopped by a debugger, which is intended.
    return Sight(fields[0] == "T", fields[0] == "t", ticks / os.sysconf("SC_CLK_TCK"))


def name_of(pid: int) -> str:
    """The file name of the process's command; "" if it has ended."""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
        return os.path.basename(command.decode(errors="replace"))
    return ""


def is_stopped(pid: int) -> bool:
    sight = look_at(pid)
    return sight is not None and sight.stopped


def _resolve(ended: asyncio.Future[bool]) -> None:
    if not ended.done():
        ended.set_result(True)
