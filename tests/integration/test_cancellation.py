"""A request that is given up, wherever it is: one second later it holds nothing anywhere."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from alignedserve.cluster.local import LocalCluster
from alignedserve.config_sources import from_tree
from alignedserve.control.rpc import TokenChannel, open_channel
from alignedserve.control.samples import value
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import decode_worker_pb2_grpc as dw_grpc
from alignedserve.proto import scheduler_pb2_grpc as sc_grpc
from support.callers import Callers
from support.cpu_waits import CpuWaits
from support.faulty_roles import FOLDER
from support.gateway_process import GatewayProcess
from support.haproxy_front import HaProxyFront

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

RELEASED_WITHIN_S = 1.0
NEW_TOKENS = 1000
LONG_BLOCKS = 36  # within max_batch_blocks
BEGINNING = [10 + 7 * number % 390 for number in range(64)]


@dataclass
class Watched:
    """A cluster, and where requests are in it."""

    cluster: LocalCluster
    front: HaProxyFront
    callers: Callers
    scheduler: TokenChannel
    decode: TokenChannel
    said: str
    orders: Path

    async def counts(self) -> dict[str, int]:
        """Requests by state, as HAProxy, the scheduler and the decode instance say now."""
        scheduler = await sc_grpc.SchedulerStub(self.scheduler).Describe(pb.Empty())
        names = ["queued", "prefilling", "waiting_in_pool", "prefetched", "decoding"]
        counts = {"in HAProxy": await self.front.held()}
        counts |= {name: int(getattr(scheduler, name)) for name in names}
        decode = await dw_grpc.DecodeWorkerStub(self.decode).Describe(pb.Empty())
        names = ["running", "cache_free_blocks", "batch_buffer_requests", "requests_buffer_requests"]
        return counts | {name: int(getattr(decode, name)) for name in names}

    async def wait_until(self, condition: Callable[[dict[str, int]], bool], timeout_s: float = 20.0) -> bool:
        """True. Raises TimeoutError with the counts."""
        deadline = time.monotonic() + timeout_s
        while not condition(counts := await self.counts()):
            if time.monotonic() > deadline:
                raise TimeoutError(str(counts))
            await asyncio.sleep(0.005)
        return True

    async def held(self) -> dict[str, float]:
        """The numbers of owned blocks and open requests that are still held."""
        metrics = (await self.cluster.status()).metrics
        assert value(metrics, "alignedserve_kv_capacity_blocks") > 0
        owned = {"owned": value(metrics, "alignedserve_kv_blocks", state="owned")}
        open_requests = {"open": value(metrics, "alignedserve_gateway_open_requests")}
        counts = (await self.counts()) | owned | open_requests
        return {name: count for name, count in counts.items() if count and name != "cache_free_blocks"}

    async def assert_released(self, since_s: float) -> None:
        """Within a second, what processes wait for a CPU not counted; what is asked then is answered as at first."""
        waits = CpuWaits([*self.cluster.pids.values(), os.getpid()])
        while held := await self.held():
            assert time.monotonic() - since_s - waits.total_s() < RELEASED_WITHIN_S, held
            await asyncio.sleep(0.02)
        assert await self.callers.ask() == self.said


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watched(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Watched]:
    orders = tmp_path_factory.mktemp("orders")
    config = from_tree(
        {
            "cluster": {"device": "cpu", "threads": 1},
            "kv_pool": {"size_gib": 0.1},
            "prefill": {"token_budget": 64, "queue_tokens": 2048},
            "decode": {"cache_blocks": 150},  # evictions go to the candidate requests buffer
            "scheduler": {"min_batch_requests": 2, "max_batch_blocks": 40, "join_window": 1.0},
            "supervisor": {"heartbeat_s": 0.1, "stall_after_s": 60.0},  # passes are held
        }
    )
    environment = {FOLDER: str(orders)}
    async with LocalCluster(config, environment=environment, module="support.faulty_roles") as cluster:
        await cluster.wait_ready()
        async with (
            GatewayProcess(cluster, "gateway-0") as first,
            GatewayProcess(cluster, "gateway-1") as second,
            HaProxyFront([first.url], [first.grpc_address]) as front,
            Callers(front.url, front.grpc_address, second.url, second.grpc_address, h2c=True) as callers,
        ):
            channels = [open_channel(cluster.address(role), cluster.token) for role in ("scheduler-0", "decode-0")]
            scheduler, decode = channels
            yield Watched(cluster, front, callers, scheduler, decode, await callers.ask(), orders)
            for channel in channels:
                await channel.close()


def prompts(count: int, tokens: int, seed: int = 1) -> list[list[int]]:
    """Every second one begins like those of all seeds."""
    draw = random.Random(seed)
    drawn = [[draw.randrange(10, 400) for _ in range(tokens + draw.randrange(8))] for _ in range(count)]
    for prompt in drawn[1::2]:
        same = min(len(prompt) - 1, len(BEGINNING))
        prompt[:same] = BEGINNING[:same]
    return drawn


@dataclass(frozen=True)
class Stage:
    """How requests come to a stage of their way, and stay there."""

    reached: Callable[[dict[str, int]], bool]
    requests: int
    tokens: int  # of each prompt
    order: str = "slow-decode"  # to passes


STAGES = {
    "sending": Stage(lambda counts: counts["in HAProxy"] == 8, 8, 1000, order=""),
    "queue": Stage(lambda counts: counts["queued"] > 2 and counts["in HAProxy"] == 20, 20, 1000, order="hang-prefill"),
    "prefill": Stage(
        lambda counts: counts["prefilling"] > 0 and counts["decoding"] == 0, 18, 1200, order="hang-prefill"
    ),
    "pool": Stage(lambda counts: counts["waiting_in_pool"] > 2 and counts["in HAProxy"] == 66, 48, 44),
    "batch buffer": Stage(lambda counts: counts["batch_buffer_requests"] > 0, 48, 44),
    "requests buffer": Stage(lambda counts: counts["requests_buffer_requests"] > 0, 48, 44),
    "decode": Stage(lambda counts: counts["running"] > 0 and counts["in HAProxy"] == 66, 48, 44),
}


@pytest.mark.parametrize("stage", STAGES)
async def test_given_up_in_each_stage(watched: Watched, stage: str) -> None:
    where, callers = STAGES[stage], watched.callers
    ways = callers.ways_while_sending if stage == "sending" else callers.ways
    assert where.requests >= len(ways)
    leave, order = asyncio.Event(), watched.orders / where.order

    def call(prompts: list[list[int]]) -> list[asyncio.Future[str]]:
        return [
            asyncio.ensure_future(ways[number % len(ways)](prompt, NEW_TOKENS, leave))
            for number, prompt in enumerate(prompts)
        ]

    calls: list[asyncio.Future[str]] = []
    try:
        if where.order == "hang-prefill":
            order.touch()
        calls += call(prompts(where.requests, where.tokens))
        if where.order == "slow-decode":
            # The next batch waits in its buffer: it does not match the running requests, nor is there room for it.
            await watched.wait_until(lambda counts: counts["running"] > 0 and counts["cache_free_blocks"] < LONG_BLOCKS)
            order.touch()
            calls += call([*prompts(10, where.tokens, seed=2), *prompts(8, LONG_BLOCKS * 16)])
        await watched.wait_until(where.reached)
    finally:
        if where.order:
            order.unlink(missing_ok=True)
        leave.set()
        outcomes = await asyncio.gather(*calls)
    await watched.assert_released(time.monotonic())
    assert set(outcomes) == ({"left"} if stage == "sending" else {"left", "cancelled"})


async def test_a_limit_of_ones_own_ends_it_wherever_it_is(watched: Watched) -> None:
    calls: list[Any] = [
        watched.callers.time_out(prompt, NEW_TOKENS, 0.2 + 0.02 * number)
        for number, prompt in enumerate([*prompts(20, 30), *prompts(10, 1000)])
    ]
    outcomes = await asyncio.gather(*calls)
    await watched.assert_released(time.monotonic())
    assert set(outcomes) == {"deadline_exceeded"}


async def test_given_up_at_the_last_token(watched: Watched) -> None:
    """Cancelled as the last tokens come: it ends in one way or the other, and holds nothing."""
    outcomes = []
    for number, prompt in enumerate(prompts(30, 20)):
        way = watched.callers.ways[number % len(watched.callers.ways)]
        leave = asyncio.Event()
        call = asyncio.ensure_future(way(prompt, 2 + number % 3, leave))
        await watched.wait_until(lambda counts: counts["decoding"] > 0 or call.done())  # noqa: B023  # awaited here
        leave.set()
        outcomes.append(await call)
    await watched.assert_released(time.monotonic())
    assert set(outcomes) <= {"left", "cancelled", "ended"}
    assert len(set(outcomes)) > 1
