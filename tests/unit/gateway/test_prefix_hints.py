"""What the shards have of a prompt comes with its submission; a shard that fails or is slow costs only the hint."""

from __future__ import annotations

import asyncio
import time
from array import array
from typing import Any

import grpc
import pytest

from alignedserve.control.prefixes import prefix_tokens
from alignedserve.control.rpc import RpcServer
from alignedserve.gateway import prefix_hints
from alignedserve.gateway.body.planning import CacheUse, CallPlan, PromptPlan
from alignedserve.gateway.body.requests import ReplyOptions
from alignedserve.gateway.ledger.calls import Call, caller
from alignedserve.gateway.prefix_hints import LEAST_OF_SEVERAL, PrefixHints
from alignedserve.prefix_marks import LEAST_TOKENS, prefix_marks
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.proto import kv_pool_pb2_grpc as kp_grpc
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.request import RequestKey, SamplingParams
from alignedserve.scheduler.process.messaging import request_meta

TOKEN = "secret"
LONG = tuple(range(LEAST_TOKENS + 1))


class Shard(kp_grpc.KvPoolServicer):
    def __init__(self, tokens: int, delay_s: float = 0.0, ready_s: float = 0.0) -> None:
        self.tokens, self.delay_s, self.ready_s = tokens, delay_s, ready_s
        self.asked: list[tuple[int, bytes]] = []
        self.called = asyncio.Event()
        self.server = RpcServer(TOKEN)
        self.server.add(kp_grpc.add_KvPoolServicer_to_server, self)

    async def Match(self, request: kp.CachedPrefix, context: grpc.aio.ServicerContext[Any, Any]) -> kp.PrefixFound:
        self.asked.append((len(prefix_tokens(request)), request.salt))
        self.called.set()
        await asyncio.sleep(self.delay_s)
        return kp.PrefixFound(tokens=self.tokens, ready_s=self.ready_s)


def plan(*prompts: tuple[int, ...], cache: CacheUse | None = None) -> CallPlan:
    sampling = SamplingParams(max_tokens=4)
    made = tuple(PromptPlan(tokens, sampling) for tokens in prompts)
    return CallPlan("a", made, ReplyOptions(), internal_id="a", cache=cache)


async def started(*shards: Shard) -> tuple[PrefixHints, sv.ClusterView]:
    view = sv.ClusterView()
    for number, shard in enumerate(shards):
        address = await shard.server.start()
        view.peers.add(process=pb.ProcessKey(role="kv_pool", id=f"kv_pool-{number}"), address=address)
    hints = PrefixHints(TOKEN)
    await hints.follow(view)
    return hints, view


@pytest.fixture(autouse=True)
def _on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_hints, "ANSWER_WITHIN_S", 2.0)


async def test_what_each_shard_has_comes_with_the_head_of_the_request() -> None:
    shards = Shard(160), Shard(0), Shard(320, ready_s=0.25)
    hints, _ = await started(*shards)
    token = caller.set(b"key")
    try:
        found = await hints.add(plan(LONG, LONG[: LEAST_OF_SEVERAL - 1], cache=CacheUse(b"salt", by_key=True)))
        call = Call(found)
    finally:
        caller.reset(token)
    long, short = (answer.head("gw", 1).cached for answer in call.answers)
    assert [(one.pool_id, one.tokens, one.ready_s) for one in long] == [
        ("kv_pool-0", 160, 0.0), ("kv_pool-1", 0, 0.0), ("kv_pool-2", 320, 0.25)
    ]  # fmt: skip
    assert request_meta(RequestKey("a"), call.answers[0].head("gw", 1)).reads == (("kv_pool-2", 0.25),)
    assert not short, "a short prompt is not asked about"
    heads = [answer.head("gw", 1).prefix_marks for answer in call.answers]
    assert heads == [prefix_marks(array("I", LONG).tobytes(), b"key/salt"), b""]
    assert shards[1].asked == [(len(LONG), b"key/salt")]
    assert call.salt == b"key/salt"
    await hints.close()
    for shard in shards:
        await shard.server.stop()


@pytest.mark.parametrize(("shards", "asked"), [(1, False), (2, True)])
async def test_shards_are_asked_about_a_shorter_prompt_where_it_has_a_choice(shards: int, asked: bool) -> None:
    there = [Shard(96) for _ in range(shards)]
    hints, _ = await started(*there)
    (found,) = (await hints.add(plan(LONG[:LEAST_OF_SEVERAL], cache=CacheUse()))).prompts
    assert [bool(shard.asked) for shard in there] == [asked] * shards
    assert found.cached == tuple((f"kv_pool-{number}", 96) for number in range(shards) if asked)
    assert not found.marks
    await hints.close()
    for shard in there:
        await shard.server.stop()


async def test_without_a_cache_and_for_shards_that_fail_nothing_is_waited_for() -> None:
    slow, gone, quick = Shard(999, delay_s=30.0), Shard(1), Shard(32)
    hints, view = await started(slow, gone, quick)
    assert await hints.add(before := plan(LONG)) is before
    assert not quick.asked
    await gone.server.stop()
    began_s = time.monotonic()
    found = await hints.add(plan(LONG, cache=CacheUse()))
    assert time.monotonic() - began_s < slow.delay_s / 2
    assert found.prompts[0].cached == (("kv_pool-2", 32),)
    del view.peers[:]
    await hints.follow(view)
    assert (await hints.add(plan(LONG, cache=CacheUse()))).prompts[0].cached == ()
    await hints.close()
    for shard in slow, quick:
        await shard.server.stop()


async def test_a_shard_that_moves_while_it_is_asked_costs_only_the_hint() -> None:
    slow = Shard(999, delay_s=30.0)
    hints, view = await started(slow)

    def ask() -> asyncio.Task[CallPlan]:
        return asyncio.create_task(hints.add(plan(LONG, cache=CacheUse())))

    for steps in range(8):  # its channel is closed before, between and after the steps of the call
        asking = ask()
        for _ in range(steps):
            await asyncio.sleep(0)
        await hints.follow(sv.ClusterView())
        assert (await asking).prompts[0].cached == ()
        await hints.follow(view)
    slow.called.clear()
    asking = ask()
    await slow.called.wait()
    await hints.follow(sv.ClusterView())
    assert (await asking).prompts[0].cached == ()
    await hints.follow(view)
    slow.called.clear()
    asking = ask()
    await slow.called.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await hints.close()
    await slow.server.stop()
