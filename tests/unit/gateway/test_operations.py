"""Health, status, metrics and models, and the gRPC service through the project's own client."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from collections.abc import AsyncIterator

import anthropic
import httpx
import pytest

from alignedserve.client import AsyncClient
from alignedserve.errors import (
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    ResourceError,
    TooLargeError,
)
from alignedserve.gateway.failures import FAULT_CODES
from alignedserve.gateway.standalone import StandaloneGateway
from alignedserve.model import resolve_model
from alignedserve.request import BATCH_PRIORITY, FinishReason, RequestSpec, TokenLogprobs
from alignedserve.text import Tokenizer
from support.fake_cluster import FakeCluster, playing, silent_script
from support.gateway import RunningGateway, running_gateway

TOKENIZER = Tokenizer.from_folder(resolve_model("tiny"))


def ids(text: str) -> list[int]:
    assert TOKENIZER is not None
    return TOKENIZER.encode(text)


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(gateway.grpc_address, max_retries=0) as client:
        yield client


# ---- HTTP


async def test_health_says_what_is_missing_and_what_is_degraded(
    http: httpx.AsyncClient, cluster: FakeCluster, gateway: RunningGateway
) -> None:
    async def health_after(role: str, state: str) -> httpx.Response:
        version = gateway.server.view.version
        cluster.set_state(role, state)
        await cluster.wait_for(lambda: gateway.server.view.version > version)
        return await http.get("/health")

    assert (await http.get("/health")).json() == {"status": "ok", "missing": [], "degraded": []}
    for role in ("prefill", "decode", "kv_pool", "scheduler"):
        answer = await health_after(role, "loading")
        assert answer.status_code == 503
        assert answer.json()["missing"] == [role]
        assert answer.json()["degraded"] == [f"{role}-0 is loading"]
        assert (await health_after(role, "ready")).status_code == 200
    answer = await health_after("node_agent", "lost")
    assert (answer.status_code, answer.json()["degraded"]) == (200, ["node_agent-0 is lost"])
    assert (await http.get("/live")).status_code == 200


async def test_before_the_cluster_is_up_the_gateway_is_alive_and_not_healthy(cluster: FakeCluster) -> None:
    cluster.states = {}
    cluster.info = None
    async with running_gateway(cluster, wait=False) as gateway, httpx.AsyncClient(base_url=gateway.url) as http:
        assert (await http.get("/live")).status_code == 200
        answer = await http.get("/health")
        assert (answer.status_code, answer.json()["missing"]) == (503, ["prefill", "decode", "kv_pool", "scheduler"])
        assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 503
        assert (await http.get("/v1/models")).json()["data"][0]["max_model_len"] is None


async def test_status_lists_every_role_and_the_gateway_itself(http: httpx.AsyncClient) -> None:
    roles = (await http.get("/alignedserve/status")).json()["roles"]
    assert [role["role"] for role in roles] == ["prefill", "decode", "kv_pool", "scheduler", "gateway"]
    assert {"role", "id", "pid", "node", "address", "state", "holds"} <= roles[-1].keys()
    assert roles[-1]["holds"] == "0 requests"


async def test_metrics_count_what_happened(http: httpx.AsyncClient, cluster: FakeCluster) -> None:
    await http.post("/v1/completions", json={"prompt": "Return the", "max_tokens": 4})
    cluster.script = silent_script
    await http.post("/v1/completions", json={"prompt": "a", "timeout_s": 0.01})
    answer = await http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    lines = answer.text.splitlines()
    assert "fake_metric 1.0" in lines, "the roles' own"
    assert 'alignedserve_gateway_output_tokens_total{instance="gateway-0"} 4.0' in lines
    assert 'alignedserve_gateway_requests_total{instance="gateway-0",outcome="length"} 1.0' in lines
    assert 'alignedserve_gateway_ttft_seconds_count{instance="gateway-0"} 1.0' in lines
    assert 'alignedserve_gateway_itl_seconds_count{instance="gateway-0"} 3.0' in lines
    assert 'alignedserve_gateway_requests_total{instance="gateway-0",outcome="deadline_exceeded"} 1.0' in lines


async def test_outcomes_are_there_before_they_happen(http: httpx.AsyncClient) -> None:
    lines = (await http.get("/metrics")).text.splitlines()
    for outcome in ("stop", "length", "cancelled", "overloaded", "deadline_exceeded", *FAULT_CODES):
        assert f'alignedserve_gateway_requests_total{{instance="gateway-0",outcome="{outcome}"}} 0.0' in lines


async def test_processes_without_a_page_of_their_own_are_no_targets(http: httpx.AsyncClient) -> None:
    answer = await http.get("/metrics/targets")
    assert (answer.status_code, answer.json()) == (200, [])


async def test_models_are_listed_and_found(http: httpx.AsyncClient, gateway: RunningGateway) -> None:
    (model,) = (await http.get("/v1/models")).json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 512)
    assert (await http.get("/v1/models/tiny")).json() == model
    anthropics = anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none")
    async for found in anthropics.models.list():
        assert (found.type, found.id, found.display_name) == ("model", "tiny", "tiny")
        assert found.created_at.timestamp() == model["created"]
    answer = await http.get("/v1/models/org/other")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_models_limit_is_what_the_cluster_can_hold(http: httpx.AsyncClient, gateway: RunningGateway) -> None:
    gateway.server.model.capacity_tokens = 100
    assert (await http.get("/v1/models/tiny")).json()["max_model_len"] == 100
    async with AsyncClient(gateway.grpc_address) as client:
        (model,) = await client.models()
    assert model.max_positions == 100


async def test_a_port_in_use_is_named(gateway: RunningGateway) -> None:
    port = int(gateway.url.rpartition(":")[2])
    with pytest.raises(ResourceError, match=str(port)):
        await StandaloneGateway(gateway.server, port=port).__aenter__()


def test_a_gateway_needs_no_torch() -> None:
    code = """
