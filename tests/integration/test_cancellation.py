"""A request that is given up, wherever it is: one second later it holds nothing anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
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
from support.gateway_process import GatewayProcess
from support.haproxy_front import HaProxyFront

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

RELEASED_WITHIN_S = 1.0
NEW_TOKENS = 1000
BEGINNING = [10 + 7 * number % 390 for number in range(64)]
SEEN_WITHIN_S, MOST_ATTEMPTS = 5.0, 8


@dataclass
class Watched:
    """A cluster, and where requests are in it."""

    cluster: LocalCluster
    front: HaProxyFront
    callers: Callers
    scheduler: TokenChannel
    decode: TokenChannel
    said: str

    async def counts(self) -> dict[str, int]:
        """Requests by state, as HAProxy, the scheduler and the decode instance say now."""
        scheduler = await sc_grpc.SchedulerStub(self.scheduler).Describe(pb.Empty())
        names = ("queued", "prefilling", "waiting_in_pool", "prefetched", "decoding")
        counts = {"in HAProxy": await self.front.held()}
        counts |= {name: int(getattr(scheduler, name)) for name in names}
        decode = await dw_grpc.DecodeWorkerStub(self.decode).Describe(pb.Empty())
        names = ("running", "batch_buffer_requests", "requests_buffer_requests")
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
        return {name: count for name, count in ((await self.counts()) | owned | open_requests).items() if count}

    async def assert_released(self, since_s: float) -> None:
        """Within a second, what processes wait for a CPU not counted; what is asked then is answered as at first."""
        waits = CpuWaits([*self.cluster.pids.values(), os.getpid()])
        while held := await self.held():
            assert time.monotonic() - since_s - waits.total_s() < RELEASED_WITHIN_S, held
            await asyncio.sleep(0.02)
        assert await self.callers.ask() == self.said


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watched() -> AsyncIterator[Watched]:
    config = from_tree(
        {
            "cluster": {"device": "cpu", "threads": 1},
            "kv_pool": {"size_gib": 0.1},
            "prefill": {"token_budget": 64, "queue_tokens": 2048},
            "decode": {"cache_blocks": 150},  # evictions go to the candidate requests buffer
            "scheduler": {"min_batch_requests": 2, "max_batch_blocks": 40, "join_window": 1.0},
            "supervisor": {"heartbeat_s": 0.1},
        }
    )
    async with LocalCluster(config) as cluster:
        await cluster.wait_ready()
        async with (
            GatewayProcess(cluster, "gateway-0") as first,
            GatewayProcess(cluster, "gateway-1") as second,
            HaProxyFront([first.url], [first.grpc_address]) as front,
            Callers(front.url, front.grpc_address, second.url, second.grpc_address, h2c=True) as callers,
        ):
            channels = [open_channel(cluster.address(role), cluster.token) for role in ("scheduler-0", "decode-0")]
            yield Watched(cluster, front, callers, *channels, await callers.ask())
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


STAGES: dict[str, tuple[Callable[[dict[str, int]], bool], int, int]] = {
    # what is seen of the stage, requests, tokens of each prompt
    "sending": (lambda counts: counts["in HAProxy"] == 8, 8, 1000),
    "queue": (lambda counts: counts["queued"] > 2 and counts["in HAProxy"] == 20, 20, 1000),
    "prefill": (lambda counts: counts["prefilling"] > 0 and counts["decoding"] == 0, 18, 1200),
    "pool": (lambda counts: counts["waiting_in_pool"] > 2 and counts["in HAProxy"] == 48, 40, 30),
    "batch buffer": (lambda counts: counts["batch_buffer_requests"] > 0, 40, 30),
    "requests buffer": (lambda counts: counts["requests_buffer_requests"] > 0, 40, 30),
    "decode": (lambda counts: counts["running"] > 0 and counts["in HAProxy"] == 18, 18, 30),
}


@pytest.mark.parametrize("stage", STAGES)
async def test_given_up_in_each_stage(watched: Watched, stage: str) -> None:
    reached, count, tokens = STAGES[stage]
    callers = watched.callers
    ways = callers.ways_while_sending if stage == "sending" else callers.ways
    assert count >= len(ways)
    # A batch that matches no running request waits in its buffer until the running batch leaves room, others wait in
    # the pool until the buffer is empty.
    others = prompts(8, 250) if stage in ("pool", "batch buffer") else []
    seen = False
    for attempt in range(MOST_ATTEMPTS):  # a stage may be over before it is looked at
        leave = asyncio.Event()
        calls = [
            asyncio.ensure_future(ways[number % len(ways)](prompt, NEW_TOKENS, leave))
            for number, prompt in enumerate([*prompts(count, tokens, seed=attempt + 1), *others])
        ]
        with contextlib.suppress(TimeoutError):
            seen = await watched.wait_until(reached, SEEN_WITHIN_S)
        leave.set()
        outcomes = await asyncio.gather(*calls)
        await watched.assert_released(time.monotonic())
        if seen:
            break
    assert seen, f"no request was seen in this stage in {MOST_ATTEMPTS} attempts"
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
