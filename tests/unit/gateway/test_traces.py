"""Traces: a span for a call, one for each of its answers' stages, and nothing where nothing was asked for."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, rpc_attributes
from opentelemetry.semconv.attributes import error_attributes, http_attributes, url_attributes
from opentelemetry.trace import SpanKind, StatusCode

from alignedserve import logs
from alignedserve.config import LogConfig
from alignedserve.errors import AlignedServeError
from alignedserve.gateway.body.planning import CallPlan, PromptPlan
from alignedserve.gateway.body.requests import ReplyOptions
from alignedserve.gateway.ledger.calls import Call
from alignedserve.gateway.tracing import pipeline
from alignedserve.gateway.tracing.bars import Bar, bars_of
from alignedserve.proto import inference_pb2 as inf
from alignedserve.proto import inference_pb2_grpc as inf_grpc
from alignedserve.request import MOST_STEPS, FinishReason, RequestSpec, SamplingParams, Stage, Stopwatch
from support.fake_cluster import FakeCluster, playing, silent_script
from support.traces import (
    PARENT_ID,
    STAGES,
    TRACE_ID,
    TRACEPARENT,
    Traces,
    ids,
    names,
    said,
    staged,
    traced_gateway,
    without_gaps,
)

BODY = {"prompt": "a b c", "max_tokens": 3, "temperature": 0.5, "stop": ["never"]}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
PARENT = {"traceparent": TRACEPARENT, "tracestate": "vendor=1"}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    found = InMemorySpanExporter()
    monkeypatch.setattr(pipeline, "make_exporter", lambda: found)
    return found


async def post(url: str, path: str = "/v1/completions", **options: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, timeout=20.0) as http:
        return await http.post(path, **options)


async def test_a_call_has_a_span_for_each_stage(cluster: FakeCluster, exporter: InMemorySpanExporter) -> None:
    cluster.script = staged
    async with traced_gateway(cluster) as gateway:
        answer = await post(gateway.url, json=BODY, headers={**PARENT, "x-request-id": "mine", "x-session-id": "s1"})
    assert answer.status_code == 200
    traces = Traces(exporter)
    call = traces.call
    assert (call.name, call.kind) == ("text_completion tiny", SpanKind.SERVER)
    assert call.status.status_code is StatusCode.UNSET
    assert call.parent is not None
    assert call.context is not None
    assert (ids(call)[0], f"{call.parent.span_id:016x}", call.parent.is_remote) == (TRACE_ID, PARENT_ID, True)
    assert call.context.trace_state.get("vendor") == "1"
    assert answer.headers["traceparent"] == f"00-{TRACE_ID}-{ids(call)[1]}-01"
    found = said(call)
    usage = answer.json()["usage"]
    wanted = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "alignedserve",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.stream": False,
        "gen_ai.response.id": answer.json()["id"],
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.conversation.id": "s1",
        "alignedserve.request.stop_sequences": 1,
        "alignedserve.request_id": f"{answer.json()['id']}-0",
        "alignedserve.prefill_id": "prefill-0",
        "alignedserve.decode_id": "decode-0",
        "alignedserve.epoch": 0,
        "alignedserve.evictions": 0,
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "http.request.header.x-request-id": ("mine",),
    }
    assert {name: found[name] for name in wanted} == wanted
    assert 0 < found["alignedserve.time_to_first_token_s"] < 20
    stages = traces.below(call)
    assert names(stages) == STAGES
    assert len(traces.spans) == 1 + len(STAGES)
    assert without_gaps(stages)
    assert stages[0].start_time == call.start_time
    assert (stages[-1].end_time or 0) <= (call.end_time or 0)
    assert all(span.kind is SpanKind.INTERNAL for span in stages)
    places = [said(span)["alignedserve.instance"] for span in stages]
    assert places == ["gateway-0", "scheduler", "prefill-0", "kv_pool", *["decode-0"] * 3]
    roles = ["gateway", "scheduler", "prefill", "kv_pool", "decode", "decode", "decode"]
    assert [said(span)["alignedserve.role"] for span in stages] == roles
    assert [event.name for event in call.events] == ["first_token"]


async def test_names_are_those_of_the_conventions(cluster: FakeCluster, exporter: InMemorySpanExporter) -> None:
    async with traced_gateway(cluster, content=True) as gateway:
        options = {"top_k": 5, "frequency_penalty": 0.5, "presence_penalty": 0.5, "n": 2, "stream": True}
        await post(gateway.url, "/v1/chat/completions", json={**CHAT, **options})
        await post(gateway.url, json={"prompt": 0.5})
        async with grpc.aio.insecure_channel(gateway.grpc_address) as channel:
            await inf_grpc.InferenceStub(channel).Generate(inf.GenerateRequest(prompt="a", max_tokens=2))
    modules = (gen_ai_attributes, rpc_attributes, error_attributes, http_attributes, url_attributes)
    known = {value for module in modules for name, value in vars(module).items() if name.isupper()}
    used = {name for span in Traces(exporter).spans for name in said(span) if not name.startswith("alignedserve.")}
    assert used - known == set()
    assert len(used) > 20


async def test_a_chat_that_is_streamed(cluster: FakeCluster, exporter: InMemorySpanExporter) -> None:
    cluster.script = staged
    async with traced_gateway(cluster) as gateway:
        answer = await post(gateway.url, "/v1/chat/completions", json={**CHAT, "stream": True})
    assert answer.text.endswith("data: [DONE]\n\n")
    traces = Traces(exporter)
    found = said(traces.call)
    assert (traces.call.name, traces.call.parent) == ("chat tiny", None)
    assert answer.headers["traceparent"].split("-")[1:3] == list(ids(traces.call))
    assert found["gen_ai.response.time_to_first_chunk"] == found["alignedserve.time_to_first_token_s"]
    assert names(traces.below(traces.call)) == STAGES


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_translated_calls_are_chats(cluster: FakeCluster, exporter: InMemorySpanExporter, path: str) -> None:
    async with traced_gateway(cluster) as gateway:
        body = {"input": "hi"} if path == "/v1/responses" else {**CHAT, "model": "tiny"}
        assert (await post(gateway.url, path, json=body)).status_code == 200
    assert (Traces(exporter).call.name, said(Traces(exporter).call)["http.route"]) == ("chat tiny", path)


async def test_answers_of_one_call_have_a_span_each(cluster: FakeCluster, exporter: InMemorySpanExporter) -> None:
    cluster.script = staged
    async with traced_gateway(cluster) as gateway:
        answer = await post(gateway.url, json={**BODY, "prompt": ["a b", "c"], "n": 2, "temperature": 1.0})
    traces = Traces(exporter)
    gateway_span, *answers = traces.below(traces.call)
    assert (gateway_span.name, names(answers)) == ("gateway", ["answer"] * 4)
    assert {said(one)["alignedserve.answer"] for one in answers} == {0, 1, 2, 3}
    assert len({said(one)["alignedserve.request_id"] for one in answers}) == 4
    for one in answers:
        stages = traces.below(one)
        assert names(stages) == STAGES[1:]
        assert without_gaps(stages)
        assert one.end_time == stages[-1].end_time
        assert said(one)["gen_ai.response.finish_reasons"] == ("length",)
    assert said(traces.call)["gen_ai.usage.output_tokens"] == answer.json()["usage"]["completion_tokens"] == 12
    assert said(traces.call)["gen_ai.request.choice.count"] == 2


async def test_grpc_has_the_context_in_its_metadata(cluster: FakeCluster, exporter: InMemorySpanExporter) -> None:
    cluster.script = staged
    parent = (("traceparent", TRACEPARENT),)
    message = inf.ChatMessage(role="user", content="hi")
    chat = inf.GenerateRequest(conversation=inf.Conversation(messages=[message]), max_tokens=3)
    async with traced_gateway(cluster) as gateway, grpc.aio.insecure_channel(gateway.grpc_address) as channel:
        stub = inf_grpc.InferenceStub(channel)
        one = stub.Generate(inf.GenerateRequest(prompt="a", max_tokens=3), metadata=parent)
        headers = [dict(await one.initial_metadata())["traceparent"]]
        assert (await one).choices
        stream = stub.Stream(chat)
        assert [chunk async for chunk in stream]
        headers.append(dict(await stream.initial_metadata())["traceparent"])
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Generate(inf.GenerateRequest(prompt="a", model="other"))
    first, second, refused = Traces(exporter).calls
    assert names([first, second, refused]) == ["text_completion tiny", "chat tiny", "text_completion tiny"]
    assert ids(first)[0] == TRACE_ID
    assert [header.split("-")[2] for header in headers] == [ids(first)[1], ids(second)[1]]
    assert said(first)["rpc.method"] == "alignedserve.v1.Inference/Generate"
    assert [said(one)["rpc.response.status_code"] for one in (first, second, refused)] == ["OK", "OK", "NOT_FOUND"]
    assert said(refused)["error.type"] == "model_not_found"
    assert names(Traces(exporter).below(second)) == STAGES


async def failing(cluster: FakeCluster, spec: RequestSpec) -> None:
    cluster.emit(spec, error=AlignedServeError("a secret"))


@pytest.mark.parametrize(
    ("fields", "script", "code", "status", "stages"),
    [
        ({"prompt": 0.5}, staged, "invalid_type", StatusCode.UNSET, []),
        ({"model": "other"}, staged, "model_not_found", StatusCode.UNSET, []),
        ({"timeout_s": 0.05}, silent_script, "deadline_exceeded", StatusCode.ERROR, ["gateway", "until_first_token"]),
        ({}, failing, "internal_error", StatusCode.ERROR, ["gateway", "until_first_token"]),
    ],
)
async def test_a_call_that_fails_says_why(
    cluster: FakeCluster,
    exporter: InMemorySpanExporter,
    fields: dict[str, Any],
    script: Any,
    code: str,
    status: StatusCode,
    stages: list[str],
) -> None:
    cluster.script = script
    async with traced_gateway(cluster) as gateway:
        answer = await post(gateway.url, json={**BODY, **fields}, headers=PARENT)
    traces = Traces(exporter)
    assert answer.headers["traceparent"].split("-")[2] == ids(traces.call)[1]
    assert said(traces.call)["http.response.status_code"] == answer.status_code
    assert said(traces.call)["error.type"] == answer.json()["error"]["code"] == code
    assert (traces.call.status.status_code, traces.call.status.description or code) == (status, code)
    assert names(traces.below(traces.call)) == stages
    assert "secret" not in traces.text()


async def test_a_client_that_leaves(cluster: FakeCluster, exporter: InMemorySpanExporter) -> None:
    cluster.script = playing([100], [101], [102], pause_s=60.0)
    async with traced_gateway(cluster) as gateway, httpx.AsyncClient(base_url=gateway.url, timeout=20.0) as http:
        async with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
            await anext(answer.aiter_lines())
        await cluster.wait_for(lambda: cluster.cancelled)
    traces = Traces(exporter)
    assert (said(traces.call)["error.type"], traces.call.status.status_code) == ("cancelled", StatusCode.UNSET)
    stages = traces.below(traces.call)
    assert names(stages) == ["gateway", "until_first_token", "further_tokens"]
    assert without_gaps(stages)


async def test_a_stop_string_ends_an_answer_before_its_stopwatch_comes(
    cluster: FakeCluster, exporter: InMemorySpanExporter
) -> None:
    async with traced_gateway(cluster) as gateway:
        text = (await post(gateway.url, json={**BODY, "max_tokens": 12, "stop": []})).json()["choices"][0]["text"]
        cut = await post(gateway.url, json={**BODY, "max_tokens": 12, "stop": [text[-6:-3]]})
        assert cut.json()["choices"][0]["finish_reason"] == "stop"
    traces = Traces(exporter)
    stages = traces.below(traces.calls[1])
    assert names(stages)[:2] == ["gateway", "until_first_token"]
    assert without_gaps(stages)
    assert said(traces.calls[1])["gen_ai.response.finish_reasons"] == ("stop",)


async def test_evictions_and_losses_are_events(cluster: FakeCluster, exporter: InMemorySpanExporter) -> None:
    async def lost_then_evicted(cluster: FakeCluster, spec: RequestSpec) -> None:
        if not spec.key.epoch:
            cluster.lose(spec.key, reason="decode-0 died")
            return
        await staged(cluster, spec, Stage.POOL, Stage.PREFETCH, Stage.HANDOVER, Stage.DECODE)

    cluster.script = lost_then_evicted
    async with traced_gateway(cluster) as gateway:
        assert (await post(gateway.url, json=BODY)).status_code == 200
    traces = Traces(exporter)
    events = {event.name: dict(event.attributes or {}) for event in traces.call.events}
    assert events == {
        "loss": {"alignedserve.epoch": 0, "alignedserve.reason": "decode-0 died"},
        "first_token": {},
        "eviction": {},
    }
    assert (said(traces.call)["alignedserve.epoch"], said(traces.call)["alignedserve.evictions"]) == (1, 1)
    stages = traces.below(traces.call)
    assert names(stages) == ["gateway", "lost", *STAGES[1:], *STAGES[3:]]
    assert without_gaps(stages)


def test_stages_name_the_instance_of_their_time() -> None:
    prompt = PromptPlan((1, 2), SamplingParams(max_tokens=4))
    (answer,) = Call(CallPlan("c", (prompt,), ReplyOptions(), internal_id="c")).answers
    begin_ns = answer.call.arrival_ns
    order = [Stage.QUEUE, Stage.POOL, Stage.DECODE, Stage.POOL, Stage.DECODE]
    answer.stopwatch = Stopwatch(since_ns=begin_ns)
    for second, stage in enumerate(order[1:], 1):
        answer.stopwatch.enter(stage, begin_ns + second * 10**9)
    answer.stopwatch.close(begin_ns + 5 * 10**9)
    for moved_s, decode_id in ((2.5, "decode-0"), (4.5, "decode-1")):
        answer.moves += ((begin_ns + int(moved_s * 1e9), decode_id),)
    answer.decode_id, answer.finish = "decode-1", FinishReason.LENGTH
    bars = bars_of(answer, time.time_ns())
    assert [bar.stage for bar in bars] == order
    assert [bar.instance for bar in bars] == ["scheduler", "kv_pool", "decode-0", "kv_pool", "decode-1"]
    assert abs(bars[2].begin_ns - (begin_ns + 2 * 10**9)) < 1_000
    answer.stopwatch.steps = [(Stage.POOL, begin_ns)] * MOST_STEPS
    assert len(bars_of(answer, time.time_ns())) == MOST_STEPS - 1
    answer.stopwatch, answer.sent_s = Stopwatch(), 0.0
    assert bars_of(answer, time.time_ns()) == []  # echo alone: nothing was computed
    answer.finish = None
    assert bars_of(answer, begin_ns + 5) == [Bar("until_first_token", "", begin_ns, begin_ns + 5)]


@pytest.mark.parametrize(
    ("sample", "header", "traced"),
    [
        (1.0, TRACEPARENT[:-1] + "0", False),
        (0.0, "", False),
        (0.0, TRACEPARENT, True),
        (1.0, TRACEPARENT, True),
    ],
)
async def test_the_caller_decides_else_the_share(
    cluster: FakeCluster, exporter: InMemorySpanExporter, sample: float, header: str, traced: bool
) -> None:
    async with traced_gateway(cluster, sample=sample) as gateway:
        answer = await post(gateway.url, json=BODY, headers={"traceparent": header} if header else {})
    assert answer.status_code == 200
    assert ("traceparent" in answer.headers, bool(Traces(exporter).spans)) == (traced, traced)


@pytest.mark.parametrize(
    "headers",
    [
        [("traceparent", "nonsense")],
        [("traceparent", f"00-{'0' * 32}-{PARENT_ID}-01")],
        [("traceparent", f"ff-{TRACE_ID}-{PARENT_ID}-01")],
        [("traceparent", TRACEPARENT), ("traceparent", TRACEPARENT)],
        [("tracestate", "vendor=1")],
    ],
)
async def test_an_invalid_parent_is_none(
    cluster: FakeCluster, exporter: InMemorySpanExporter, headers: list[tuple[str, str]]
) -> None:
    async with traced_gateway(cluster) as gateway:
        assert (await post(gateway.url, json=BODY, headers=headers)).status_code == 200
    assert Traces(exporter).call.parent is None
    assert ids(Traces(exporter).call)[0] != TRACE_ID


async def test_a_call_without_a_key_is_not_traced(
    cluster: FakeCluster, exporter: InMemorySpanExporter, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text("sk-1\n")
    async with traced_gateway(cluster, api_key_file=str(keys)) as gateway:
        assert (await post(gateway.url, json=BODY, headers=PARENT)).status_code == 401
        async with grpc.aio.insecure_channel(gateway.grpc_address) as channel:
            call = inf_grpc.InferenceStub(channel).Generate(inf.GenerateRequest(prompt="a"))
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
    assert Traces(exporter).spans == []


def test_off_imports_nothing_of_opentelemetry() -> None:
    code = """
