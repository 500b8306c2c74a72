"""What people see of real processes: what waits by length, the running batch, a death, and the stages of a request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from alignedserve.cluster.local import LocalCluster
from alignedserve.config_sources import from_tree
from alignedserve.gateway.server import GatewayServer
from alignedserve.testing.models import VOCAB_SIZE, make_model
from alignedserve.testing.reference import random_prompts
from support.faulty_roles import FOLDER
from support.gateway import http_to, joined_gateway
from support.held import wait_nothing_held

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

LENGTHS = (12, 40, 90, 20, 33, 150, 8, 60, 25, 110, 16, 70)
NEW_TOKENS = 24
STAGES = ["queue", "prefill", "pool", "prefetch", "handover", "decode"]


@dataclass
class Seen:
    cluster: LocalCluster
    gateway: GatewayServer
    http: httpx.AsyncClient
    folder: Path

    async def ask(self, prompt: list[int]) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        answer = await self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200
        return dict(answer.json())

    async def until(self, right: Callable[[dict[str, Any]], object], timeout_s: float = 30.0) -> dict[str, Any]:
        """The first state of the feed that is right."""
        async with asyncio.timeout(timeout_s), self.http.stream("GET", "/dashboard/feed") as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and right(state := json.loads(line.removeprefix("data: "))):
                    return dict(state)
        raise AssertionError("the feed has ended")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seen(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Seen]:
    folder = tmp_path_factory.mktemp("live")
    config = from_tree(
        {
            "model": {"path": str(make_model("llama", folder / "m", seed=7))},
            "cluster": {"device": "cpu", "threads": 1},
            "kv_pool": {"size_gib": 0.1, "block_size": 4},
            "prefill": {"batch_buffer_blocks": 30, "requests_buffer_blocks": 30},  # so that some wait in the pool
            "decode": {"cache_blocks": 60},
            "scheduler": {"min_batch_requests": 2},
            "supervisor": {"heartbeat_s": 0.2},
        }
    )
    cluster = LocalCluster(config, environment={FOLDER: str(folder)}, module="support.faulty_roles")
    async with cluster:
        await cluster.wait_ready()
        async with joined_gateway(cluster.join_info()) as gateway, http_to(gateway, 60.0) as http:
            yield Seen(cluster, gateway, http, folder)


@contextlib.asynccontextmanager
async def asking(seen: Seen) -> AsyncIterator[list[asyncio.Task[dict[str, Any]]]]:
    """Requests of LENGTHS, none of which decodes before the context ends."""
    hold = seen.folder / "hang-decode"
    hold.touch()
    prompts = random_prompts(LENGTHS, VOCAB_SIZE, seed=5)
    tasks = [asyncio.ensure_future(seen.ask(prompt)) for prompt in prompts]
    try:
        yield tasks
    finally:
        hold.unlink()
        await asyncio.gather(*tasks)


async def test_the_feed_agrees_with_the_scheduler_and_the_instances(seen: Seen) -> None:
    def all_prefilled(state: dict[str, Any]) -> bool:
        counts = state["requests"]
        return counts["open"] == len(LENGTHS) and counts["queued"] + counts["prefilling"] == 0

    async with asking(seen):
        state = await seen.until(all_prefilled)
        assert sum(count for _, _, count in state["waiting"]) == state["requests"]["waiting_in_pool"] > 0
        (decode,) = state["decode"]
        coming = len(decode["candidates"]["batch"]) + len(decode["candidates"]["requests"])
        assert coming == state["requests"]["prefetched"]
        waiting = sorted(length for length in LENGTHS if length <= state["waiting"][-1][1])
        assert all(any(first <= length <= last for length in waiting) for first, last, _ in state["waiting"])
    state = await seen.until(lambda state: not state["requests"]["open"])
    assert state["rates"]["output_tokens_per_s"] > 0
    state = await seen.until(lambda state: not state["decode"][0]["lengths"])  # each instance reports by itself
    assert (
        state["pool"][0]["free"] + state["pool"][0]["owned"] + state["pool"][0]["cached"]
        == (state["pool"][0]["capacity"])
    )
    assert state["channels"]
    await wait_nothing_held(seen.cluster)


async def test_a_running_batch_is_seen_as_lengths(seen: Seen) -> None:
    (seen.folder / "slow-decode").touch()
    prompts = random_prompts(LENGTHS[:4], VOCAB_SIZE, seed=5)
    tasks = [asyncio.ensure_future(seen.ask(prompt)) for prompt in prompts]
    state = await seen.until(lambda state: state["decode"][0]["lengths"])
    lengths = state["decode"][0]["lengths"]
    assert lengths == sorted(lengths)
    assert all(min(LENGTHS) <= length <= max(LENGTHS) + NEW_TOKENS for length in lengths)
    (seen.folder / "slow-decode").unlink()
    await asyncio.gather(*tasks)


async def test_each_stage_of_a_request_follows_the_one_before(seen: Seen) -> None:
    async with asking(seen) as tasks:
        await seen.until(lambda state: state["requests"]["waiting_in_pool"])
    answers = [task.result() for task in tasks]
    for answer in answers:
        found = (await seen.http.get(f"/dashboard/requests/{answer['id']}")).json()
        bars = found["timeline"]
        assert [bar["stage"] for bar in bars[: len(STAGES)]] == STAGES
        assert all(one["end_s"] == other["begin_s"] for one, other in itertools.pairwise(bars))
        assert bars[0]["begin_s"] == pytest.approx(0.0, abs=0.05)
        assert {bar["where"] for bar in bars} == {"scheduler", "prefill-0", "kv_pool", "decode-0"}
        assert found["stays"][0]["waited_s"] <= found["stages"]["pool"] + 0.1
        in_pool = [bar for bar in bars if bar["stage"] == "pool"]
        assert sum(stay["joined"] for stay in found["stays"]) == len(in_pool)
        assert found["explanation"]
    stays = [stay for answer in answers for stay in await stays_of(seen, answer["id"])]
    assert any(stay["sent_first"] for stay in stays)


async def stays_of(seen: Seen, request_id: str) -> list[dict[str, Any]]:
    return list((await seen.http.get(f"/dashboard/requests/{request_id}")).json()["stays"])


async def test_a_death_is_seen_as_it_happens(seen: Seen, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "alignedserve")
    await seen.until(lambda state: state["health"]["state"] == "ready")
    pid = next(role["pid"] for role in (await seen.gateway.status_json())["roles"] if role["id"] == "decode-0")
    begun_s = time.monotonic()
    seen.cluster.kill("decode-0")
    await seen.until(lambda state: any("decode-0 has ended" in event["text"] for event in state["events"]))
    assert time.monotonic() - begun_s < 10.0
    state = await seen.until(
        lambda state: any(r["id"] == "decode-0" and r["pid"] != pid and r["state"] == "ready" for r in state["roles"])
    )
    assert any("decode-0 joined" in event["text"] for event in state["events"])
