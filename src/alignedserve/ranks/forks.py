"""Ranks that are forked before their instance's process has threads, so that they start without imports.

A fork server calls `prepare` in a process that is to become an instance of several ranks. The forks wait for their
orders; `RankProcesses` takes them. Other processes start their ranks by themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import select
import signal
import socket
import threading
import time
import traceback
from subprocess import TimeoutExpired

RANKS_VARIABLE = "ALIGNEDSERVE_RANKS"
"""How many ranks beside the first an instance has; set for the processes of model roles."""
NAME = b"rank"
MAIN = "alignedserve.engine.parallel.rank_main"  # the fork server has imported it
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_LOOK_S = 0.02
_END_WAIT_S = 5.0

_prepared: list[tuple[int, socket.socket]] = []


class ForkedRank:
    """The part of `subprocess.Popen` that `RankProcesses` needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # its status was collected elsewhere in this process
                self._status = -1
            else:
                self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Raises TimeoutExpired."""
        until_s = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if until_s is not None and time.monotonic() > until_s:
                raise TimeoutExpired("rank", timeout or 0.0)
            time.sleep(_LOOK_S)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def bind_to_parent(parent: int) -> None:
    """This process ends when the thread of the process `parent` that started it does, and is named as a rank."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(_PR_SET_NAME, NAME)
    if os.getppid() != parent:  # it has ended before
        os._exit(1)


def end_with(channel: socket.socket) -> None:
    """From now on this process ends when rank 0 closes the channel, wherever this process waits then."""
    closed = select.poll()
    closed.register(channel, select.POLLRDHUP)

    def wait() -> None:
        closed.poll()
        os._exit(0)

    threading.Thread(target=wait, name="end", daemon=True).start()


def prepare(count: int) -> None:
    """Fork so many ranks. To be called on the main thread, while there is no other."""
    parent = os.getpid()
    for _ in range(count):
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            _become(theirs, [mine, *(channel for _, channel in _prepared)], parent)
        theirs.close()
        _prepared.append((pid, mine))


def take() -> tuple[ForkedRank, socket.socket] | None:
    """A rank that waits for its order, and the channel to it; None if there is none (any more)."""
    if not _prepared:
        return None
    pid, channel = _prepared.pop(0)
    return ForkedRank(pid), channel


def release() -> None:
    """End the ranks that still wait: the instance has as many as it needs. A spare prepares those of any role."""
    while (prepared := take()) is not None:
        rank, channel = prepared
        channel.close()
        with contextlib.suppress(TimeoutExpired):
            rank.wait(_END_WAIT_S)
        rank.kill()


def _become(channel: socket.socket, others: list[socket.socket], parent: int) -> None:
    """Never returns."""
    status = 1
    try:
        for other in others:  # a rank must see that rank 0 has closed its channel
            other.close()
        bind_to_parent(parent)
        end_with(channel)
        importlib.import_module(MAIN).compute(channel)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
