"""Whatever process dies under load, every request ends well, and nothing is held anywhere when all have ended."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import httpx
import pytest
import pytest_asyncio

from alignedserve.cluster.local import LocalCluster
from alignedserve.config_sources import from_tree
from alignedserve.control.samples import value
from alignedserve.transfer.segments import SegmentClient
from support.gateway import http_to, joined_gateway
from support.held import wait_nothing_held

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

CLIENTS = 8
WORDS = (1, 7, 20, 39)
LONGEST = 40
STORELESS = ("scheduler-0", "node_agent-0")
STATES = ("queued", "prefilling", "waiting_in_pool", "prefetched", "decoding")


@dataclass
class Served:
    cluster: LocalCluster
    http: httpx.AsyncClient
    expected: dict[int, list[int]] = field(default_factory=dict)
    open: int = 0  # requests that clients wait for

    async def ask(self, words: int, max_tokens: int = LONGEST) -> list[int]:
        """The tokens of a greedy answer."""
        body = {"prompt": "a " * words, "max_tokens": max_tokens, "ignore_eos": True}
        self.open += 1
        answer = await self.http.post("/v1/completions", json={**body, "temperature": 0, "return_token_ids": True})
        self.open -= 1
        assert answer.status_code == 200, answer.text
        tokens: list[int] = answer.json()["choices"][0]["token_ids"]
        return tokens

    async def load(self, stop: asyncio.Event, seed: int) -> None:
        """One request after the other, each as if nothing had happened; the last begins after `stop`."""
        draw = random.Random(seed)
        stopped = False
        while not stopped:
            stopped = stop.is_set()
            words, most = draw.choice(WORDS), draw.randrange(2, LONGEST)
            assert await self.ask(words, most) == self.expected[words][:most]

    async def wait_working(self, victims: Sequence[str]) -> None:
        """Until each of them holds requests' blocks; or, if it has no store, until the scheduler has requests."""
        deadline = time.monotonic() + 60.0
        working = False
        while not working:
            assert time.monotonic() < deadline
            metrics = (await self.cluster.status()).metrics
            requests = sum(value(metrics, f"alignedserve_requests_{state}") for state in STATES)
            working = requests > 0 and all(
                value(metrics, "alignedserve_kv_blocks", state="owned", instance=role_id) > 0
                for role_id in victims
                if role_id not in STORELESS
            )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    config = from_tree(
        {
            "cluster": {"device": "cpu", "threads": 1},
            "kv_pool": {"size_gib": 0.1},
            "supervisor": {"heartbeat_s": 0.1},
        }
    )
    async with LocalCluster(config) as cluster:
        await cluster.wait_ready()
        async with joined_gateway(cluster.join_info()) as gateway, http_to(gateway, 60.0) as http:
            served = Served(cluster, http)
            served.expected = {words: await served.ask(words) for words in WORDS}
            yield served


@pytest.mark.slow
async def test_the_buffers_of_a_killed_prefill_instance_do_not_stay_with_the_node_agent(served: Served) -> None:
    segments = SegmentClient(served.cluster.agent_socket, served.cluster.token)
    before = len(segments.segments())
    killed = served.cluster.peer("prefill-0").process.incarnation
    served.cluster.kill("prefill-0")
    await served.cluster.wait_restarted("prefill-0", killed)
    incarnation = served.cluster.peer("prefill-0").process.incarnation
    names = sorted(segment.name for segment in segments.segments())
    assert [name for name in names if name.startswith("prefill-0")] == [
        f"prefill-0/batch-{incarnation}",
        f"prefill-0/requests-{incarnation}",
    ]
    assert len(names) == before


@pytest.mark.parametrize(
    "victims",
    [
        ("prefill-0",),
        ("kv_pool-0",),
        ("node_agent-0",),
        ("scheduler-0", "kv_pool-0"),
        pytest.param(("scheduler-0", "decode-0"), marks=pytest.mark.slow),
        pytest.param(("kv_pool-0", "decode-0"), marks=pytest.mark.slow),
        ("kv_pool-0", "node_agent-0"),
        pytest.param(("node_agent-0", "prefill-0", "decode-0"), marks=pytest.mark.slow),  # only the pool has its memory
    ],
    ids="+".join,
)
async def test_roles_that_are_killed_under_load_cost_no_request_no_token_and_no_block(
    served: Served, victims: tuple[str, ...]
) -> None:
    stop = asyncio.Event()
    clients = [asyncio.create_task(served.load(stop, seed)) for seed in range(CLIENTS)]
    try:
        await served.wait_working(victims)
        assert served.open
        old = {role_id: served.cluster.peer(role_id).process.incarnation for role_id in victims}
        for role_id in victims:
            served.cluster.kill(role_id)
        for role_id, incarnation in old.items():
            await served.cluster.wait_restarted(role_id, incarnation)
    finally:
        stop.set()
        await asyncio.gather(*clients)
    await wait_nothing_held(served.cluster)
