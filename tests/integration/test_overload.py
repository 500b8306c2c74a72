"""A small cluster offered far more than it can serve, and a client that does not read (plain processes, no Ray)."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest
import pytest_asyncio

from alignedserve.cluster.cli.open_loop import Load, drive
from alignedserve.cluster.local import LocalCluster
from alignedserve.config_sources import from_tree
from alignedserve.control.samples import value
from support.gateway_process import GatewayProcess

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

PATH = "/v1/completions"
STATES = ("queued", "prefilling", "waiting_in_pool", "prefetched", "decoding")
ROLES = ("prefill-0", "decode-0", "kv_pool-0", "scheduler-0", "node_agent-0")


@dataclass
class Served:
    cluster: LocalCluster
    gateway: GatewayProcess

    @property
    def port(self) -> int:
        return int(self.gateway.url.rpartition(":")[2])

    async def metric(self, name: str, **labels: str) -> float:
        return value((await self.cluster.status()).metrics, name, **labels)

    async def wait_all_free(self, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while await self.metric("alignedserve_kv_blocks", state="owned") > 0:
            assert time.monotonic() < deadline, "blocks are still held"
            await asyncio.sleep(0.1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    config = from_tree(
        {
            "cluster": {"device": "cpu", "threads": 1},
            "kv_pool": {"size_gib": 0.1},
            "scheduler": {"ttft_objective_s": 0.1, "tpot_objective_s": 0.3},  # 32 at once keep it on a slow machine too
            "supervisor": {"heartbeat_s": 0.1},
        }
    )
    async with LocalCluster(config) as cluster:
        await cluster.wait_ready()
        async with GatewayProcess(cluster, "gateway-0") as gateway:
            yield Served(cluster, gateway)


async def test_far_beyond_its_capacity_a_cluster_refuses_with_retry_after_and_ends_what_it_accepted(
    served: Served,
) -> None:
    before = {role: served.cluster.peer(role).process.incarnation for role in ROLES}
    outcome = await drive(Load(served.port, rate=400.0, seconds=3.0, prompt_tokens=48, new_tokens=24))
    assert outcome.errors == {}
    assert outcome.unended == 0
    assert outcome.offered == len(outcome.served) + outcome.refused
    assert outcome.served
    assert outcome.refused > len(outcome.served)
    assert outcome.refused_without_retry_after == 0
    assert {role: served.cluster.peer(role).process.incarnation for role in ROLES} == before
    await served.wait_all_free()
    assert await served.metric("alignedserve_requests_queued") == 0


async def test_the_kv_of_an_answer_that_no_client_reads_is_free_once_it_is_generated(served: Served) -> None:
    body = {"prompt": [[10, 11, 12]] * 2, "n": 16, "max_tokens": 192, "ignore_eos": True, "stream": True, "logprobs": 5}
    text = json.dumps(body)
    head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    status = b"HTTP/1.1 429"
    async with asyncio.timeout(30.0):
        while status == b"HTTP/1.1 429":  # what the requests before have taught about TTFT is soon forgotten
            plain = socket.socket()
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            plain.setblocking(False)
            await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", served.port))
            reader, writer = await asyncio.open_connection(sock=plain, limit=4096)
            writer.write((head + text).encode())
            status = (await reader.readuntil(b"\r\n"))[:12]  # the rest of the answer is not read
            if status == b"HTTP/1.1 429":
                writer.close()
                await asyncio.sleep(1.0)
    assert status == b"HTTP/1.1 200"
    await served.wait_all_free()
    async with httpx.AsyncClient(base_url=served.gateway.url, timeout=30.0) as http:
        other = await http.post(PATH, json={"prompt": [10, 11], "max_tokens": 8, "ignore_eos": True})
    assert other.status_code == 200
    whole = b""
    try:
        async with asyncio.timeout(60.0):
            while b"data: [DONE]" not in whole[-200:]:
                piece = await reader.read(1 << 20)
                assert piece, f"the stream broke off after {whole[-500:]!r}"
                whole += piece
    except TimeoutError:
        states = {state: await served.metric(f"alignedserve_requests_{state}") for state in STATES}
        pytest.fail(f"after {len(whole)} bytes, of which the last are {whole[-300:]!r}, nothing came; {states}")
    assert whole.count(b'"finish_reason":"length"') == 32
    writer.close()
