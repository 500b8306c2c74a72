"""One memory segment in this process: a descriptor, and its mapping."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat

from alignedserve.errors import TransferError

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def create_descriptor(name: str, size_bytes: int) -> int:
    """A new memfd of this size, zeroed when touched, sealed: no process can resize it. Raises OSError."""
    descriptor = os.memfd_create(f"alignedserve:{name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def require_sealed(descriptor: int, name: str) -> None:
    """Raises TransferError unless `descriptor` is anonymous memory with a sealed size."""
    sealed = 0
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        with contextlib.suppress(OSError):  # EINVAL: a plain file
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    if sealed & SEALS != SEALS:
        raise TransferError(f"segment {name}: the descriptor is not sealed anonymous memory", segment=name)


class Segment:
    """A mapped segment, shared with every process that attached it.

    It holds the descriptor too, so that the segment can be returned to a restarted node agent (`SegmentClient.adopt`).
    """

    def __init__(self, name: str, descriptor: int) -> None:
        """Takes ownership of `descriptor`: it is closed by `close`, or here if mapping fails (OSError)."""
        self.name = name
        self.descriptor = descriptor
        try:
            self.size_bytes = os.fstat(descriptor).st_size
            self._map = mmap.mmap(descriptor, self.size_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        with contextlib.suppress(OSError):  # a kernel without huge pages for shared memory uses small ones
            self._map.madvise(mmap.MADV_HUGEPAGE)

    @property
    def identity(self) -> str:
        """Identity of the memory: equal in all processes of the node, new for a recreated segment of the same name."""
        status = os.fstat(self.descriptor)
        return f"{status.st_dev}:{status.st_ino}"

    @property
    def resident_bytes(self) -> int:
        """Bytes of it that any process has touched, and that take up memory."""
        return os.fstat(self.descriptor).st_blocks * 512

    @property
    def closed(self) -> bool:
        return self.descriptor < 0

    def memory(self) -> memoryview:
        """The whole segment, writable. It stays mapped while a view of it is alive."""
        if self.closed:
            raise TransferError(f"segment {self.name} is closed", segment=self.name)
        return memoryview(self._map)

    def close(self) -> None:
        """Release the descriptor and the mapping; idempotent.

        While views are alive (arrays, tensors, a copy in flight) the memory stays mapped, until the last one is gone.
        """
        if self.closed:
            return
        os.close(self.descriptor)
        self.descriptor = -1
        with contextlib.suppress(BufferError):
            self._map.close()
