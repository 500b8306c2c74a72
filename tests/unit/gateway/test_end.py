"""How a gateway ends: no new requests, time for open ones, an error for the rest. Also orders to the cluster."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from alignedserve.admin import ADMIN_HEADER, admin_key
from alignedserve.client import AsyncClient
from alignedserve.errors import ResourceError, UnavailableError
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.request import FinishReason, RequestSpec
from support.fake_cluster import TOKEN, FakeCluster, silent_script
from support.gateway import RunningGateway, running_gateway

KEY = {ADMIN_HEADER: admin_key(TOKEN)}


async def ask(http: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await http.post("/v1/completions", json={"prompt": "a", **body})


async def wait_state(cluster: FakeCluster, state: str) -> None:
    await cluster.wait_for(lambda: any(report.heartbeat.state == state for report in cluster.reports))


def last_event(answer: httpx.Response) -> str:
    return [line for line in answer.text.splitlines() if line][-1]


# ---- the end of a cluster


async def test_what_is_open_runs_to_its_end_and_what_is_new_is_refused(
    cluster: FakeCluster, gateway: RunningGateway, http: httpx.AsyncClient
) -> None:
    go_on = asyncio.Event()

    async def held(cluster: FakeCluster, spec: RequestSpec) -> None:
        cluster.emit(spec, [100])
        await go_on.wait()
        cluster.emit(spec, [101], finish=FinishReason.LENGTH)

    cluster.script = held
    streaming = asyncio.create_task(ask(http, max_tokens=2, stream=True))
    await cluster.wait_for(lambda: cluster.submitted)
    cluster.announce_end(60.0)
    await wait_state(cluster, "draining")

    refused, health = await ask(http), await http.get("/health")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert int(refused.headers["retry-after"]) >= 1
    assert (health.status_code, health.json()["status"]) == (503, "draining")
    async with AsyncClient(gateway.grpc_address, resume_s=0) as client:
        with pytest.raises(UnavailableError):
            await client.generate("a")
    assert not any(report.heartbeat.state == "drained" for report in cluster.reports)
    go_on.set()
    answer = await streaming
    assert (answer.status_code, last_event(answer)) == (200, "data: [DONE]")
    assert len(cluster.submitted) == 1
    await wait_state(cluster, "drained")


async def test_what_is_left_when_the_time_is_over_ends_with_an_error_and_the_time_can_be_cut_short(
    cluster: FakeCluster, http: httpx.AsyncClient
) -> None:
    async def begun(cluster: FakeCluster, spec: RequestSpec) -> None:
        cluster.emit(spec, [100])

    cluster.script = begun
    streaming = asyncio.create_task(ask(http, max_tokens=3, stream=True))
    await cluster.wait_for(lambda: cluster.submitted)
    cluster.announce_end(600.0)
    await wait_state(cluster, "draining")
    cluster.announce_end(700.0)  # does not make it longer
    cluster.announce_end(0.1)
    answer = await asyncio.wait_for(streaming, 10.0)
    event = json.loads(last_event(answer).removeprefix("data: "))
    assert event["error"]["code"] == "shutting_down"
    await wait_state(cluster, "drained")
    await cluster.wait_for(lambda: cluster.cancelled)


async def test_with_nothing_open_the_end_is_there_at_once(cluster: FakeCluster, gateway: RunningGateway) -> None:
    cluster.announce_end(600.0)
    await wait_state(cluster, "drained")
    assert gateway.server.state == "drained"


async def test_closing_a_gateway_ends_its_requests(cluster: FakeCluster) -> None:
    cluster.script = silent_script
    async with running_gateway(cluster) as gateway, httpx.AsyncClient(base_url=gateway.url, timeout=20.0) as http:
        waiting = asyncio.create_task(ask(http))
        await cluster.wait_for(lambda: cluster.submitted)
        gateway.server.drain(60.0)
        refused = await ask(http)
        gateway.server.ledger.close_all()
        answer = await waiting
    assert refused.status_code == answer.status_code == 503
    assert "did not finish in time" in answer.json()["error"]["message"]
    await cluster.wait_for(lambda: cluster.cancelled)


# ---- orders


@pytest.mark.parametrize("headers", [{}, {ADMIN_HEADER: "guess"}])
async def test_orders_without_the_admin_key_are_refused(
    cluster: FakeCluster, http: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    for path in ("/alignedserve/scale", "/alignedserve/restart", "/alignedserve/stop"):
        answer = await http.post(path, json={"prefill": 2}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_key_required")
    assert cluster.orders == []


@pytest.mark.parametrize(
    "body",
    [{}, {"prefill": 0}, {"decode": -1}, {"prefill": True}, {"decode": 1.5}, {"decode": 10**9}, {"replicas": 2}, []],
)
async def test_a_scale_order_that_makes_no_sense_is_refused(
    cluster: FakeCluster, http: httpx.AsyncClient, body: Any
) -> None:
    assert (await http.post("/alignedserve/scale", json=body, headers=KEY)).status_code == 400
    assert cluster.orders == []


@pytest.mark.parametrize("body", [{"roles": "decode"}, {"roles": [1]}, {"role": ["decode"]}, []])
async def test_a_restart_order_that_makes_no_sense_is_refused(
    cluster: FakeCluster, http: httpx.AsyncClient, body: Any
) -> None:
    assert (await http.post("/alignedserve/restart", json=body, headers=KEY)).status_code == 400
    assert cluster.orders == []


async def test_a_rolling_restart_is_ordered_and_a_second_one_refused(
    cluster: FakeCluster, http: httpx.AsyncClient
) -> None:
    answer = await http.post("/alignedserve/restart", json={"roles": ["scheduler"]}, headers=KEY)
    assert answer.status_code == 200
    assert (answer.json()["roles"], answer.json()["since_unix_s"], answer.json()["done"]) == (["scheduler"], 5.0, False)
    assert cluster.orders == [sv.RestartRequest(roles=["scheduler"])]
    cluster.scale_refused = UnavailableError("a rolling restart is under way (decode-0 drains)")
    refused = await http.post("/alignedserve/restart", json={}, headers=KEY)
    assert refused.status_code == 503
    assert "decode-0 drains" in refused.json()["error"]["message"]


async def test_orders_reach_the_supervisor_and_its_refusal_comes_back(
    cluster: FakeCluster, http: httpx.AsyncClient
) -> None:
    answer = await http.post("/alignedserve/scale", json={"decode": 3}, headers=KEY)
    assert (answer.status_code, answer.json()) == (200, {"prefill": 1, "decode": 3})
    assert cluster.orders == [sv.ScaleRequest(decode=3)]
    cluster.scale_refused = ResourceError("3 more need 9 GiB, and there are 2")
    refused = await http.post("/alignedserve/scale", json={"decode": 6}, headers=KEY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_possible")
    assert "9 GiB" in refused.json()["error"]["message"]
    stopping = await http.post("/alignedserve/stop", content=b"", headers=KEY)
    assert (stopping.status_code, stopping.json()["grace_s"]) == (200, 25.0)
