"""The processes of an instance's other ranks: what they are bound to, and how one that is lost is seen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.parallel import children
from alignedserve.engine.parallel.processes import RankProcesses
from alignedserve.errors import RankLostError
from alignedserve.proc_stat import is_alive
from alignedserve.ranks.degrees import Degrees
from alignedserve.testing.models import make_model
from support.started import ranks_of


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RankProcesses]:
    """Of an instance of three, before they have loaded anything."""
    monkeypatch.setattr(children, "STOPPED_S", 0.1)
    folder = make_model("llama", tmp_path / "model", seed=1)
    info = inspect_model("llama", folder, "float32", "cpu")
    started = RankProcesses(info, Degrees(1, 3), trust_remote_code=False, threads=1, backend="torch")
    try:
        yield started
    finally:
        started.close()


def wait_trouble(ranks: RankProcesses) -> RankLostError:
    deadline = time.monotonic() + 20.0
    while (found := ranks.trouble()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def test_a_rank_that_is_stopped_while_it_loads_is_lost(ranks: RankProcesses) -> None:
    assert ranks.trouble() is None
    first, second = ranks.pids[1:]
    os.kill(second, signal.SIGSTOP)
    assert "rank 2 of 3" in (said := wait_trouble(ranks).message)
    assert "is stopped for over 0.1 s" in said
    os.kill(second, signal.SIGCONT)
    begun_s = time.monotonic()
    ranks.close()
    assert time.monotonic() - begun_s < 4.0  # it does not wait for their imports
    assert ranks.trouble() is None
    assert not is_alive(first)
    assert not is_alive(second)


def test_a_rank_that_is_killed_while_it_loads_is_lost(ranks: RankProcesses) -> None:
    os.kill(ranks.pids[1], signal.SIGKILL)
    assert "rank 1 of 3" in wait_trouble(ranks).message


def test_ranks_that_still_import_end_with_the_process_that_started_them() -> None:
    program = """
import os, signal, socket, subprocess, sys
mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
command = [sys.executable, "-P", "-m", "alignedserve.ranks.start", str(theirs.fileno()), str(os.getpid())]
print(subprocess.Popen(command, pass_fds=[theirs.fileno()]).pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    said = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=False, timeout=60)
    assert said.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 3.0  # its imports take longer
    while is_alive(int(said.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_rank_whose_parent_has_ended_before_it_was_bound_ends() -> None:
    command = [sys.executable, "-P", "-m", "alignedserve.ranks.start", "0", str(os.getpid() + 1)]
    assert subprocess.run(command, check=False, timeout=30).returncode == 1
    assert not ranks_of(os.getpid())
