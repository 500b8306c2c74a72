"""How `alignedserve serve` ends while it serves: open requests finish, new ones are refused, nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator

import grpc
import httpx
import pytest

from alignedserve.client.calls import open_stub
from alignedserve.cluster.cli.serve_process import ServeProcess
from alignedserve.proto import inference_pb2 as inf
from support.leftovers import shared_files
from support.started import noted, still_alive

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

DRAIN_S = 120


@contextlib.contextmanager
def begun_stream(server: ServeProcess, max_tokens: int) -> Iterator[Iterator[str]]:
    """A stream that has delivered its first tokens; the rest of its lines."""
    body = {"model": "tiny", "prompt": "a", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60.0) as response:
        lines = (line for line in response.iter_lines() if line)
        assert next(lines).startswith("data: {")
        yield lines


def wait_told(server: ServeProcess) -> None:
    """Returns once the command has said that it serves: from then on it does nothing but wait for its end."""
    deadline = time.monotonic() + 30.0
    while "press Ctrl-C to end it" not in server.output:
        assert time.monotonic() < deadline, server.output
        time.sleep(0.05)


def probe(server: ServeProcess) -> httpx.Response:
    """A new request, while the cluster is ending: refused as soon as every gateway knows of it."""
    deadline = time.monotonic() + 10.0
    while True:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30.0)
        if answer.status_code != 200 or time.monotonic() > deadline:
            return answer


def assert_new_ones_are_refused(server: ServeProcess) -> None:
    refused = probe(server)
    health = httpx.get(f"{server.url}/health", timeout=30.0)
    with grpc.insecure_channel(server.grpc_address) as channel, pytest.raises(grpc.RpcError) as broken:
        open_stub(channel).Generate(inf.GenerateRequest(prompt="a", max_tokens=1), timeout=30.0)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert int(refused.headers["retry-after"]) >= 1
    assert (health.status_code, health.json()["status"]) == (503, "draining")
    assert broken.value.code() is grpc.StatusCode.UNAVAILABLE


def assert_whole(rest: list[str]) -> None:
    assert rest[-1] == "data: [DONE]"
    assert sum(len(json.loads(line[6:])["choices"]) for line in rest[:-1]) > 200


def test_a_signal_lets_what_is_open_finish_and_refuses_what_is_new_and_a_second_one_ends_what_is_still_open() -> None:
    with ServeProcess("--model", "tiny", "--set", f"gateway.drain_s={DRAIN_S}") as server:
        roles = noted(role["pid"] for role in server.roles())
        wait_told(server)
        with begun_stream(server, 8000) as long, begun_stream(server, 1200) as lines:
            server.process.send_signal(signal.SIGINT)
            assert_new_ones_are_refused(server)
            shared = shared_files(server.pids(""))
            assert_whole(list(lines))
            begun = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            last = list(long)[-1]
        code = server.process.wait(DRAIN_S)
        seconds = time.monotonic() - begun

    assert last.startswith('data: {"error"')
    assert code == 0
    assert seconds < DRAIN_S / 2
    assert still_alive(roles) == []
    assert [file for file in shared if os.path.exists(file)] == []


def test_one_signal_is_enough_when_what_is_open_has_finished() -> None:
    with ServeProcess("--model", "tiny", "--set", f"gateway.drain_s={DRAIN_S}") as server:
        roles = noted(role["pid"] for role in server.roles())
        wait_told(server)
        with begun_stream(server, 1200) as lines:
            server.process.send_signal(signal.SIGTERM)
            assert_new_ones_are_refused(server)
            shared = shared_files(server.pids(""))
            rest = list(lines)
        ended = time.monotonic()
        code = server.process.wait(DRAIN_S)
        seconds = time.monotonic() - ended

    assert_whole(rest)
    assert code == 0
    assert seconds < DRAIN_S / 2
    assert still_alive(roles) == []
    assert [file for file in shared if os.path.exists(file)] == []
