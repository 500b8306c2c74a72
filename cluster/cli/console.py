"""The terminal output of `serve`: only the command's own lines. Output of libraries goes to a file."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import IO

PASSING_EVERY_S = 5.0


class Console:
    """Takes over this process's stdout and stderr, of native code too, and writes the command's own lines to them."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._out: IO[str] = sys.stdout
        self._err: IO[str] = sys.stderr
        self._passing = False  # whether the next line replaces the one on the terminal
        self._passed_at_s = -PASSING_EVERY_S

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def divert(self, file: Path) -> None:
        """From now on, redirect the output of libraries and native code to `file`."""
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

    def passing(self, text: str) -> None:
        """A changing state: one line that is updated on a terminal, a new line every few seconds elsewhere."""
        if self._out.isatty():
            self._write(self._out, f"[{self.elapsed_s:5.1f} s] {text}", passing=True)
        elif self.elapsed_s - self._passed_at_s >= PASSING_EVERY_S:
            self._passed_at_s = self.elapsed_s
            self.step(text)

    def error(self, text: str) -> None:
        self._write(self._err, f"alignedserve: error: {' '.join(text.split())}")

    def _write(self, stream: IO[str], text: str, *, passing: bool = False) -> None:
        with self._lock:
            replaced, self._passing = self._passing, passing
            try:
                stream.write(("\r\x1b[2K" if replaced else "") + text + ("" if passing else "\n"))
                stream.flush()
            except OSError:  # the reader of the output is gone; go on
                return
