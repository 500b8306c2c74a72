"""A folder private to this user, for sockets and for the records of running clusters."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from pathlib import Path

from alignedserve.errors import ConfigError


def runtime_dir() -> Path:
    """`$XDG_RUNTIME_DIR/alignedserve`, or `/tmp/alignedserve-<uid>`; made, mode 0700.

    Raises ConfigError where somebody else owns it or can read it: another user may have laid a trap in /tmp.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(base) / "alignedserve" if base and os.access(base, os.W_OK) else _in_tmp()
    folder.mkdir(mode=0o700, parents=False, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise ConfigError(f"{folder} is not a folder of this user; set XDG_RUNTIME_DIR to one that is")
    if stat.S_IMODE(status.st_mode) != 0o700:
        folder.chmod(0o700)
    return folder


def _in_tmp() -> Path:
    return Path("/tmp") / f"alignedserve-{os.geteuid()}"


def cluster_dir(cluster_id: str) -> Path:
    """The folder of one cluster's sockets on this node."""
    folder = runtime_dir() / cluster_id
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def remove_cluster_dir(cluster_id: str) -> None:
    shutil.rmtree(runtime_dir() / cluster_id, ignore_errors=True)


def new_cluster_id() -> str:
    return secrets.token_hex(4)


def new_token() -> str:
    return secrets.token_urlsafe(32)
