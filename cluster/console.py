"""What people see of `serve`: our lines only. Everything else that a library prints goes to a file."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import IO


class Console:
    """Takes over this process's stdout and stderr, of native code too, and writes the command's own lines to them."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._out: IO[str] = sys.stdout
        self._err: IO[str] = sys.stderr

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def divert(self, file: Path) -> None:
        """From now on, what others print lands in `file`."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8", errors="replace")
        self._err = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="replace")
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)

    def line(self, text: str) -> None:
        self._write(self._out, text)

    def step(self, text: str) -> None:
        """A line of the progress display, with the seconds since the start."""
        self._write(self._out, f"[{self.elapsed_s:5.1f} s] {text}")

    def error(self, text: str) -> None:
        self._write(self._err, f"alignedserve: error: {' '.join(text.split())}")

    def _write(self, stream: IO[str], text: str) -> None:
        with self._lock:
            try:
                stream.write(text + "\n")
                stream.flush()
            except OSError:  # whoever read it is gone; that ends nothing
                return
