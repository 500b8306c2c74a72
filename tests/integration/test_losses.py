"""Whatever process dies under load, every request ends well, and nothing is held anywhere when all have ended."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest
import pytest_asyncio

from alignedserve.cluster.local import LocalCluster
from alignedserve.config_sources import from_tree
from alignedserve.control.role import new_incarnation
from alignedserve.gateway.server import GatewayServer
from alignedserve.model import resolve_model
from alignedserve.proto import common_pb2 as pb
from alignedserve.scheduler.pool_audit import SETTLE_S
from alignedserve.testing.metrics import value

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

CLIENTS = 8


@dataclass
class Served:
    cluster: LocalCluster
    http: httpx.AsyncClient

    async def load(self, stop: asyncio.Event, seed: int) -> list[int]:
        """One request after the other; the statuses."""
        draw = random.Random(seed)
        statuses = []
        while not stop.is_set():
            body = {"prompt": "a " * draw.randrange(1, 40), "max_tokens": draw.randrange(2, 40), "ignore_eos": True}
            answer = await self.http.post("/v1/completions", json=body)
            statuses.append(answer.status_code)
            if answer.status_code == 200:
                assert answer.json()["usage"]["completion_tokens"] == body["max_tokens"]
        return statuses

    async def held(self) -> dict[str, float]:
        """Blocks with holders, by store."""
        metrics = (await self.cluster.status()).metrics
        lines = [line for line in metrics.splitlines() if 'state="owned"' in line]
        assert value(metrics, "alignedserve_kv_capacity_blocks") > 0
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    async def wait_nothing_held(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while any((held := await self.held()).values()):
            assert time.monotonic() < deadline, held
            await asyncio.sleep(0.2)


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
        info = cluster.join_info()
        process = pb.ProcessKey(role="gateway", id="gateway-0", incarnation=new_incarnation())
        gateway = await GatewayServer.create(
            config, resolve_model("tiny"), process, info["supervisor_address"], info["token"], node_id=info["node_id"]
        )
        await gateway.wait_model(10.0)
        transport = httpx.ASGITransport(gateway.asgi_app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=60.0) as http:
            yield Served(cluster, http)
        await gateway.close()


@pytest.mark.parametrize("role_id", ["scheduler-0", "kv_pool-0", "decode-0", "prefill-0"])
async def test_a_role_that_is_killed_under_load_costs_no_request_and_no_block(served: Served, role_id: str) -> None:
    stop = asyncio.Event()
    clients = [asyncio.create_task(served.load(stop, seed)) for seed in range(CLIENTS)]
    await asyncio.sleep(1.0)
    old = served.cluster.peer(role_id).process.incarnation
    served.cluster.kill(role_id)
    await served.cluster.wait_restarted(role_id, old)
    await asyncio.sleep(1.0)
    stop.set()
    statuses = [status for client in clients for status in await client]
    assert set(statuses) == {200}
    assert len(statuses) > CLIENTS
    await served.wait_nothing_held(SETTLE_S + 15.0)


async def test_scheduler_and_pool_together(served: Served) -> None:
    stop = asyncio.Event()
    clients = [asyncio.create_task(served.load(stop, seed)) for seed in range(CLIENTS)]
    await asyncio.sleep(1.0)
    old = {role_id: served.cluster.peer(role_id).process.incarnation for role_id in ("scheduler-0", "kv_pool-0")}
    for role_id in old:
        served.cluster.kill(role_id)
    for role_id, incarnation in old.items():
        await served.cluster.wait_restarted(role_id, incarnation)
    stop.set()
    assert {status for client in clients for status in await client} == {200}
    await served.wait_nothing_held(SETTLE_S + 15.0)
