"""Serve's HAProxyManager is ended only while a gateway is ready and nothing is let through."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from alignedserve.cluster.launch.descendants import Descendants
from alignedserve.cluster.serve.front_watch import MANAGER, FrontWatch

AFTER_S = 0.2
BODIES = {200: b'{"status": "ok"}', 503: b'{"error": {"message": "no gateway is ready"}}'}


class Front:
    """HAProxy's frontend for probes. `status`: what it answers; None: nothing."""

    def __init__(self) -> None:
        self.status: int | None = 200
        front = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                assert self.path == "/live"
                if front.status is None:
                    return
                self.send_response(front.status)
                self.end_headers()
                self.wfile.write(BODIES[front.status])

            def log_request(self, *said: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def refuse(self) -> None:
        """End: connections are refused from now on."""
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def front() -> Iterator[Front]:
    front = Front()
    yield front
    front.refuse()


@pytest.fixture
def manager() -> Iterator[subprocess.Popen[bytes]]:
    with start_manager() as process:
        yield process
        process.kill()


def start_manager() -> subprocess.Popen[bytes]:
    return subprocess.Popen([f"{MANAGER}.check_health", "60"], executable="/bin/sleep")


def look_for(watch: FrontWatch, seconds: float) -> list[str]:
    said, until_s = list[str](), time.monotonic() + seconds
    while time.monotonic() < until_s and not said:
        said += [line] if (line := watch.look()) else []
        time.sleep(0.01)
    return said


@pytest.mark.parametrize("refuses", [False, True])
def test_a_manager_that_lets_nothing_through_is_ended_and_the_next_has_more_time(
    refuses: bool, front: Front, manager: subprocess.Popen[bytes]
) -> None:
    watch = FrontWatch(front.url, lambda: True, Descendants(), AFTER_S)
    assert look_for(watch, 2 * AFTER_S) == []
    front.status = 503
    if refuses:
        front.refuse()
    begun_s = time.monotonic()
    assert look_for(watch, 10.0) == [
        f"HAProxy let no request through for 0.2 s, so {MANAGER} (pid {manager.pid}) was ended: Ray starts a new one"
    ]
    assert time.monotonic() - begun_s >= AFTER_S
    assert manager.wait(10.0) == -9
    with start_manager() as second:
        try:
            begun_s = time.monotonic()
            (said,) = look_for(watch, 10.0)
            assert (f"for {2 * AFTER_S:g} s" in said, f"pid {second.pid}" in said) == (True, True)
            assert time.monotonic() - begun_s >= 2 * AFTER_S
        finally:
            second.kill()


def test_an_answer_ends_the_silence(front: Front, manager: subprocess.Popen[bytes]) -> None:
    watch = FrontWatch(front.url, lambda: True, Descendants(), 1.0)
    for _ in range(3):
        front.status = 503
        assert look_for(watch, 0.6) == []
        front.status = 200
        assert watch.look() == ""
    assert manager.poll() is None


def test_a_manager_whose_haproxy_accepts_connections_without_an_answer_is_left_alone(
    front: Front, manager: subprocess.Popen[bytes]
) -> None:
    watch = FrontWatch(front.url, lambda: True, Descendants(), AFTER_S)
    front.status = None
    assert look_for(watch, 3 * AFTER_S) == []
    assert manager.poll() is None


@pytest.mark.parametrize("ready", [False, None])
def test_a_manager_is_left_alone_while_no_gateway_is_known_to_be_ready(
    ready: bool | None, front: Front, manager: subprocess.Popen[bytes]
) -> None:
    front.status = 503
    states = [ready]
    watch = FrontWatch(front.url, lambda: states[-1], Descendants(), AFTER_S)
    assert look_for(watch, 3 * AFTER_S) == []
    assert manager.poll() is None
    states.append(True)
    begun_s = time.monotonic()
    assert len(look_for(watch, 10.0)) == 1
    if ready is False:  # HAProxy has not had the time to find the gateway
        assert time.monotonic() - begun_s >= AFTER_S
