"""Threads that wait for the disk.

They are daemons: a process ends without waiting for a disk that hangs, unlike with a ThreadPoolExecutor.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")
CLOSED_WITHIN_S = 1.0


class DiskThreads:
    """Runs jobs in order on `count` threads, which start with the first job."""

    def __init__(self, name: str, count: int) -> None:
        self._name, self._count = name, count
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._unfinished = 0
        self._changed = threading.Condition()

    def start(self, work: Callable[[], Result]) -> Future[Result]:
        """Run `work` on one of the threads. `cancel` of the result is False once it has begun."""
        if not self._threads:
            for number in range(self._count):
                thread = threading.Thread(target=self._serve, name=f"{self._name}-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        done: Future[Result] = Future()
        with self._changed:
            self._unfinished += 1
        self._jobs.put((done, work))
        return done

    async def ended(self) -> bool:
        """Whether no job is queued or running, after waiting a little."""
        return await asyncio.to_thread(self._wait)

    def _wait(self) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._unfinished, CLOSED_WITHIN_S)

    @staticmethod
    def future(job: Future[Result]) -> asyncio.Future[Result]:
        """`job` for this event loop. Its exception need not be looked at."""
        found = asyncio.wrap_future(job)
        found.add_done_callback(lambda done: done.cancelled() or done.exception())
        return found

    def close(self) -> None:
        """End the threads after the jobs that are queued; does not wait."""
        for _ in self._threads:
            self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            done, work = job
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(work())
                except BaseException as error:  # the waiting task decides what follows
                    done.set_exception(error)
            with self._changed:
                self._unfinished -= 1
                self._changed.notify_all()
