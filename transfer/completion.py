"""The end of a copy, seen from whoever asked for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Generator

from alignedserve.errors import TransferError

logger = logging.getLogger(__name__)


class Completion:
    """Of one copy: polled (`done`), waited for (`wait`), awaited, or told by a callback. Any thread may use it.

    A destination must not be read before `succeeded()`, and neither side's blocks may be put to another use before
    `done()`: a copy that was cancelled may still be writing until then.
    """

    def __init__(self, label: str = "") -> None:
        self.label = label
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._error: TransferError | None = None
        self._cancelled = False
        self._callbacks: list[Callable[[Completion], None]] = []

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def succeeded(self) -> bool:
        return self._ended.is_set() and self._error is None

    @property
    def error(self) -> TransferError | None:
        """Why it failed; None while it runs and when it went well."""
        return self._error

    @property
    def cancelled(self) -> bool:
        """Whether somebody asked for it to be cancelled; it may have succeeded all the same."""
        return self._cancelled

    def cancel(self) -> None:
        """Ask for an early end: it is `done`, with a TransferError unless it was through, as soon as nothing moves."""
        self._cancelled = True

    def wait(self, timeout_s: float | None = None) -> bool:
        """True once it succeeded, False when `timeout_s` passed first. Raises its TransferError where it failed."""
        if not self._ended.wait(timeout_s):
            return False
        if self._error is not None:
            raise self._error
        return True

    def add_callback(self, callback: Callable[[Completion], None]) -> None:
        """Call `callback(self)` once it is done: in the thread that copies, or here and now if it is done already.

        It must be quick and must not raise (what it raises is logged).
        """
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        self._call(callback)

    def __await__(self) -> Generator[None, None, None]:
        """`await completion`, in any event loop; raises its TransferError. Cancelling the task lets the copy go on."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()

        def arrive() -> None:
            if not arrived.done():
                arrived.set_result(None)

        def ended(_: Completion) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
                loop.call_soon_threadsafe(arrive)

        if not self.done():
            self.add_callback(ended)
            yield from arrived
        if self._error is not None:
            raise self._error

    def finish(self, error: TransferError | None = None) -> None:
        """For the channel: it has ended. Only the first call counts."""
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