import sys
import alignedserve.gateway.server, alignedserve.gateway.standalone
from alignedserve.text import Tokenizer, ChatTemplate
from alignedserve.model import resolve_model
tokenizer = Tokenizer.from_folder(resolve_model("tiny"))
ChatTemplate.from_folder(resolve_model("tiny"), tokenizer.special_tokens)
tokenizer.encode("hi")
assert not {"torch", "transformers", "ray"} & set(sys.modules)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 120 * 1024, "KiB resident"


# ---- gRPC


async def test_grpc_generate(client: AsyncClient, cluster: FakeCluster) -> None:
    async def scored(cluster: FakeCluster, spec: RequestSpec) -> None:
        token = ids(" value")[0]
        cluster.emit(spec, [token], logprobs=[TokenLogprobs(-0.5, ((token, -0.5),))], finish=FinishReason.LENGTH)

    cluster.script = scored
    answer = await client.generate("Return the", max_tokens=4, n=2, logprobs=1, include_timings=True)
    assert [choice.text for choice in answer.choices] == [" value", " value"]
    assert answer.prompt_token_ids == tuple(ids("Return the"))
    assert answer.choices[1].logprobs[0].top[0].token == " value"
    assert answer.usage.completion_tokens == 2
    assert answer.timings is not None
    assert answer.timings.decode_id == "decode-0"
    same = await client.generate(prompt_token_ids=ids("Return the"))
    assert same.timings is None


async def test_grpc_stream(client: AsyncClient, cluster: FakeCluster) -> None:
    cluster.script = playing(ids(" value"), ids(" of it"), pause_s=0.01)
    chunks = [chunk async for chunk in client.stream("Return the", max_tokens=9)]
    assert "".join(chunk.text for chunk in chunks) == " value of it"
    assert chunks[0].prompt_token_ids == tuple(ids("Return the"))
    assert all(not chunk.prompt_token_ids for chunk in chunks[1:])
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].finish_reason == "length"


async def test_grpc_chat(client: AsyncClient, cluster: FakeCluster) -> None:
    cluster.script = playing(ids("Hello"), [5], finish=FinishReason.STOP)
    answer = await client.chat([{"role": "user", "content": "hi"}], logprobs=2)
    assert (answer.text, answer.choices[0].finish_reason) == ("Hello", "stop")
    assert cluster.submitted[0].sampling.logprobs == 2
    assert cluster.submitted[0].sampling.max_tokens > 400


async def test_grpc_errors_are_typed(client: AsyncClient, cluster: FakeCluster) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        await client.generate("a", temperature=3.0)
    assert raised.value.param == "temperature"
    with pytest.raises(NotFoundError):
        await client.generate("a", model="other")
    with pytest.raises(InvalidRequestError):
        await client.generate("a", max_tokens=100_000)
    with pytest.raises(InvalidRequestError, match="request_id"):
        await client.generate("a", request_id="a\nb")
    with pytest.raises(InvalidRequestError):
        [chunk async for chunk in client.stream("")]

    async def overloaded(cluster: FakeCluster, spec: RequestSpec) -> None:
        cluster.reject(OverloadedError("the pool is full", retry_after_s=2.5), spec.key)

    cluster.script = overloaded
    with pytest.raises(OverloadedError) as full:
        await client.generate("a")
    assert full.value.retry_after_s == 2.5


async def test_grpc_cancel_by_id(client: AsyncClient, cluster: FakeCluster) -> None:
    cluster.script = silent_script
    waiting = asyncio.create_task(client.generate("a", request_id="mine-1"))
    await cluster.wait_for(lambda: cluster.submitted)
    assert cluster.submitted[0].key.request_id.startswith("mine-1-")
    with pytest.raises(InvalidRequestError, match="in use"):
        await client.generate("a", request_id="mine-1")
    assert await client.cancel("mine-1")
    assert not await client.cancel("mine-2")
    with pytest.raises(CancelledError):
        await waiting
    await cluster.wait_for(lambda: cluster.cancelled)


