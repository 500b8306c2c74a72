"""Finds processes that tests have left running."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from support.fork_server import server_pids

_STAYS = "multiprocessing.resource_tracker"  # Python's own, one for the whole run
_FORKSERVER: Any = vars(forkserver)["_forkserver"]  # Python's, too
_POLL_S = 0.05
_ENDED_WITHIN_S = 10.0


def descendants() -> dict[int, str]:
    """The command line of every descendant of this process, by pid; "" for a zombie."""
    found: dict[int, str] = {}
    pending = [os.getpid()]
    while pending:
        for tasks in Path(f"/proc/{pending.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                for pid in map(int, tasks.read_text().split()):
                    pending.append(pid)
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return found


def shared_files(pids: Iterable[int]) -> list[str]:
    """The files in /dev/shm that these processes have mapped, also those without a name any more."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found.update(re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text()))
    return sorted(found)


def leftovers(before: dict[int, str], grace_s: float) -> dict[int, str]:
    """Processes that live now, were not in `before`, and have not ended within `grace_s`."""
    deadline = time.monotonic() + grace_s
    while True:
        left = {pid: words for pid, words in descendants().items() if pid not in before and words}
        stay = {*server_pids(), getattr(_FORKSERVER, "_forkserver_pid", None)}
        left = {pid: words for pid, words in left.items() if _STAYS not in words and pid not in stay}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(_POLL_S)


def none_left_behind() -> Iterator[None]:
    """The body of a fixture: what its tests have started has ended."""
    before = descendants()
    yield
    left = leftovers(before, _ENDED_WITHIN_S)
    assert not left, f"left running: {left}"
