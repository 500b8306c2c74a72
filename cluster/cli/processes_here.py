"""A cluster's processes on this machine: which there are, their logs, their environment and their stacks."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from alignedserve.errors import ConfigError
from alignedserve.proc_stat import parent_of

STACK_WITHIN_S = 20.0
MOST_LOG_BYTES = 4 << 20  # of each log, from its end
# Titles that Ray gives to the processes of actors and replicas.
_OURS = re.compile(
    r"ray::(?:ServeReplica:[^:]*:)?"
    r"(Supervisor|Gateway|NodeAgent|Scheduler|KvPool|PrefillWorker|DecodeWorker|RankHostActor|Spare)\b"
)


def around(supervisor_pid: int) -> dict[int, str]:
    """The names of the processes, by pid, that the supervisor's Ray node runs for a cluster, with their children.

    For when the cluster cannot list them itself. Children are other ranks and fork servers.
    """
    parents = _parents()
    manager = parents.get(supervisor_pid, 0)
    if manager <= 1:
        return {}
    found = {}
    for pid in parents:
        top = pid
        while parents.get(top, 0) not in (0, manager):
            top = parents[top]
        if parents.get(top) == manager and (title := _OURS.match(_title(top))):
            found[pid] = f"{title[1]}-{top}" if pid == top else f"{title[1]}-{top}-child-{pid}"
    return found


def _parents() -> dict[int, int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = parent_of(int(entry.name))
    return parents


def _title(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""


def logs_of(names: Mapping[int, str]) -> list[tuple[str, Path]]:
    """The log files of processes, each once: what their output is written to, and their own logs. `names`: by pid."""
    found: dict[Path, str] = {}
    for pid, name in names.items():
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                path = link.readlink()
                is_log = link.name in ("1", "2") or path.name == f"{name}.log"
                if is_log and path.is_file():
                    found.setdefault(path, f"{name}-{path.name}")
    return [(name, path) for path, name in found.items()]


def tail(path: Path) -> str:
    """The end of a file."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MOST_LOG_BYTES))
        return file.read().decode("utf-8", "replace")


def stack(pid: int) -> str:
    """The stacks of a process's threads, by py-spy. Raises ConfigError if it is not installed."""
    tool = shutil.which("py-spy") or shutil.which(str(Path(sys.executable).parent / "py-spy"))
    if tool is None:
        raise ConfigError("py-spy is not installed: pip install py-spy")
    found = subprocess.run(
        [tool, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=STACK_WITHIN_S, check=False
    )
    return found.stdout or found.stderr


def environments(pids: Iterable[int]) -> dict[str, set[str]]:
    """The values of each environment variable that processes were started with."""
    values: dict[str, set[str]] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0"):
                name, _, value = line.partition("=")
                values.setdefault(name, set()).add(value)
    return values