async def test_http_cancel_by_id(cluster: FakeCluster, gateway: RunningGateway) -> None:
    cluster.script = silent_script
    async with (
        httpx.AsyncClient(base_url=gateway.url, timeout=10.0) as http,
        AsyncClient(gateway.grpc_address) as client,
    ):
        waiting = asyncio.create_task(client.generate("a", request_id="of/mine:1"))
        await cluster.wait_for(lambda: cluster.submitted)
        gone = await http.post("/v1/requests/of/mine:1/cancel")
        assert (gone.status_code, gone.json()) == (200, {"id": "of/mine:1", "object": "request.cancelled"})
        with pytest.raises(CancelledError):
            await waiting
        again = await http.post("/v1/requests/of/mine:1/cancel")
        assert (again.status_code, again.json()["error"]["code"]) == (404, "not_found")
        assert (await http.get("/v1/requests/x/cancel")).status_code == 405
    await cluster.wait_for(lambda: cluster.cancelled)


@pytest.mark.parametrize(("path", "begin"), [("messages", "msg_"), ("responses", "resp_")])
async def test_a_call_is_known_by_the_id_that_its_api_gives_it(
    cluster: FakeCluster, gateway: RunningGateway, path: str, begin: str
) -> None:
    cluster.script = silent_script
    async with httpx.AsyncClient(base_url=gateway.url, timeout=10.0) as http:
        turns = [{"role": "user", "content": "a"}]
        body = {"model": "tiny", "max_tokens": 20, "max_output_tokens": 20, "messages": turns, "input": turns}
        of_path = ("max_tokens", "messages") if path == "messages" else ("max_output_tokens", "input")
        body = {key: body[key] for key in ("model", *of_path)}
        waiting = asyncio.create_task(http.post(f"/v1/{path}", json=body))
        await cluster.wait_for(lambda: cluster.submitted)
        number = cluster.submitted[0].key.request_id.removeprefix("chatcmpl-").split("-")[0]
        seen = (await http.get(f"/dashboard/requests?id={begin}{number}")).json()
        assert [one["id"] for one in seen["requests"]] == [f"chatcmpl-{number}"]
        assert (await http.post(f"/v1/requests/{begin}{number}/cancel")).status_code == 200
        assert (await waiting).status_code == 499


async def test_a_grpc_client_that_leaves_is_cancelled(
    client: AsyncClient, cluster: FakeCluster, gateway: RunningGateway
) -> None:
    cluster.script = silent_script
    waiting = asyncio.create_task(client.generate("a"))
    await cluster.wait_for(lambda: cluster.submitted)
    waiting.cancel()
    await cluster.wait_for(lambda: cluster.cancelled, timeout_s=1.0)
    assert len(gateway.server.ledger) == 0


async def test_a_grpc_time_limit(client: AsyncClient, cluster: FakeCluster) -> None:
    cluster.script = silent_script
    with pytest.raises(DeadlineError):
        await client.generate("a", timeout_s=0.1)
    await cluster.wait_for(lambda: cluster.cancelled)


async def test_a_grpc_request_carries_an_objective_for_its_wait(client: AsyncClient, cluster: FakeCluster) -> None:
    await client.generate("a", wait_objective_s=2.5)
    await client.generate("a")
    assert [spec.wait_objective_s for spec in cluster.submitted] == [2.5, 0.0]
    for wrong in (0.0, -1.0, 1e6, math.inf, math.nan):
        with pytest.raises(InvalidRequestError) as caught:
            await client.generate("a", wait_objective_s=wrong)
        assert caught.value.param == "wait_objective_s"
    with pytest.raises(InvalidRequestError, match="wait_objective_s"):
        await client.generate("a", wait_objective_s="soon")  # type: ignore[arg-type]
    assert len(cluster.submitted) == 2


async def test_a_grpc_request_carries_its_priority(client: AsyncClient, cluster: FakeCluster) -> None:
    for priority in (-5, 0, BATCH_PRIORITY):
        await client.generate("a", priority=priority)
    await client.generate("a")
    assert [spec.priority for spec in cluster.submitted] == [-5, 0, BATCH_PRIORITY, 0]
    for wrong in (1 << 63, 1.5, "urgent"):
        with pytest.raises(InvalidRequestError, match="priority"):
            await client.generate("a", priority=wrong)  # type: ignore[arg-type]
    assert len(cluster.submitted) == 4


async def test_grpc_models(client: AsyncClient) -> None:
    (model,) = await client.models()
    assert (model.id, model.max_positions) == ("tiny", 512)


async def test_a_grpc_message_over_the_limit_is_refused_like_a_body(cluster: FakeCluster) -> None:
    async with running_gateway(cluster, max_body_mib=0.01) as gateway, AsyncClient(gateway.grpc_address) as client:
        with pytest.raises(TooLargeError, match="over the limit"):
            await client.generate("a " * 10_000, max_tokens=1)
        assert (await client.generate("a", max_tokens=1)).choices
