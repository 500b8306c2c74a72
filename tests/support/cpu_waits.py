"""How long processes waited for a CPU, as the kernel counts it (proc(5), schedstat)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path


class CpuWaits:
    """The time since its construction that processes were ready to run and did not run.

    A promise of "within a second" is one of processes that run when they can. On a machine with other work, a test
    takes off what these processes waited for a CPU.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._before = {pid: thread_waits_s(pid) for pid in pids}

    def total_s(self, started: Iterable[int] = ()) -> float:
        """The longest wait of a thread of each process, summed: one process waits for the other.

        `started`: processes that have started since, whose waits count from their start.
        """
        before = {pid: dict[str, float]() for pid in started} | self._before
        return sum(
            max((waited_s - threads.get(name, 0.0) for name, waited_s in thread_waits_s(pid).items()), default=0.0)
            for pid, threads in before.items()
        )


def thread_waits_s(pid: int) -> dict[str, float]:
    """Seconds that each thread has waited for a CPU since it began; none of a process that has ended."""
    found = {}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return found
