"""A folder private to this user, for sockets and for the records of running clusters."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import stat
import time
from pathlib import Path

from alignedserve.errors import ConfigError

OVERRIDE = "ALIGNEDSERVE_RUNTIME_DIR"
CLUSTER_ID_CHARACTERS = 8
STARTING_S = 60.0
OLD_LOG_S = 24 * 3600.0


def runtime_dir() -> Path:
    """`$ALIGNEDSERVE_RUNTIME_DIR`, else `$XDG_RUNTIME_DIR/alignedserve`, else `temp_dir()`. Created with mode 0700.

    Raises ConfigError if another user owns it.
    """
    if own := os.environ.get(OVERRIDE):
        return _private(Path(own))
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    return _private(Path(base) / "alignedserve") if base and os.access(base, os.W_OK) else temp_dir()


def record_dirs() -> list[Path]:
    """The folders of records. A cluster may have been started in a session without XDG_RUNTIME_DIR."""
    return [runtime_dir()] if os.environ.get(OVERRIDE) else list(dict.fromkeys((runtime_dir(), temp_dir())))


def temp_dir() -> Path:
    """`/tmp/alignedserve-<uid>`, for files that may be large. The path is short, because socket paths must be."""
    return _private(_temp_path())


def _temp_path() -> Path:
    return Path("/tmp") / f"alignedserve-{os.geteuid()}"


def _private(folder: Path) -> Path:
    """The folder, created if missing. Refuses one of another user, because anyone can create it in /tmp."""
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise ConfigError(f"{folder} is not a folder of this user; remove it, or set XDG_RUNTIME_DIR to one that is")
    if stat.S_IMODE(status.st_mode) != 0o700:
        folder.chmod(0o700)
    return folder


def clean_stale() -> None:
    """Remove the folders of killed clusters, and logs of commands that are more than a day old."""
    now = time.time()
    for folder in record_dirs():
        _clean_folders(folder)
    for log in temp_dir().glob("serve-*.log"):
        if now - log.stat().st_mtime > OLD_LOG_S:
            log.unlink(missing_ok=True)


def _clean_folders(where: Path) -> None:
    now = time.time()
    for entry in where.iterdir():
        # A starting cluster has a folder before it has a node agent.
        with contextlib.suppress(OSError):  # another process may clean, too
            if entry.is_dir() and len(entry.name) == CLUSTER_ID_CHARACTERS and now - entry.stat().st_mtime > STARTING_S:
                remove_stale(entry)


def prepare_socket_folder(socket_path: str) -> None:
    """Create the private folder of a node agent's socket, on its node. Removes the folders of killed clusters there.

    Raises ConfigError if another user owns it.
    """
    folder = Path(socket_path).parent
    if folder.parent == _temp_path():
        _clean_folders(temp_dir())
        folder.mkdir(mode=0o700, exist_ok=True)


def leave_socket_folder(socket_path: str) -> None:
    """Remove the socket's folder if it is empty."""
    with contextlib.suppress(OSError):
        Path(socket_path).parent.rmdir()


def remove_stale(folder: Path) -> None:
    """Remove a cluster's folder unless a node agent answers. Nodes that share a file system share the folder."""
    if folder.is_dir() and not any(_answers(path) for path in folder.glob("agent*.sock")):
        shutil.rmtree(folder, ignore_errors=True)


def agent_socket(cluster_id: str, number: int, *, here: bool) -> str:
    """The socket path of the node agent with this number. With `here` it is in the cluster's folder; for another node
    it is in /tmp, because that node's runtime folder is not known here."""
    folder = cluster_dir(cluster_id) if here else _temp_path() / cluster_id
    return str(folder / f"agent-{number}.sock")


def socket_number(path: str) -> int | None:
    """The number in a path made by `agent_socket`; None for any other path."""
    named = re.fullmatch(r"agent-(\d+)\.sock", Path(path).name)
    return int(named[1]) if named else None


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.5)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def cluster_dir(cluster_id: str) -> Path:
    """The folder of one cluster's sockets on this node."""
    folder = runtime_dir() / cluster_id
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def remove_cluster_dir(cluster_id: str) -> None:
    """Remove the cluster's folders on this node. Node agents remove those on other nodes."""
    for folder in record_dirs():
        shutil.rmtree(folder / cluster_id, ignore_errors=True)


def new_cluster_id() -> str:
    return secrets.token_hex(CLUSTER_ID_CHARACTERS // 2)


def new_token() -> str:
    return secrets.token_urlsafe(32)
