"""A role's own page of metrics: what it answers, and that slow clients cost it little."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from alignedserve.control import metrics_port
from alignedserve.control.metrics_port import MOST_CLIENTS, MetricsPort

HOST = "127.0.0.1"


@pytest.fixture
def port() -> Iterator[MetricsPort]:
    serving = MetricsPort(HOST, lambda: "a 1\n")
    yield serving
    serving.close()


def get(port: MetricsPort, path: str) -> str:
    with urllib.request.urlopen(f"http://{HOST}:{port.port}{path}", timeout=10.0) as answer:
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        return str(answer.read().decode())


def test_the_page_and_nothing_else(port: MetricsPort) -> None:
    assert get(port, "/metrics") == get(port, "/metrics?x=1") == "a 1\n"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(port, "/")


def test_silent_clients_are_limited_in_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_port, "CLIENT_S", 0.5)
    port = MetricsPort(HOST, lambda: "a 1\n")
    silent = [socket.create_connection((HOST, port.port)) for _ in range(MOST_CLIENTS)]
    with socket.create_connection((HOST, port.port), timeout=10.0) as further:
        assert further.recv(1) == b"", "turned away at once"
    for client in silent:
        client.settimeout(10.0)
        assert client.recv(1) == b"", "its time is over"
        client.close()
    assert get(port, "/metrics") == "a 1\n"
    port.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((HOST, port.port), timeout=10.0)


def test_a_page_that_fails_ends_its_client_only() -> None:
    def failing() -> str:
        raise RuntimeError("no metrics")

    port = MetricsPort(HOST, failing)
    for _ in range(MOST_CLIENTS + 2):
        with pytest.raises((OSError, urllib.error.URLError)):
            get(port, "/metrics")
    port.close()