import asyncio, sys
import httpx
from support.fake_cluster import FakeCluster
from support.gateway import running_gateway

async def main():
    async with FakeCluster() as cluster, running_gateway(cluster) as gateway, httpx.AsyncClient() as http:
        answer = await http.post(f"{gateway.url}/v1/completions", json={"prompt": "a", "max_tokens": 2})
        assert answer.status_code == 200 and "traceparent" not in answer.headers
        assert gateway.server.tracing is None

asyncio.run(main())
print([name for name in sys.modules if name.partition(".")[0] == "opentelemetry"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


async def test_text_is_in_no_span_and_no_log(
    cluster: FakeCluster, exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "alignedserve")
    chat = {"messages": [{"role": "system", "content": "secret"}, *CHAT["messages"]], "max_tokens": 3}  # type: ignore[misc]
    async with traced_gateway(cluster) as gateway:
        tokenizer = gateway.server.model.tokenizer
        assert tokenizer is not None
        cluster.script = playing(tokenizer.encode("hidden words", special_tokens=False))
        answers = [
            await post(gateway.url, json={**BODY, "prompt": "a secret", "stop": ["secret"], "max_tokens": 20}),
            await post(gateway.url, "/v1/chat/completions", json=chat),
            await post(gateway.url, json={**BODY, "temperature": "secret"}),
        ]
    assert [answer.status_code for answer in answers] == [200, 200, 400]
    assert len(Traces(exporter).calls) == 3
    assert "hidden words" in answers[0].text
    for text in ("secret", "hidden", "words"):
        assert text not in Traces(exporter).text()
        assert text not in caplog.text


async def test_text_is_there_if_it_is_asked_for(cluster: FakeCluster, exporter: InMemorySpanExporter) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
    messages = [
        {"role": "user", "content": "secret"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "seen"},
    ]
    async with traced_gateway(cluster, content=True) as gateway:
        chat = await post(gateway.url, "/v1/chat/completions", json={**CHAT, "messages": messages})
        plain = await post(gateway.url, json={**BODY, "prompt": ["a secret", [5, 6]]})
    assert (chat.status_code, plain.status_code) == (200, 200)
    first, second = map(said, Traces(exporter).calls)
    parts = [part for message in json.loads(first["gen_ai.input.messages"]) for part in message["parts"]]
    assert parts == [
        {"type": "text", "content": "secret"},
        {"type": "tool_call", "id": "call_1", "name": "look", "arguments": '{"at": "it"}'},
        {"type": "tool_call_response", "id": "call_1", "response": "seen"},
    ]
    prompts = [message["parts"][0]["content"] for message in json.loads(second["gen_ai.input.messages"])]
    assert (len(prompts), prompts[0]) == (2, "a secret")
    written = json.loads(second["gen_ai.output.messages"])
    assert [one["parts"][0]["content"] for one in written] == [one["text"] for one in plain.json()["choices"]]
    assert {one["finish_reason"] for one in written} == {"length"}


async def test_lines_of_batches_and_probes_are_not_traced(cluster: FakeCluster, exporter: InMemorySpanExporter) -> None:
    async with traced_gateway(cluster) as gateway:
        tracing = gateway.server.tracing
        assert tracing is not None
        with tracing.call("chat", (), {}):  # even if they begin while a traced call is handled
            line = await gateway.server.batches.endpoints["/v1/completions"](BODY, 1_000_000)
            assert (await gateway.server.health()).missing == ()
        assert line["usage"]["completion_tokens"] == 3
    (call,) = Traces(exporter).spans
    assert "gen_ai.response.id" not in said(call)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """The gateway's log, as JSON."""
    logger = logging.getLogger("alignedserve")
    before = logger.handlers[:], logger.level, logger.propagate
    logs.setup(LogConfig(dir=str(tmp_path), format="json"), "gateway", "gateway-0")
    yield tmp_path / "gateway-0.log"
    logger.handlers[:], logger.level, logger.propagate = before


async def test_log_lines_name_trace_and_request(
    cluster: FakeCluster, exporter: InMemorySpanExporter, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(cluster: FakeCluster, spec: RequestSpec) -> None:
        if spec.key.epoch:
            await staged(cluster, spec)
        else:
            cluster.lose(spec.key, reason="decode-0 died")

    cluster.script = lost
    async with traced_gateway(cluster) as gateway:
        endpoint = gateway.server.batches.endpoints["/v1/completions"].__self__  # type: ignore[attr-defined]
        monkeypatch.setattr(endpoint, "before_end", broken)
        answer = await post(gateway.url, json=BODY)
    assert answer.status_code == 500
    lines = written(log)
    of_call = [line for line in lines if line["message"] in ("epoch 1: decode-0 died", "a request failed")]
    assert len(of_call) == 2
    assert {(line["trace_id"], line["span_id"]) for line in of_call} == {ids(Traces(exporter).call)}
    name = said(Traces(exporter).call)["gen_ai.response.id"]
    assert [line["request_id"] for line in of_call] == [f"{name}-0", name]
    assert not any("trace_id" in line for line in lines if line not in of_call)


def written(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


async def broken(*_: object) -> None:
    raise RuntimeError("a bug")
