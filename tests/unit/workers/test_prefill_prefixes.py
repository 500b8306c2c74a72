"""Which prompts wait for which, when several begin alike: a prefix is computed once, by the first that is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from alignedserve.control.convert import key_to_proto
from alignedserve.control.prefixes import prefix_tokens
from alignedserve.control.rpc import RpcServer
from alignedserve.prefill_worker.jobs import Base
from alignedserve.prefill_worker.loans import Loans
from alignedserve.prefill_worker.prefixes import LEAST_SHARED_BLOCKS, Prefixes
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.proto import kv_pool_pb2_grpc as kp_grpc
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.request import RequestKey

SIZE = 4
SYSTEM = list(range(LEAST_SHARED_BLOCKS * SIZE))


class Shard:
    """A writer's side of a shard that caches what a test says."""

    weights = ""

    def __init__(self) -> None:
        self.cached = 0  # blocks of SYSTEM
        self.pins: set[RequestKey] = set()

    async def pin(self, key: RequestKey, prefix: kp.CachedPrefix) -> kp.Holding:
        await asyncio.sleep(0)
        blocks = min(self.cached, (len(prefix_tokens(prefix)) - 1) // SIZE)
        self.pins.add(key)
        ids = range(blocks)
        return kp.Holding(key=key_to_proto(key), kv_tokens=blocks * SIZE, block_ids=ids, checksums=ids)

    def release(self, keys: Iterable[RequestKey]) -> None:
        self.pins -= set(keys)

    def unpin(self, key: RequestKey, kv_tokens: int) -> None:
        self.pins.discard(key)


class Instance:
    def __init__(self) -> None:
        self.shard = Shard()
        writer: Any = self.shard
        self.loans = Loans("secret")
        self.prefixes = Prefixes(writer, "kv_pool-0", SIZE, self.loans)
        self.finding: dict[str, asyncio.Task[Base | None]] = {}

    async def come(self, name: str, rank: int = 0) -> None:
        own = [1000 + ord(name)] * (1 + 2 * SIZE)
        found = self.prefixes.find(RequestKey(name), SYSTEM + own, b"", rank=rank)
        self.finding[name] = asyncio.get_running_loop().create_task(found)
        await rest()

    async def end(self, *names: str, cached: bool = False) -> None:
        if cached:
            self.shard.cached = LEAST_SHARED_BLOCKS
        self.prefixes.ended([RequestKey(name) for name in names])
        await rest()

    @property
    def computed(self) -> str:
        """The prompts that do not wait."""
        return "".join(name for name, task in self.finding.items() if task.done())


class Lender(kp_grpc.PrefixCacheServicer):
    """The shard of another node, which has three more blocks from its disk each time that it is asked."""

    def __init__(self, reads: int) -> None:
        self.asked, self.reads = 0, reads
        self.silent_from, self.pins_meanwhile = reads + 1, set[RequestKey]()
        self.instance: Instance | None = None
        self.came = asyncio.Event()
        self.wait: asyncio.Event | None = None  # for this, before the first answer
        self.has = True
        self.lent_often, self.given_back = asyncio.Event(), asyncio.Event()

    async def Lend(self, request: kp.Pin, context: grpc.aio.ServicerContext[Any, Any]) -> kp.Holding:
        self.asked += 1
        self.came.set()
        if self.asked == 3:
            self.lent_often.set()
        if self.instance is not None:
            self.pins_meanwhile |= self.instance.shard.pins
        if self.wait is not None:
            await self.wait.wait()
        if self.asked >= self.silent_from:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the answer is lost")
        ids, ready_s = range(3 * min(self.asked, 3) * self.has), 0.01 if self.asked < self.reads else 0.0
        return kp.Holding(key=request.key, kv_tokens=len(ids) * SIZE, block_ids=ids, checksums=ids, ready_s=ready_s)

    async def TakeBack(self, request: pb.RequestKey, context: grpc.aio.ServicerContext[Any, Any]) -> pb.Empty:
        assert request.request_id == "a"
        if self.wait is None or self.wait.is_set():  # what comes before the loan ends nothing
            self.given_back.set()
        return pb.Empty()


@asynccontextmanager
async def lent(reads: int) -> AsyncIterator[tuple[Instance, Lender]]:
    instance, lender, server = Instance(), Lender(reads), RpcServer("secret")
    server.add(kp_grpc.add_PrefixCacheServicer_to_server, lender)
    view = sv.ClusterView()
    view.peers.add(process=pb.ProcessKey(role="kv_pool", id="kv_pool-1"), address=await server.start())
    await instance.loans.on_view(view)
    yield instance, lender
    await instance.loans.close()
    await server.stop()


async def test_a_loan_waits_for_what_its_shard_reads_from_disk() -> None:
    async with lent(reads=3) as (instance, lender):
        base = await instance.prefixes.find(RequestKey("a"), list(range(50)), b"", copy_from="kv_pool-1")
        assert base is not None
        assert (base.pool_id, base.tokens, lender.asked) == ("kv_pool-1", 9 * SIZE, 3)
        instance.prefixes.ended([RequestKey("a")])
        await asyncio.wait_for(lender.given_back.wait(), 10)


@pytest.mark.parametrize("silent_from", [1, 2])
async def test_a_loan_whose_answer_is_lost_is_given_back_at_once(silent_from: int) -> None:
    async with lent(reads=3) as (instance, lender):
        lender.silent_from = silent_from
        assert await instance.prefixes.find(RequestKey("a"), list(range(50)), b"", copy_from="kv_pool-1") is None
        await asyncio.wait_for(lender.given_back.wait(), 10)
        instance.prefixes.ended([RequestKey("a")])


@pytest.mark.parametrize("has", [False, True])
async def test_a_prompt_that_is_cancelled_while_a_loan_is_asked_for_gives_it_back(has: bool) -> None:
    async with lent(reads=1) as (instance, lender):
        lender.wait, lender.has = asyncio.Event(), has
        found = instance.prefixes.find(RequestKey("a"), list(range(50)), b"", copy_from="kv_pool-1")
        waiting = asyncio.get_running_loop().create_task(found)
        await asyncio.wait_for(lender.came.wait(), 10)
        instance.prefixes.ended([RequestKey("a")])
        await asyncio.sleep(0.1)  # so that what is sent now comes before the loan
        lender.wait.set()
        assert await waiting is None
        if has:
            await asyncio.wait_for(lender.given_back.wait(), 10)
    assert not instance.loans._lent


@pytest.mark.parametrize("silent", [False, True])
async def test_a_prompt_that_waits_for_a_loan_holds_nothing(silent: bool) -> None:
    async with lent(reads=3) as (instance, lender):
        instance.shard.cached, lender.instance = 1, instance
        lender.silent_from = 2 if silent else 4
        prompt = [*SYSTEM, *range(900, 950)]
        base = await instance.prefixes.find(RequestKey("a"), prompt, b"", copy_from="kv_pool-1")
        assert base is not None
        assert (base.here, base.tokens) == (silent, (1 if silent else 9) * SIZE)
        assert not lender.pins_meanwhile
        assert instance.shard.pins == ({RequestKey("a")} if silent else set())
        assert not any(instance.prefixes.hit_tokens.values()), "nothing has been computed from it yet"
        instance.prefixes.reused(base)
        assert instance.prefixes.hit_tokens["host" if silent else "other node"] == base.tokens
        instance.prefixes.ended([RequestKey("a")])


async def test_a_prompt_that_is_cancelled_during_a_loan_gives_it_back() -> None:
    async with lent(reads=10_000) as (instance, lender):
        found = instance.prefixes.find(RequestKey("a"), list(range(50)), b"", copy_from="kv_pool-1")
        waiting = asyncio.get_running_loop().create_task(found)
        await asyncio.wait_for(lender.lent_often.wait(), 10)
        instance.prefixes.ended([RequestKey("a")])
        lender.reads = 0
        assert await waiting is None
        instance.prefixes.ended([RequestKey("a")])
        await asyncio.wait_for(lender.given_back.wait(), 10)
    assert not instance.shard.pins


async def rest() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_prefix_is_computed_once_for_all_that_come_meanwhile() -> None:
    instance = Instance()
    for name in "abc":
        await instance.come(name)
    assert instance.computed == "a"
    await instance.end("a", cached=True)
    assert instance.computed == "abc"
    found = instance.finding["c"].result()
    assert found is not None
    assert found.tokens == len(SYSTEM)
    assert instance.prefixes.waited == 2
    await instance.end("b", "c")
    assert not instance.shard.pins


@pytest.mark.parametrize(("block_size", "least_blocks"), [(4, 8), (16, 8), (64, 2), (1024, 1)])
async def test_a_prompt_waits_for_eight_blocks_or_for_128_tokens(block_size: int, least_blocks: int) -> None:
    shard: Any = Shard()
    prefixes = Prefixes(shard, "kv_pool-0", block_size, Loans(""))
    shared = list(range(least_blocks * block_size))
    await prefixes.find(RequestKey("a"), [*shared, 1, 2], b"")
    waits = asyncio.create_task(prefixes.find(RequestKey("b"), [*shared, 3, 4], b""))
    other = asyncio.create_task(prefixes.find(RequestKey("c"), [*shared[:-block_size], *[5] * (block_size + 1)], b""))
    await rest()
    assert (waits.done(), other.done()) == (False, True)
    prefixes.ended(map(RequestKey, "abc"))
    await waits


async def test_if_the_first_ends_without_its_prefix_only_the_next_computes_it() -> None:
    instance = Instance()
    for name in "abcd":
        await instance.come(name)
    await instance.end("a")  # its client has left, or its copy has failed
    assert instance.computed == "ab"
    await instance.come("e")
    await instance.end("b")
    assert instance.computed == "abc"
    await instance.end("c", cached=True)
    assert instance.computed == "abcde"
    await instance.end("d", "e")
    assert not instance.shard.pins


async def test_no_prompt_waits_for_one_that_goes_behind_it() -> None:
    """A line of a batch is computed with what others leave: who waited for it would have its priority."""
    instance = Instance()
    await instance.come("a", rank=8)
    await instance.come("b", rank=0)
    assert instance.computed == "ab"
    await instance.come("c", rank=0)
    await instance.come("d", rank=8)
    assert instance.computed == "ab"  # both wait for b
    await instance.end("b", cached=True)
    assert instance.computed == "abcd"


async def test_a_prompt_that_is_cancelled_while_it_waits_makes_no_other_wait() -> None:
    instance = Instance()
    for name in "ab":
        await instance.come(name)
    same = instance.prefixes.find(RequestKey("c"), SYSTEM + [1000 + ord("b")] * (1 + 2 * SIZE), b"")
    waiting = asyncio.get_running_loop().create_task(same)  # for b, which it is equal to
    await rest()
    await instance.end("b")
    assert instance.computed == "ab"
    assert instance.finding["b"].result() is None
    await instance.end("b")  # as after each `find`
    assert not waiting.done()  # it waits for a now
    await instance.end("a", cached=True)
    assert (await waiting) is not None
    assert instance.shard.pins == {RequestKey("c")}


async def test_a_shard_is_told_which_of_its_blocks_is_spoiled(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = Instance()
    told: list[tuple[str, list[int], bytes]] = []

    def forget(pool_id: str, prefix: kp.CachedPrefix) -> None:
        told.append((pool_id, list(prefix_tokens(prefix)), prefix.salt))

    monkeypatch.setattr(instance.loans, "forget", forget)
    instance.shard.cached = LEAST_SHARED_BLOCKS
    await instance.come("a")
    base = instance.finding["a"].result()
    assert base is not None
    instance.prefixes.spoiled(RequestKey("a"), base.after(2), 1)  # two blocks were in the instance already
    assert told == [("kv_pool-0", SYSTEM[: 4 * SIZE], b"")]
    await instance.end("a")
    instance.prefixes.spoiled(RequestKey("a"), base, 0)
    assert len(told) == 1
