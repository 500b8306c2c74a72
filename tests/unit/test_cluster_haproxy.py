"""HAProxy of one cluster: its own folder and ports, statistics for this machine only, an end with its starter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from alignedserve.cluster import haproxy, haproxy_exec
from alignedserve.cluster.processes import is_alive


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(haproxy, "PARENT", tmp_path)
    return tmp_path


@pytest.fixture
def folder() -> Iterator[haproxy.HaProxyFolder]:
    made = haproxy.HaProxyFolder()
    yield made
    made.remove()


def test_statistics_are_bound_to_loopback_and_nothing_else_changes() -> None:
    config = "frontend a\n    bind :9101\nfrontend b\n    bind *:8000\n    bind :91011\nlisten stats\n  bind *:8404\n"
    local = haproxy_exec.keep_local(config, ("9101", "8404"))
    assert local == (
        "frontend a\n    bind 127.0.0.1:9101\nfrontend b\n    bind *:8000\n    bind :91011\nlisten stats\n"
        "  bind 127.0.0.1:8404\n"
    )


def test_every_path_and_port_that_serve_would_share_is_the_clusters_own(folder: haproxy.HaProxyFolder) -> None:
    environment = folder.environment("/bin/true")
    ports = [value for name, value in environment.items() if name.endswith("_PORT")]
    assert len(ports) == len(set(ports)) == 4
    paths = [value for name, value in environment.items() if name.startswith("RAY_SERVE_HAPROXY") and "/" in value]
    assert len(paths) == 6
    assert all(path.startswith(str(folder.path)) for path in paths)
    assert folder.path.stat().st_mode & 0o077 == 0


def test_a_socket_below_the_folder_has_a_path_that_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haproxy, "PARENT", Path("/tmp"))
    monkeypatch.setattr(os, "getpid", lambda: 4194304)  # the largest
    folder = haproxy.HaProxyFolder()
    try:
        # HAProxy binds under a name with its pid first.
        assert len(str(folder.path / ("n" * 56) / "admin.sock.4194304.tmp")) < 108
    finally:
        folder.remove()


def test_it_becomes_the_executable_with_a_configuration_that_stays_local(
    folder: haproxy.HaProxyFolder, tmp_path: Path
) -> None:
    environment = folder.environment("/bin/echo")
    config = tmp_path / "haproxy.cfg"
    config.write_text(f"bind *:{environment['RAY_SERVE_HAPROXY_STATS_PORT']}\n", encoding="utf-8")
    start = environment["RAY_SERVE_HAPROXY_BINARY_PATH"]
    done = subprocess.run(
        [start, "-u", "-f", str(config)], capture_output=True, text=True, env=os.environ | environment, check=False
    )
    assert done.stdout == f"-u -f {config}.local\n"
    assert Path(f"{config}.local").read_text(encoding="utf-8").startswith("bind 127.0.0.1:")


def test_it_ends_with_the_process_that_started_it(folder: haproxy.HaProxyFolder) -> None:
    environment = os.environ | folder.environment("/bin/sleep")
    script = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([{environment['RAY_SERVE_HAPROXY_BINARY_PATH']!r}, '60'])\n"
        "print(child.pid, flush=True)\ntime.sleep(60)\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    wait_for(lambda: Path(f"/proc/{pid}/comm").read_text(encoding="utf-8") == "sleep\n")
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    starter.stdout.close()
    wait_for(lambda: not is_alive(pid))


def test_folders_of_commands_that_were_killed_are_removed_and_no_others(parent: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for name in (f"as-{ended.pid}-abc", f"as-{os.getpid()}-abc", "as-other", f"bs-{ended.pid}-abc"):
        (parent / name).mkdir()
    haproxy.clean_stale()
    assert sorted(path.name for path in parent.iterdir()) == sorted(
        [f"as-{os.getpid()}-abc", "as-other", f"bs-{ended.pid}-abc"]
    )


def test_a_binary_that_does_not_run_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert haproxy.binary() is not None
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", "/bin/false")
    assert haproxy.binary() is None
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", "/nowhere")
    assert haproxy.binary() is None


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
