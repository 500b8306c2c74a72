"""The scheduler's process around its core, without links: its messages, queries and dropped state."""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import AsyncIterator, Iterator
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
from google.protobuf.message import Message

from alignedserve.config import Config, SchedulerConfig
from alignedserve.config_sources import to_tree
from alignedserve.control.runtime import RoleSettings
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import decode_worker_pb2 as dw
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.proto import scheduler_pb2 as sc
from alignedserve.request import RequestKey
from alignedserve.scheduler.core import actions as act
from alignedserve.scheduler.core import events as ev
from alignedserve.scheduler.core.scheduler_core import SchedulerCore
from alignedserve.scheduler.process.actor import SchedulerServer
from alignedserve.scheduler.process.pool_audit import SETTLE_S


class Sent:
    """Stands in for the links to workers and the pool."""

    def __init__(self) -> None:
        self.commands: list[Any] = []
        self.shards: list[str] = []  # that are up
        self.to_pools: list[tuple[str, kp.PoolCommand]] = []

    def send_pool(self, command: Any, pool_id: str = "") -> None:
        self.commands.append(command)
        self.to_pools.append((pool_id, command))

    def send_all(self, role: str, command: Any) -> None:
        self.commands.append(command)

    def send(self, role: str, instance_id: str, command: Any) -> None:
        self.commands.append(command)

    def up(self, role: str) -> list[str]:
        return self.shards


@pytest.fixture
async def server() -> SchedulerServer:
    server = SchedulerServer(RoleSettings("scheduler", "scheduler-0", to_tree(Config()), "cell", "token"))
    server._core = SchedulerCore(server.config, 16)
    server._succession.over = True
    server._links = server._outgoing._links = Sent()  # type: ignore[assignment]
    return server


def submitted_again(name: str) -> pb.RequestHead:
    key = pb.RequestKey(request_id=name, epoch=1)
    lengths = {"prompt_tokens": 10, "output_tokens": 1, "max_tokens": 100}
    return pb.RequestHead(key=key, gateway_id="gateway-0", group_id=name, group_size=1, **lengths)


async def test_a_cancel_that_was_lost_with_the_stream_reaches_what_waits_for_the_pool(server: SchedulerServer) -> None:
    head = submitted_again("a")
    server._submit([head], b"")
    assert len(server._adoption) == 1
    server._greet("gateway-0", [])
    assert len(server._adoption) == 0
    server._on_adopted("kv_pool-0", kp.Holding(key=head.key))
    assert not server._knows(RequestKey("a", 1))


async def test_what_a_gateway_names_waits_on(server: SchedulerServer) -> None:
    head = submitted_again("a")
    server._submit([head], b"")
    server._greet("gateway-0", [RequestKey("a", 1)])
    server._on_adopted("kv_pool-0", kp.Holding(key=head.key))
    assert server._knows(RequestKey("a", 1))


