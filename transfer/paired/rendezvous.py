"""The values that both ends of a pair exchange in order to connect, over the stream they already have."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from alignedserve.errors import TransferError


class Rendezvous:
    """Values by key, each known to both ends once one of them has called `set`. Thread-safe."""

    def __init__(self, tell: Callable[[str, bytes], None]) -> None:
        """`tell` sends a value to the other end, which calls `heard`; it must not block."""
        self._tell = tell
        self._values: dict[str, bytes] = {}
        self._ended = ""
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        self.heard(key, value)
        self._tell(key, value)

    def heard(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait for the value. Raises TransferError on timeout, or when no more values will come."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while key not in self._values:
                left = deadline - time.monotonic()
                if self._ended or left <= 0:
                    raise TransferError(
                        f"the other end did not connect: {self._ended or f'silent for {timeout_s:g} s'}"
                    )
                self._changed.wait(left)
            return self._values[key]

    def end(self, reason: str) -> None:
        """No more values will come."""
        with self._changed:
            self._ended = self._ended or reason
            self._changed.notify_all()
