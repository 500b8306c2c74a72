"""The scheduler's process around its core, with its links left out: who is told, asked and forgotten."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from alignedserve.config import Config
from alignedserve.config_sources import to_tree
from alignedserve.control.runtime import RoleSettings
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.request import RequestKey
from alignedserve.scheduler import events as ev
from alignedserve.scheduler.actor import SchedulerServer
from alignedserve.scheduler.core import SchedulerCore


class Sent:
    """Stands in for the links to workers and the pool."""

    def __init__(self) -> None:
        self.commands: list[Any] = []

    def send_pool(self, command: Any) -> None:
        self.commands.append(command)

    def send_all(self, role: str, command: Any) -> None:
        self.commands.append(command)

    def send(self, role: str, instance_id: str, command: Any) -> None:
        self.commands.append(command)

    def first(self, role: str) -> None:
        return None


@pytest.fixture
async def server() -> SchedulerServer:
    server = SchedulerServer(RoleSettings("scheduler", "scheduler-0", to_tree(Config()), "cell", "token"))
    server._core = SchedulerCore(server.config, 16)
    server._succession.over = True
    server._links = server._outgoing._links = Sent()  # type: ignore[assignment]
    return server


def submitted_again(name: str) -> pb.RequestSpec:
    key = pb.RequestKey(request_id=name, epoch=1)
    spec = pb.RequestSpec(key=key, prompt_token_ids=[1] * 10, output_token_ids=[2], gateway_id="gateway-0")
    spec.group_size = 1
    spec.group_id = name
    spec.sampling.max_tokens = 100
    return spec


async def test_a_cancel_that_was_lost_with_the_stream_reaches_what_waits_for_the_pool(server: SchedulerServer) -> None:
    spec = submitted_again("a")
    server._submit([spec])
    assert len(server._adoption) == 1
    server._greet("gateway-0", [])
    assert len(server._adoption) == 0
    server._on_adopted("kv_pool-0", kp.Holding(key=spec.key))
    assert not server._knows(RequestKey("a", 1))


async def test_what_a_gateway_names_waits_on(server: SchedulerServer) -> None:
    spec = submitted_again("a")
    server._submit([spec])
    server._greet("gateway-0", [RequestKey("a", 1)])
    server._on_adopted("kv_pool-0", kp.Holding(key=spec.key))
    assert server._knows(RequestKey("a", 1))


async def test_kv_beyond_what_was_delivered_is_no_base(server: SchedulerServer) -> None:
    spec = submitted_again("a")
    server._submit([spec])
    server._on_adopted("kv_pool-0", kp.Holding(key=spec.key, kv_tokens=40, block_ids=[1, 2, 3], blocks=3))
    assert server._knows(RequestKey("a", 1))
    assert not server._adoption.bases
    assert not server._files.stored


async def test_a_scheduler_that_has_failed_acts_no_more(
    server: SchedulerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(event: ev.Event, now_s: float) -> list[Any]:
        raise AssertionError("half changed")

    core: Any = SimpleNamespace(handle=broken)
    monkeypatch.setattr(server, "_core", core)
    server._feed(ev.Tick())
    assert server.state == "failed"
    core.handle = lambda event, now_s: pytest.fail("it was asked again")
    server._feed(ev.Tick())


async def test_an_action_that_cannot_be_carried_out_is_a_failure(
    server: SchedulerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(action: Any) -> None:
        raise KeyError("no file of it")

    spec = submitted_again("a")
    spec.key.epoch = 0
    server._submit([spec])
    monkeypatch.setattr(server._outgoing, "carry_out", fails)
    server._cancel([RequestKey("a")])  # what is queued is rejected, and forgotten
    assert server.state == "failed"
