"""`alignedserve serve` on Ray with roles that only join: start, status, replacement, an end that leaves nothing."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from alignedserve.cluster.cli.serve_process import ServeProcess
from alignedserve.cluster.launch.descendants import Descendants
from alignedserve.proc_stat import is_alive
from support.cpu_waits import thread_waits_s
from support.serving import FakeServeProcess, wait_ready
from support.started import noted, still_alive

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

STATUS = (sys.executable, "-m", "alignedserve.cluster.cli.main", "status", "--json")


@pytest.fixture(autouse=True)
def own_runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALIGNEDSERVE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path / "run"


@pytest.fixture
def nothing_left() -> Iterator[Descendants]:
    """Every process that the test has started is gone in the end, without being killed here."""
    descendants = Descendants()
    yield descendants
    assert descendants.end(5.0) == 0


def status() -> list[dict[str, Any]]:
    done = subprocess.run(STATUS, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    roles: list[dict[str, Any]] = json.loads(done.stdout)["roles"]
    return roles


def test_a_cluster_comes_up_replaces_what_dies_and_leaves_nothing(
    nothing_left: Descendants, own_runtime_dir: Path
) -> None:
    with FakeServeProcess("--device", "cpu", "--spares", "1") as server:
        begun = time.monotonic()
        with subprocess.Popen(STATUS, stdout=subprocess.PIPE) as command:
            assert command.stdout is not None
            roles = {role["id"]: role["pid"] for role in json.load(command.stdout)["roles"]}
            os.waitid(os.P_PID, command.pid, os.WEXITED | os.WNOWAIT)
            waited_s = max(thread_waits_s(command.pid).values())  # for a CPU: other work of this machine
            assert time.monotonic() - begun - waited_s < 2.0
        assert {"node_agent-0", "kv_pool-0", "scheduler-0", "prefill-0", "decode-0", "supervisor-0"} <= set(roles)
        assert all(is_alive(pid) for pid in roles.values())
        niceness = {os.getpriority(os.PRIO_PROCESS, pid) for pid in roles.values()}
        assert niceness == {os.getpriority(os.PRIO_PROCESS, 0)}  # Ray would give way to everybody else
        wait_printed(server, "serving tiny on")
        assert "curl -N http://127.0.0.1" in server.output
        spare = wait_ready(server, "spare-0")
        os.kill(roles["decode-0"], signal.SIGKILL)
        assert wait_ready(server, "decode-0", roles["decode-0"]) == spare
        wait_printed(server, "decode-0 has ended: ")
        wait_printed(server, f"decode-0       ready  pid {spare}")
        for role_id in ("node_agent-0", "supervisor-0", "kv_pool-0"):
            os.kill(roles[role_id], signal.SIGKILL)
            wait_ready(server, role_id, roles[role_id])
        for role_id in ("node_agent-0", "supervisor-0"):  # each is ended by the other
            stopped = wait_ready(server, role_id)
            os.kill(stopped, signal.SIGSTOP)
            wait_ready(server, role_id, stopped)
        after = {role["id"]: role["pid"] for role in status()}
        assert after["decode-0"] == spare
        assert after["prefill-0"] == roles["prefill-0"]
        assert after["scheduler-0"] == roles["scheduler-0"]
        nothing_left.note()
        begun = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - begun < 30
        assert list(own_runtime_dir.iterdir()) == []
        assert [line for line in server.output.splitlines() if "WARN" in line or "Traceback" in line] == []


@pytest.mark.slow
def test_a_role_that_cannot_start_ends_the_command_with_its_reason(nothing_left: Descendants) -> None:
    server = FakeServeProcess("--device", "cpu", environment={"FAKE_PREFILL": "fail=model_error"})
    begun = time.monotonic()
    server.start()
    nothing_left.note()
    assert server.process.wait(60) == 1
    assert time.monotonic() - begun < 60
    assert "alignedserve: error: prefill-0 was told to fail" in server.output


@pytest.mark.slow
def test_two_clusters_on_one_machine_do_not_meet_and_listen_for_this_machine_only(
    nothing_left: Descendants, tmp_path: Path
) -> None:
    other = {"ALIGNEDSERVE_RUNTIME_DIR": str(tmp_path / "other")}
    with FakeServeProcess("--device", "cpu") as one, FakeServeProcess("--device", "cpu", environment=other) as two:
        nothing_left.note()
        pids = [{role["pid"] for role in server.get("/alignedserve/status")["roles"]} for server in (one, two)]
        assert pids[0]
        assert pids[1]
        assert pids[0].isdisjoint(pids[1])
        for server in (one, two):
            (sockets,) = [
                found for found in map(listening, processes("haproxy")) if ("127.0.0.1", server.port) in found
            ]
            assert ("127.0.0.1", server.grpc_port) in sockets
            assert {address for address, _ in sockets} == {"127.0.0.1"}
            assert open_to_others(server.process.pid) == []
            assert_gcs_wants_its_token(server.process.pid)
        assert two.stop() == 0
        assert {role["pid"] for role in one.get("/alignedserve/status")["roles"]} == pids[0]


@pytest.mark.slow
def test_a_start_after_everything_was_killed_finds_nothing_in_its_way(nothing_left: Descendants) -> None:
    with FakeServeProcess("--device", "cpu") as killed:
        nothing_left.note()
        roles = noted(role["pid"] for role in status())
        killed.process.kill()
        nothing_left.end(0.0)
    assert still_alive(roles) == []
    with FakeServeProcess("--device", "cpu") as server:
        assert noted(role["pid"] for role in status()).items().isdisjoint(roles.items())
        nothing_left.note()
        assert server.stop(signal.SIGINT) == 0


def processes(name: str) -> list[int]:
    """By the program's name as `ps` shows it; the kernel's is that of a memory file where HAProxy runs from one."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and Path((entry / "cmdline").read_text().split("\0")[0]).name == name:
                found.append(int(entry.name))
    return found


def listening(pid: int) -> set[tuple[str, int]]:
    """The IPv4 addresses and ports on which a process listens."""
    links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:[")}
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            address, port = fields[1].split(":")
            found.add((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


def open_to_others(pid: int) -> list[str]:
    """What a process and its descendants listen on that is not this machine's own."""
    found = []
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            ports = [c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            found += [f"{process.name()} {address}" for address in ports if not is_loopback(address.ip)]
    return found


def is_loopback(text: str) -> bool:
    address = ipaddress.ip_address(text)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def assert_gcs_wants_its_token(pid: int) -> None:
    """Other users of this machine reach Ray's ports as well: without the token of this cluster they learn nothing."""
    (gcs,) = [child for child in psutil.Process(pid).children(recursive=True) if child.name() == "gcs_server"]
    ports = [c.laddr.port for c in gcs.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    for port in ports:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            ask = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")
            with pytest.raises(grpc.RpcError) as refused:
                ask(b"", timeout=10)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert ports


def wait_printed(server: ServeProcess, text: str, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while text not in server.output:
        assert time.monotonic() < deadline, server.output
        time.sleep(0.05)
