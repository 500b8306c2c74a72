"""The end of a copy, as seen by the caller."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Generator

from alignedserve.errors import TransferError

logger = logging.getLogger(__name__)


class Completion:
    """The end of one copy: polled (`done`), waited for (`wait`), awaited, or reported by a callback. Thread-safe.

    A destination must not be read before `succeeded()`, and neither side's blocks may be reused before `done()`: a
    cancelled copy may still be writing until then.
    """

    def __init__(self, label: str = "") -> None:
        self.label = label
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._error: TransferError | None = None
        self._cancelled = False
        self._callbacks: list[Callable[[Completion], None]] = []

    def done(self) -> bool:
        """Whether it has ended, successfully or not."""
        return self._ended.is_set()

    def succeeded(self) -> bool:
        return self._ended.is_set() and self._error is None

    @property
    def error(self) -> TransferError | None:
        """Why it failed; None while it runs and after success."""
        return self._error

    @property
    def cancelled(self) -> bool:
        """Whether its cancellation was requested; it may have succeeded all the same."""
        return self._cancelled

    def cancel(self) -> None:
        """Request an early end. It is `done` once nothing is copied, with a TransferError unless it was complete."""
        self._cancelled = True

    def wait(self, timeout_s: float | None = None) -> bool:
        """True once it succeeded, False if `timeout_s` passed first. Raises its TransferError if it failed."""
        if not self._ended.wait(timeout_s):
            return False
        if self._error is not None:
            raise self._error
        return True

    def add_callback(self, callback: Callable[[Completion], None]) -> None:
        """Call `callback(self)` once it is done: in the thread that copies, or immediately if it is already done.

        It must be quick and must not raise (errors are logged).
        """
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        self._call(callback)

    def __await__(self) -> Generator[None, None, None]:
        """`await completion`, in any event loop; raises its TransferError.

        Cancelling the task does not stop the copy.
        """
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()

        def arrive() -> None:
            if not arrived.done():
                arrived.set_result(None)

        def ended(_: Completion) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no task is waiting
                loop.call_soon_threadsafe(arrive)

        if not self.done():
            self.add_callback(ended)
            yield from arrived
        if self._error is not None:
            raise self._error

    def finish(self, error: TransferError | None = None) -> None:
        """Called by the channel at the end. Only the first call counts."""
        with self._lock:
            if self._ended.is_set():
                return
            self._error = error
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._call(callback)

    def _call(self, callback: Callable[[Completion], None]) -> None:
        try:
            callback(self)
        except Exception:
            logger.exception("a callback of copy %s failed", self.label)