async def test_a_shard_that_comes_back_is_asked_what_it_holds_though_an_audit_has_ended_without_it(
    server: SchedulerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(seconds: float) -> list[str]:
        """Shards that are asked within this time."""
        monkeypatch.setattr("time.monotonic", lambda: began_s + seconds)
        sent.to_pools.clear()
        server._look_at_pool()
        return [pool_id for pool_id, command in sent.to_pools if command.HasField("take_inventory")]

    began_s, sent = time.monotonic(), server._links
    assert isinstance(sent, Sent)
    sent.shards = ["kv_pool-1"]
    server._on_lost("kv_pool", "kv_pool-0")
    assert told(SETTLE_S) == ["kv_pool-1"]
    server._on_pool_inventory("kv_pool-1", kp.Inventory())
    assert told(2 * SETTLE_S) == []
    sent.shards = ["kv_pool-0", "kv_pool-1"]
    server._meet("kv_pool", "kv_pool-0")
    assert told(3 * SETTLE_S) == ["kv_pool-0", "kv_pool-1"]


async def test_of_two_streams_of_a_gateway_the_one_that_was_heard_of_first_ends(server: SchedulerServer) -> None:
    async def requests() -> AsyncIterator[sc.GatewayMessage]:
        process = pb.ProcessKey(role="gateway", id="gateway-0", incarnation=1)
        yield sc.GatewayMessage(hello=sc.GatewayHello(process=process, address="127.0.0.1:1"))
        await asyncio.Event().wait()

    context: Any = None
    first, second = (server.Link(requests(), context) for _ in range(2))
    assert (await anext(first)).HasField("capacity")
    assert (await anext(second)).HasField("capacity")
    async with asyncio.timeout(5.0):
        assert [message.WhichOneof("body") async for message in first][1:] == []
    assert list(server._outgoing.gateways) == ["gateway-0"]
    await second.aclose()  # type: ignore[attr-defined]
    assert not server._outgoing.gateways


async def test_kv_beyond_what_was_delivered_is_no_base(server: SchedulerServer) -> None:
    head = submitted_again("a")
    server._submit([head], b"")
    server._on_adopted("kv_pool-0", kp.Holding(key=head.key, kv_tokens=40, block_ids=[1, 2, 3], blocks=3))
    assert server._knows(RequestKey("a", 1))
    assert not server._adoption.bases


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

    head = submitted_again("a")
    head.key.epoch = 0
    server._submit([head], b"")
    monkeypatch.setattr(server._outgoing, "carry_out", fails)
    server._cancel([RequestKey("a")])  # queued requests are refused and forgotten
    assert server.state == "failed"


@pytest.fixture
async def two_shards(server: SchedulerServer) -> SchedulerServer:
    server._links.shards = ["k0", "k1"]  # type: ignore[attr-defined]
    server._follow_shards(ev.ShardsChanged(("k0", "k1")))
    return server


def to_pools(server: SchedulerServer, kind: str) -> list[tuple[str, Any]]:
    sent: Any = server._links
    return [(name, getattr(command, kind)) for name, command in sent.to_pools if command.WhichOneof("body") == kind]


def part(head: pb.RequestHead, tokens: int) -> kp.Holding:
    blocks = range(-(-tokens // 16))
    return kp.Holding(key=head.key, kv_tokens=tokens, block_ids=blocks, blocks=len(blocks))


async def test_all_shards_are_asked_and_the_longest_answer_is_the_base(two_shards: SchedulerServer) -> None:
    head = submitted_again("a")
    two_shards._submit([head], b"")
    assert [name for name, _ in to_pools(two_shards, "adopt")] == [""]
    two_shards._on_adopted("k0", part(head, 5))
    assert not two_shards._core.is_open(RequestKey("a", 1))  # type: ignore[union-attr]
    two_shards._on_adopted("k1", part(head, 8))
    assert two_shards._core.is_open(RequestKey("a", 1))  # type: ignore[union-attr]
    assert two_shards._adoption.bases[RequestKey("a", 1)].pool_id == "k1"
    ((pool_id, drop),) = to_pools(two_shards, "drop")
    assert (pool_id, [held.kv_tokens for held in drop.holdings]) == ("k0", [5])


async def test_a_shard_that_is_named_no_more_is_not_waited_for(two_shards: SchedulerServer) -> None:
    head = submitted_again("a")
    two_shards._submit([head], b"")
    two_shards._on_adopted("k0", part(head, 5))
    two_shards._links.shards = ["k0"]  # type: ignore[attr-defined]
    two_shards._follow_shards(ev.ShardsChanged(("k0",)))
    assert two_shards._core.is_open(RequestKey("a", 1))  # type: ignore[union-attr]


async def test_what_a_shard_says_that_was_not_waited_for_is_dropped_there(two_shards: SchedulerServer) -> None:
    head = submitted_again("a")
    two_shards._links.shards = ["k0"]  # type: ignore[attr-defined]
    two_shards._submit([head], b"")
    two_shards._on_adopted("k0", part(head, 10))  # all of it
    assert two_shards._core.is_open(RequestKey("a", 1))  # type: ignore[union-attr]
    two_shards._on_adopted("k1", part(head, 4))
    ((pool_id, drop),) = to_pools(two_shards, "drop")
    assert (pool_id, [held.kv_tokens for held in drop.holdings]) == ("k1", [4])
    two_shards._on_adopted("k0", part(head, 10))  # asked twice
    assert len(to_pools(two_shards, "drop")) == 1


def reachable(root: object) -> Iterator[object]:
    """Everything that `root` keeps alive, except modules, classes and functions."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, type | ModuleType | FunctionType):
            continue
        seen.add(id(found))
        yield found
        waiting.extend(gc.get_referents(found))


async def test_no_message_of_a_request_is_kept_but_its_key_and_lengths(server: SchedulerServer) -> None:
    for number in range(200):
        head = submitted_again(f"request-{number}")
        head.key.epoch = number % 2
        submission = sc.Submission(requests=[head], specs=b"its prompt")
        server._on_gateway_message("gateway-0", sc.GatewayMessage(submit=submission))
        if head.key.epoch:
            whole = kp.Holding(key=head.key, kv_tokens=10, block_ids=[number], blocks=1, whole=True)
            server._on_adopted("kv_pool-0", whole)
    assert server._core is not None
    assert (len(server._core.of_gateway("gateway-0")), server._core.describe()["waiting_in_pool"]) == (200, 100)
    server._links = server._outgoing._links = Sent()  # type: ignore[assignment]  # what was sent is not kept
    kept = [message for message in reachable(server) if isinstance(message, Message)]
    assert {message.DESCRIPTOR.name for message in kept} <= {"ProcessKey"}
    ids = {RequestKey(f"request-{number}", number % 2) for number in range(200)}
    assert set(server._owners.of) == ids
    server._cancel(sorted(ids))
    assert not server._owners.of


async def test_what_is_whole_in_the_pool_is_prefetched_by_its_key_and_shard(two_shards: SchedulerServer) -> None:
    head = submitted_again("a")
    two_shards._submit([head], b"")
    two_shards._on_adopted("k0", part(head, 3))
    whole = part(head, 10)
    whole.whole = True
    two_shards._on_adopted("k1", whole)
    key = RequestKey("a", 1)
    assert not two_shards._adoption.bases
    two_shards._outgoing.carry_out(act.Prefetch("d0", "p0", ev.BufferKind.BATCH, 3, (key,)))
    sent: Any = two_shards._links
    prefetch = sent.commands[-1].prefetch
    assert (prefetch.decode_id, prefetch.batch_id) == ("d0", 3)
    (request,) = prefetch.requests
    assert (request.key, request.pool_id, request.kv_tokens) == (head.key, "k1", 10)


def begin_instances(server: SchedulerServer) -> None:
    for role, name in ("prefill", "p0"), ("decode", "d0"), ("kv_pool", "kv_pool-0"):
        server._feed(ev.InstanceJoined(role, name))
    server._feed(ev.PrefillReported("p0", 0, 1000, 100, 100, 100, 100))
    server._feed(ev.PairsChanged((("d0", ("p0",)),)))
    server._feed(ev.PoolReported("kv_pool-0", 10_000, 10_000))
    server._feed(ev.DecodeReported("d0", 10_000, 10_000, 0, 0, 0, 0, 0, 0))


@pytest.mark.parametrize(("policy", "objective_s"), [("aligned-cost", 3.0), ("aligned", math.inf)])
async def test_a_decode_instance_is_first_told_when_requests_without_an_objective_are_overdue(
    policy: str, objective_s: float
) -> None:
    config = Config(scheduler=SchedulerConfig(policy=policy, starvation_after_s=3.0))
    server = SchedulerServer(RoleSettings("scheduler", "scheduler-0", to_tree(config), "cell", "token"))
    server._core = SchedulerCore(server.config, 16)
    server._links = server._outgoing._links = Sent()  # type: ignore[assignment]
    for _ in range(2):
        server._on_report("decode", "d0", dw.DecodeReport(description=dw.DecodeDescription(cache_blocks=9)))
    sent: Any = server._links
    assert sent.commands == [dw.DecodeCommand(default_objective_s=objective_s)]


def new_request(name: str, tokens: int = 10) -> pb.RequestHead:
    head = submitted_again(name)
    head.key.epoch, head.output_tokens, head.prompt_tokens = 0, 0, tokens
    return head


async def test_a_prompt_is_forwarded_only_if_its_prefill_begins_at_once(server: SchedulerServer) -> None:
    begin_instances(server)
    sent: Any = server._links
    for name in ("a", "b"):
        submission = sc.Submission(requests=[new_request(name, 9000)], specs=name.encode())
        server._on_gateway_message("gateway-0", sc.GatewayMessage(submit=submission))
    begun = [command.prefill for command in sent.commands if command.WhichOneof("body") == "prefill"]
    assert [(group.keys[0].request_id, group.specs) for group in begun] == [("a", b"a")]
    server._on_finished([RequestKey("a")])
    begun = [command.prefill for command in sent.commands if command.WhichOneof("body") == "prefill"]
    assert [(group.keys[0].request_id, group.specs) for group in begun] == [("a", b"a"), ("b", b"")]


async def test_prompts_are_not_kept_while_the_scheduler_waits_for_inventories(server: SchedulerServer) -> None:
    server._succession.over = False
    message = sc.GatewayMessage(submit=sc.Submission(requests=[new_request("a")], specs=b"its prompt"))
    server._on_gateway_message("gateway-0", message)
    hello = sc.GatewayMessage(hello=sc.GatewayHello(address="127.0.0.1:1"))
    server._on_gateway_message("gateway-1", hello)
    (_, kept), other = server._succession._kept
    assert other == ("gateway-1", hello)
    assert (kept.submit.requests[0].key.request_id, kept.submit.specs) == ("a", b"")
    assert kept is not message  # whose memory holds the prompt
