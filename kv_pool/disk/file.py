"""The system calls of the disk tier, and the file of a shard.

Reads and writes go past the page cache (O_DIRECT) where the file system allows it. Offsets, lengths and memory are
multiples of `PAGE_BYTES` then. Elsewhere the pages are dropped from the page cache afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from alignedserve.errors import ConfigError, ResourceError
from alignedserve.memory import describe_bytes

logger = logging.getLogger(__name__)

PAGE_BYTES = 4096
LOCK_WITHIN_S = 3.0  # a predecessor that is being killed holds its lock until it is gone
MOST_FILES = 1024
FAULTS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT)
"""Errors of a disk that is broken or full, not of the configuration."""
SUFFIX = ".kv"


class FileCalls:
    """The calls that touch the disk. Tests put faults in their place. Each raises OSError."""

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def used_bytes(self, fd: int) -> int:
        return os.fstat(fd).st_blocks * 512

    def room(self, folder: str) -> tuple[int, int]:
        """Bytes of the file system that are free, and all that it has."""
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

    def forget(self, fd: int, offset: int, size: int) -> None:
        os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)

    def close(self, fd: int) -> None:
        os.close(fd)


def page_buffer(size: int) -> memoryview:
    """Zeroed memory for `O_DIRECT`: at least `size` bytes, in whole pages, page-aligned."""
    return memoryview(mmap.mmap(-1, padded(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def padded(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


class DiskFile:
    """A locked file. Blocks; for any thread."""

    def __init__(self, calls: FileCalls, path: Path, fd: int) -> None:
        self.path = path
        self._calls, self._fd = calls, fd
        try:
            self.direct = self._goes_past_the_page_cache()
        except OSError:
            calls.close(fd)
            raise

    def _goes_past_the_page_cache(self) -> bool:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            self._calls.read(self._fd, [page_buffer(PAGE_BYTES)], 0)
            return True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
            return False

    def read(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill `buffers`. Raises OSError, also if the file ends before them."""
        wanted = sum(buffer.nbytes for buffer in buffers)
        self._require(self._calls.read(self._fd, buffers, offset), wanted, offset, "read")
        self._forget(offset, wanted)

    def read_up_to(self, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` as far as the file goes. Returns the number of bytes. Raises OSError."""
        return self._calls.read(self._fd, [buffer], offset)

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Write all `buffers`. Raises OSError, also if only a part was written."""
        wanted = sum(buffer.nbytes for buffer in buffers)
        self._require(self._calls.write(self._fd, buffers, offset), wanted, offset, "written")
        self._forget(offset, wanted)

    def _require(self, done: int, wanted: int, offset: int, verb: str) -> None:
        if done != wanted:
            raise OSError(errno.EIO, f"only {done} of {wanted} bytes at {offset} of {self.path} were {verb}")

    def _forget(self, offset: int, size: int) -> None:
        if not self.direct:
            with contextlib.suppress(OSError):  # only advice
                self._calls.forget(self._fd, offset, size)

    def begin_anew(self, size: int) -> None:
        """Discard the content: `size` zeros, which take up no space."""
        self._calls.truncate(self._fd, 0)
        self._calls.truncate(self._fd, size)

    def resize(self, size: int) -> None:
        """Cut the file after `size` bytes, or lengthen it by zeros, which take up no space."""
        self._calls.truncate(self._fd, size)

    def require_room(self, size: int) -> None:
        """Raises ResourceError if the file system is smaller than `size` bytes, OSError if others have filled it."""
        free, total = self._calls.room(str(self.path.parent))
        free += self._calls.used_bytes(self._fd)
        if min(free, total) < size:
            problem = (
                f"kv_pool.disk_path: {self.path.parent} has room for {describe_bytes(min(free, total))}, not for "
                f"{describe_bytes(size)}; lower kv_pool.disk_gib"
            )
            raise ResourceError(problem) if total < size else OSError(errno.ENOSPC, problem)

    def close(self) -> None:
        self._calls.close(self._fd)


def make_folder(folder: Path) -> None:
    """Make the folder, for this user alone, unless it exists.

    Raises ConfigError if it is not absolute, or if it cannot be written to, and OSError for a fault of the disk.
    """
    if not folder.is_absolute():
        raise ConfigError(f"kv_pool.disk_path: {folder} is relative, but to which folder? give an absolute path")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "permission denied")
    except OSError as error:
        if error.errno in FAULTS:
            raise
        raise ConfigError(f"kv_pool.disk_path: {folder} cannot be written to: {error.strerror}") from error


def open_own(calls: FileCalls, folder: Path, cluster: str, shard: str, fits: bytes) -> DiskFile:
    """The shard's own file `CLUSTER.SHARD.kv`, open and locked until the process ends.

    If there is none, one is taken over that no process has locked, because after a restart the same node may have
    another shard: of this cluster's files one that begins with `fits`, else any. If there is none either, it is made.

    Raises ConfigError if another process has the file, or if it cannot be opened, and OSError for a fault of the disk.
    """
    prefix = cluster.replace("/", "_")
    own = folder / f"{prefix}.{shard}{SUFFIX}"
    try:
        if not own.exists() and (fd := _unused(calls, folder, prefix, fits, own)) is not None:
            return DiskFile(calls, own, fd)
        while True:
            fd = calls.open(str(own), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                locked = _lock(fd, LOCK_WITHIN_S)
                _keep_private(fd)
            except OSError:
                calls.close(fd)
                raise
            if _is_at(fd, own):
                break
            calls.close(fd)  # another shard has taken it over meanwhile
        if not locked:
            calls.close(fd)
            raise ConfigError(
                f"kv_pool.disk_path: {own} is in use by another process; give each cluster a folder of its own, "
                "or a cluster.name of its own"
            )
        return DiskFile(calls, own, fd)
    except OSError as error:
        if error.errno in FAULTS:
            raise
        raise ConfigError(f"kv_pool.disk_path: {own} cannot be opened: {error.strerror}") from error


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False


def _unused(calls: FileCalls, folder: Path, prefix: str, fits: bytes, own: Path) -> int | None:
    """A locked file of another shard of this cluster, now called `own`; None if there is none."""
    spare: tuple[Path, int] | None = None
    there = (path for path in folder.iterdir() if path.name.startswith(f"{prefix}.") and path.suffix == SUFFIX)
    its_own = (path for path in there if "." not in path.stem[len(prefix) + 1 :])  # not of a cluster NAME.OTHER
    for path in sorted(its_own)[:MOST_FILES]:
        try:
            fd = calls.open(str(path), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        begins = _beginning_of_unused(fd, len(fits))
        if begins is None:
            calls.close(fd)
            continue
        if begins == fits:
            if spare is not None:
                calls.close(spare[1])
            spare = path, fd
            break
        if spare is None:
            spare = path, fd
        else:
            calls.close(fd)
    if spare is None:
        return None
    os.rename(spare[0], own)
    logger.info("the disk tier takes over %s, which no process uses, as %s", spare[0], own)
    return spare[1]


def _beginning_of_unused(fd: int, size: int) -> bytes | None:
    """The first bytes of a file, which is locked from now on; None if it is in use, or of no use."""
    try:
        if not _lock(fd, 0.0):
            return None
        _keep_private(fd)
        return os.pread(fd, size, 0)
    except OSError:
        return None


def _keep_private(fd: int) -> None:
    """Let only this user read and write the file. Raises OSError if it is not a file of this user.

    Another user could read prompts in it, and write KV that gives wrong tokens.
    """
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it is not a file of the user that this process runs as")
    if stat.S_IMODE(found.st_mode) != 0o600:
        os.fchmod(fd, 0o600)


def _lock(fd: int, within_s: float) -> bool:
    until = time.monotonic() + within_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.05)
