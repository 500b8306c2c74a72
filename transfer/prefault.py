"""First touch in the background: the kernel takes about a second to find and clear a GiB; no copy should wait for it.

A segment is touched page by page without a change to its bytes, so others may read and write it meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading

import numpy as np

from alignedserve.transfer.segment import Segment

CHUNK_BYTES = 16 << 20
MADV_POPULATE_WRITE = 23  # Linux 5.14
_libc = ctypes.CDLL(None, use_errno=True)


class Prefault:
    """Threads that touch a segment; made by `prefault`. They run at the lowest priority and end with the process."""

    def __init__(self, segment: Segment, threads: int) -> None:
        self._view = np.frombuffer(segment.memory(), dtype=np.uint8)  # keeps the mapping alive
        self._starts = iter(range(0, segment.size_bytes, CHUNK_BYTES))
        self._lock = threading.Lock()
        self._cancelled = False
        self._threads = [
            threading.Thread(target=self._run, name=f"prefault-{segment.name}", daemon=True) for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def done(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it ended within `timeout_s` (for each thread)."""
        for thread in self._threads:
            thread.join(timeout_s)
        return self.done()

    def cancel(self) -> None:
        """Stop after the pieces under way (16 MiB each)."""
        self._cancelled = True

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # of this thread alone: Linux gives each its own priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while not self._cancelled:
            with self._lock:
                start = next(self._starts, None)
            if start is None:
                return
            _touch(self._view[start : start + CHUNK_BYTES])


def prefault(segment: Segment, threads: int = 1) -> Prefault:
    """Begin to touch every page of `segment`, and to map it in this process. Returns at once."""
    return Prefault(segment, max(1, threads))


def _touch(piece: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    """Make the pages of `piece` present. `ctypes` lets other threads run during the call; `mmap.madvise` does not."""
    length = -(-piece.size // mmap.PAGESIZE) * mmap.PAGESIZE
    if _libc.madvise(ctypes.c_void_p(piece.ctypes.data), ctypes.c_size_t(length), MADV_POPULATE_WRITE) == 0:
        return
    if ctypes.get_errno() != errno.ENOMEM:  # an older kernel: reading a page of shared memory allocates it too
        int(piece[:: mmap.PAGESIZE].sum())
