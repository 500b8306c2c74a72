"""A disk that a test can fill: a small tmpfs."""

from __future__ import annotations

import errno
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

_PIECE = b"\0" * 4096


@functools.cache
def why_not() -> str:
    """Why there can be no small disk here; "" if there can."""
    if shutil.which("mount") is None:
        return "a small disk needs mount (util-linux)"
    try:
        with tempfile.TemporaryDirectory() as folder, SmallDisk(Path(folder), 1 << 16):
            return ""
    except subprocess.CalledProcessError as error:
        return f"a tmpfs cannot be mounted here (it takes root with CAP_SYS_ADMIN): {error.stderr.strip()}"


class SmallDisk:
    """`with SmallDisk(folder, bytes) as disk:` mounts it on the existing folder."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self._size = folder, size
        self._filler = folder / "filler"

    def __enter__(self) -> Self:
        _run("mount", "-t", "tmpfs", "-o", f"size={self._size},mode=0700", "tmpfs", str(self.folder))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _run(
            "umount", "--lazy", str(self.folder)
        )  # lazily, because a process that a failed test left running may use it

    def fill(self) -> None:
        """Fill the disk. Open files can still grow to the end of their last page, by at most 4095 bytes."""
        with self._filler.open("ab", buffering=0) as filler:
            try:
                while filler.write(_PIECE):
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def empty(self) -> None:
        """Give it back."""
        self._filler.unlink()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=30.0)
