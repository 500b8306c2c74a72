"""Tracks all descendants of this process, so that none of them outlives it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path

from alignedserve.cluster.launch.processes import is_stopped, name_of


class Descendants:
    """Holds the descendants by pidfd, so that they are known even after their parents have ended."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}  # pidfds by pid; updated by `note`

    def note(self) -> None:
        """Add the current descendants, and drop those that have ended, because their pids may be reused."""
        self._forget_ended()
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                    children.setdefault(parent, []).append(int(entry.name))
        pending = [os.getpid(), *self._held]
        while pending:
            for pid in children.get(pending.pop(), ()):
                if pid not in self._held:
                    with contextlib.suppress(OSError):
                        self._held[pid] = os.pidfd_open(pid)
                        pending.append(pid)

    def end(self, grace_s: float) -> int:
        """Wait `grace_s` seconds for all to end, then kill the rest. Returns how many were killed."""
        left = self._wait(grace_s)
        for descriptor in left:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        self._wait(5.0)
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()
        return len(left)

    def stopped(self) -> set[int]:
        """Pids of the stopped descendants (SIGSTOP)."""
        return {pid for pid in self._held if is_stopped(pid)}

    def named(self, beginning: str) -> list[int]:
        """Pids of the descendants whose name begins so."""
        return [pid for pid in self._held if name_of(pid).startswith(beginning)]

    def kill(self, pid: int) -> None:
        """Kill a descendant. Has no effect if it has ended."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._held[pid], signal.SIGKILL)

    def _forget_ended(self) -> None:
        poller = select.poll()
        for descriptor in self._held.values():
            poller.register(descriptor, select.POLLIN)
        ended = {descriptor for descriptor, _ in poller.poll(0)}
        for pid, descriptor in list(self._held.items()):
            if descriptor in ended:
                os.close(self._held.pop(pid))

    def _wait(self, timeout_s: float) -> list[int]:
        """Descriptors of the descendants that have not ended within the time."""
        poller = select.poll()
        left = set(self._held.values())
        for descriptor in left:
            poller.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + timeout_s
        while left and (remaining := deadline - time.monotonic()) > 0:
            for descriptor, _ in poller.poll(remaining * 1000):
                poller.unregister(descriptor)
                left.discard(descriptor)
        return list(left)
