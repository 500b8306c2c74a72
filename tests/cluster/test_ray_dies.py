"""Ray's own parts die, or the command itself: everything ends, and the next start on the same ports works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from alignedserve.cluster.launch.descendants import Descendants
from alignedserve.cluster.serve.stopped_processes import UNREPLACED_STOPPED_S
from support.leftovers import shared_files
from support.serving import FakeServeProcess

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

GONE_WITHIN_S = 15.0
RAYS_AGENTS_END_S = 90.0  # the raylet's two agents look for it once a minute


@pytest.fixture(autouse=True)
def own_runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGNEDSERVE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def haproxy_folders(pid: int) -> list[Path]:
    return list(Path("/tmp").glob(f"as-{pid}-*"))


def wait_loading(server: FakeServeProcess) -> None:
    deadline = time.monotonic() + 60.0
    while "prefill-0      loading" not in server.output:
        assert time.monotonic() < deadline, server.output
        time.sleep(0.05)


def end_by_striking(server: FakeServeProcess, word: str, how: int = signal.SIGKILL) -> None:
    """The command says which part has ended, and ends everything."""
    descendants, shared = Descendants(), shared_files(server.pids(""))
    descendants.note()
    (victim,) = server.pids(word)
    struck_s = time.monotonic()
    os.kill(victim, how)
    assert server.process.wait(60.0) == 1
    assert time.monotonic() - struck_s < GONE_WITHIN_S + (UNREPLACED_STOPPED_S if how == signal.SIGSTOP else 0.0)
    assert "a process of Ray itself, has ended" in server.output
    assert descendants.end(5.0) == 0
    assert [file for file in shared if os.path.exists(file)] == []
    assert haproxy_folders(server.process.pid) == []


@pytest.mark.slow
def test_the_raylet_dies() -> None:
    with FakeServeProcess("--device", "cpu") as server:
        end_by_striking(server, "raylet/raylet")


@pytest.mark.slow
@pytest.mark.parametrize("word", ["raylet/raylet", "gcs/gcs_server"])
def test_one_of_them_is_stopped(word: str) -> None:
    with FakeServeProcess("--device", "cpu") as server:
        end_by_striking(server, word, signal.SIGSTOP)


@pytest.mark.slow
def test_the_raylet_dies_while_roles_load() -> None:
    server = FakeServeProcess("--device", "cpu", environment={"FAKE_PREFILL": "never_ready=1"})
    server.start()
    try:
        wait_loading(server)
        end_by_striking(server, "raylet/raylet")
    finally:
        server.stop()


@pytest.mark.slow
def test_stop_is_given_while_roles_load() -> None:
    server = FakeServeProcess("--device", "cpu", environment={"FAKE_PREFILL": "never_ready=1"})
    server.start()
    try:
        wait_loading(server)
        done = subprocess.run(
            [sys.executable, "-m", "alignedserve.cluster.cli.main", "stop"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert server.process.wait(30.0) == 0
        assert "`alignedserve stop` was given" in server.output
    finally:
        server.stop()


@pytest.mark.slow
def test_the_gcs_dies_and_the_next_start_finds_nothing_in_its_way() -> None:
    with FakeServeProcess("--device", "cpu") as server:
        end_by_striking(server, "gcs/gcs_server")
    again = FakeServeProcess("--device", "cpu")
    again.port, again.grpc_port = server.port, server.grpc_port
    with again:
        assert again.stop() == 0


@pytest.mark.slow
def test_the_command_dies_and_the_next_start_finds_nothing_in_its_way() -> None:
    descendants = Descendants()
    with FakeServeProcess("--device", "cpu") as server:
        descendants.note()
        pids = [role["pid"] for role in server.roles()]
        killed_s = time.monotonic()
        server.process.kill()
        server.process.wait(10.0)
        again = FakeServeProcess("--device", "cpu")
        again.port, again.grpc_port = server.port, server.grpc_port
        while any(os.path.exists(f"/proc/{pid}") for pid in pids):
            assert time.monotonic() - killed_s < GONE_WITHIN_S
            time.sleep(0.1)
        with again:  # at once
            assert haproxy_folders(server.process.pid) == []
            assert again.stop() == 0
    assert descendants.end(RAYS_AGENTS_END_S) == 0
