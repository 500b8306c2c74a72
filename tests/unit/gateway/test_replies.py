"""Replies of a running gateway: OpenAI's own client, server-sent events, logprobs, echo, stop strings, extensions."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from alignedserve.control.samples import value
from alignedserve.errors import AlignedServeError, OverloadedError, TransferError
from alignedserve.model import resolve_model
from alignedserve.request import FinishReason, RequestSpec, Stage, TokenLogprobs
from alignedserve.text import Tokenizer
from support.fake_cluster import FakeCluster, playing, silent_script
from support.gateway import RunningGateway, running_gateway

HI: list[Any] = [{"role": "user", "content": "hi"}]
TOKENIZER = Tokenizer.from_folder(resolve_model("tiny"))
assert TOKENIZER is not None
EOS = 5


def ids(text: str) -> list[int]:
    assert TOKENIZER is not None
    return TOKENIZER.encode(text)


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=10.0) as client:
        yield client


async def sse(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    """All events of a stream, parsed, except "[DONE]"."""
    async with http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        text = (await answer.aread()).decode()
    events = text.split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    return [event[6:] if event == "data: [DONE]" else json.loads(event[6:]) for event in events]


def joined(events: list[Any], index: int = 0) -> str:
    """The text of one choice in a completion's chunks."""
    return "".join(c["text"] for e in events if e != "[DONE]" for c in e["choices"] if c["index"] == index)


# ---- OpenAI's client


async def test_openai_completions(client: openai.AsyncOpenAI, cluster: FakeCluster) -> None:
    cluster.script = playing(ids(" value"), ids(" of it"))
    answer = await client.completions.create(model="tiny", prompt="Return the", max_tokens=9, temperature=0)
    assert answer.choices[0].text == " value of it"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids("Return the"))
    assert answer.usage.completion_tokens == len(ids(" value")) + len(ids(" of it"))
    assert answer.id.startswith("cmpl-")
    assert cluster.submitted[0].sampling.temperature == 0


async def test_openai_completions_streamed(client: openai.AsyncOpenAI, cluster: FakeCluster) -> None:
    cluster.script = playing(ids(" value"), ids(" of"), ids(" it"), pause_s=0.01)
    stream = await client.completions.create(
        model="tiny", prompt="Return the", stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == " value of it"
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert not chunks[-1].choices


async def test_openai_chat(client: openai.AsyncOpenAI, cluster: FakeCluster) -> None:
    cluster.script = playing(ids("Hello"), [EOS], finish=FinishReason.STOP)
    answer = await client.chat.completions.create(model="tiny", messages=HI)
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(ids("Hello")) + 1


async def test_openai_chat_streamed(client: openai.AsyncOpenAI, cluster: FakeCluster) -> None:
    cluster.script = playing(ids("Hel"), ids("lo"), [EOS], finish=FinishReason.STOP, pause_s=0.01)
    stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True, n=2)
    texts = {0: "", 1: ""}
    roles: list[int] = []
    finished: list[int] = []
    async for chunk in stream:
        (choice,) = chunk.choices
        if choice.delta.role:
            roles.append(choice.index)
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            finished.append(choice.index)
    assert texts == {0: "Hello", 1: "Hello"}
    assert sorted(roles) == sorted(finished) == [0, 1]


async def test_openai_sync_client(gateway: RunningGateway, cluster: FakeCluster) -> None:
    cluster.script = playing(ids("Hello"))

    def use() -> tuple[str | None, str, list[str]]:
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=10.0) as client:
            whole = client.chat.completions.create(model="tiny", messages=HI, max_completion_tokens=8)
            streamed = client.completions.create(model="tiny", prompt="hi", stream=True)
            text = "".join(chunk.choices[0].text for chunk in streamed)
            return whole.choices[0].message.content, text, [model.id for model in client.models.list()]

    assert await asyncio.to_thread(use) == ("Hello", "Hello", ["tiny"])


async def test_openai_errors_have_their_types(client: openai.AsyncOpenAI, cluster: FakeCluster) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="other", messages=HI)
    with pytest.raises(openai.BadRequestError) as raised:
        await client.chat.completions.create(model="tiny", messages=HI, temperature=3)
    assert (raised.value.param, raised.value.code) == ("temperature", "invalid_value")

    async def overloaded(cluster: FakeCluster, spec: RequestSpec) -> None:
        cluster.reject(OverloadedError("the pool is full", retry_after_s=2.5), spec.key)

    cluster.script = overloaded
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError) as limited:
            await client.completions.create(model="tiny", prompt="hi", stream=stream)
        assert limited.value.response.headers["retry-after"] == "3"
        assert "the pool is full" in str(limited.value)


async def test_openai_logprobs_in_chat(client: openai.AsyncOpenAI, cluster: FakeCluster) -> None:
    token, other = ids("Hello")[0], ids("é")[0]

    async def scored(cluster: FakeCluster, spec: RequestSpec) -> None:
        entry = TokenLogprobs(-0.5, ((token, -0.5), (other, float("-inf"))))
        cluster.emit(spec, [token], logprobs=[entry], finish=FinishReason.LENGTH)

    cluster.script = scored
    answer = await client.chat.completions.create(model="tiny", messages=HI, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    (entry,) = logprobs.content
    assert TOKENIZER is not None
    assert (entry.token, entry.logprob) == (TOKENIZER.token_text(token), -0.5)
    assert bytes(entry.bytes or []) == TOKENIZER.piece(token)
    assert [top.logprob for top in entry.top_logprobs] == [-0.5, -9999.0]


# ---- shapes


async def test_every_prompts_answers_are_numbered(http: httpx.AsyncClient, cluster: FakeCluster) -> None:
    async def tell(cluster: FakeCluster, spec: RequestSpec) -> None:
        number = spec.prompt_token_ids[0]
        cluster.emit(spec, [number, int(spec.key.request_id.rpartition("-")[2]) + 100], finish=FinishReason.LENGTH)

    cluster.script = tell
    body = {"prompt": [[300], [400]], "n": 2, "max_tokens": 2, "return_token_ids": True}
    answer = (await http.post("/v1/completions", json=body)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["token_ids"] for choice in answer["choices"]] == [[300, 100], [300, 101], [400, 102], [400, 103]]
    assert answer["prompt_token_ids"] == [[300], [400]]
    usage = {"prompt_tokens": 2, "completion_tokens": 8, "total_tokens": 10}
    assert answer["usage"] == {**usage, "prompt_tokens_details": {"cached_tokens": 0}}


async def test_echo_begins_with_the_prompt(http: httpx.AsyncClient, cluster: FakeCluster) -> None:
    cluster.script = playing(ids(" value"))
    body = {"prompt": "Return the", "echo": True, "max_tokens": 4}
    assert (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"] == "Return the value"
    assert joined(await sse(http, "/v1/completions", body)) == "Return the value"
    body["prompt"] = ids("Return the")
    assert (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"] == "Return the value"


async def test_echo_alone_computes_nothing(http: httpx.AsyncClient, cluster: FakeCluster) -> None:
    body = {"prompt": ["ab", "cd"], "echo": True, "max_tokens": 0}
    answer = (await http.post("/v1/completions", json=body)).json()
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "cd"]
    assert answer["usage"]["completion_tokens"] == 0
    events = await sse(http, "/v1/completions", body)
    assert (joined(events, 0), joined(events, 1), events[-1]) == ("ab", "cd", "[DONE]")
    assert not cluster.submitted


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_echo_with_logprobs_scores_the_prompt(
    http: httpx.AsyncClient, cluster: FakeCluster, max_tokens: int
) -> None:
    prompt, value = ids("Return the list"), ids(" value")[0]

    async def score(cluster: FakeCluster, spec: RequestSpec) -> None:
        scores = [TokenLogprobs(-float(number), ((7, -0.1),)) for number in range(1, len(prompt))]
        entry = TokenLogprobs(-9.0, ((value, -9.0),))
        cluster.emit(spec, [value], logprobs=[entry], prompt_logprobs=scores, finish=FinishReason.LENGTH)

    cluster.script = score
    body = {"prompt": "Return the list", "echo": True, "max_tokens": max_tokens, "logprobs": 1}
    answer = (await http.post("/v1/completions", json=body)).json()
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    expected = [None, *(-float(number) for number in range(1, len(prompt))), *([-9.0] * max_tokens)]
    assert logprobs["token_logprobs"] == expected
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(logprobs["top_logprobs"]) == len(expected)
    assert logprobs["top_logprobs"][0] is None
    assert "".join(logprobs["tokens"]) == choice["text"]
    for name, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(name)
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == max_tokens
    events = await sse(http, "/v1/completions", body)
    streamed = [value for event in events[:-1] for value in event["choices"][0]["logprobs"]["token_logprobs"]]
    assert streamed == expected


async def test_older_logprobs_hold_the_chosen_token(http: httpx.AsyncClient, cluster: FakeCluster) -> None:
    first, second, other = ids(" value")[0], ids("😀")[0], ids(" list")[0]

    async def score(cluster: FakeCluster, spec: RequestSpec) -> None:
        entries = [TokenLogprobs(-2.0, ((other, -0.5),)), TokenLogprobs(-1.0, ())]
        cluster.emit(spec, [first, second], logprobs=entries, finish=FinishReason.LENGTH)

    cluster.script = score
    answer = (await http.post("/v1/completions", json={"prompt": "a", "logprobs": 1, "max_tokens": 2})).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"][0] == {" list": -0.5, " value": -2.0}
    assert logprobs["tokens"][1].startswith("bytes:\\x")
    assert logprobs["text_offset"] == [0, len(" value")]


async def test_token_ids_come_with_every_chunk(http: httpx.AsyncClient, cluster: FakeCluster) -> None:
    smile = ids("😀")
    cluster.script = playing(*([token] for token in smile), ids(" ok"), pause_s=0.01)
    body = {"prompt": "Return the", "return_token_ids": True, "include_timings": True}
    events = await sse(http, "/v1/completions", body)
    chunks = events[:-1]
    assert chunks[0]["prompt_token_ids"] == ids("Return the")
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == smile + ids(" ok")
    assert chunks[0]["choices"][0] == {**chunks[0]["choices"][0], "text": "", "token_ids": smile[:1]}
    assert joined(events) == "😀 ok"
    assert [("timings" in chunk) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


async def test_chat_chunks_carry_token_ids_from_the_first(http: httpx.AsyncClient, cluster: FakeCluster) -> None:
    cluster.script = playing(ids("Hello"))
    events = await sse(http, "/v1/chat/completions", {"messages": HI, "return_token_ids": True})
    assert events[0]["prompt_token_ids"] == cluster.submitted[0].prompt_token_ids
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[0]["choices"][0]["token_ids"] == []
    assert events[1]["choices"][0]["token_ids"] == ids("Hello")


async def test_timings_say_where_the_time_went(http: httpx.AsyncClient, cluster: FakeCluster) -> None:
    async def two_workers(cluster: FakeCluster, spec: RequestSpec) -> None:
        cluster.emit(spec, [300], role="prefill")
        await asyncio.sleep(0.02)
        cluster.emit(spec, [301], role="decode", finish=FinishReason.LENGTH)

    cluster.script = two_workers
    answer = (await http.post("/v1/completions", json={"prompt": "a", "include_timings": True})).json()
    timings = answer["timings"]
    seconds = {f"{stage}_s" for stage in ("queue", "prefill", "pool", "prefetch", "handover", "decode")}
    assert timings.keys() == seconds | {"prefill_id", "decode_id", "cached_tokens"}, "no bubble without a cost model"
    assert (timings["prefill_id"], timings["decode_id"], timings["prefill_s"]) == ("prefill-0", "decode-0", 0.25)
    answer = (await http.post("/v1/completions", json={"prompt": "a", "include_timings": True, "n": 2})).json()
    assert all("timings" in choice for choice in answer["choices"])


async def test_an_answer_that_a_stop_string_ends_has_timings(http: httpx.AsyncClient, cluster: FakeCluster) -> None:
    """Its worker's last event comes too late."""
    text = ids("one two three")

    async def two_workers(cluster: FakeCluster, spec: RequestSpec) -> None:
        cluster.emit(spec, text[:1], role="prefill", timed=True)
        spec.stopwatch.enter(Stage.DECODE, time.time_ns())
        cluster.emit(spec, text[1:2], timed=True)
        await asyncio.sleep(0.05)
        cluster.emit(spec, text[2:])

    cluster.script = two_workers
    body = {"prompt": "a", "include_timings": True, "stop": ["three"]}
    answer = (await http.post("/v1/completions", json=body)).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert 0.05 <= answer["timings"]["decode_s"] < 10.0
    metrics = (await http.get("/metrics")).text
    assert value(metrics, "alignedserve_gateway_stage_seconds_sum", stage="decode") >= 0.05


async def test_answers_that_end_at_once_have_the_timings_of_the_last_with_the_last_chunk(
    http: httpx.AsyncClient, cluster: FakeCluster
) -> None:
    cluster.script = silent_script
    body = {"prompt": "a", "include_timings": True, "n": 2, "max_tokens": 1}
    for options, timed in (({}, [False, True]), ({"stream_options": {"include_usage": True}}, [False, False, True])):
        cluster.submitted.clear()
        streaming = asyncio.create_task(sse(http, "/v1/completions", {**body, **options}))
        await cluster.wait_for(lambda: len(cluster.submitted) == 2)
        cluster.emit_together(cluster.submitted, [100], FinishReason.LENGTH)
        events = (await streaming)[:-1]
        assert ["timings" in event for event in events] == timed
        assert ["timings" in choice for event in events for choice in event["choices"]] == [True, True]


# ---- stop strings and text


async def test_a_stop_string_across_tokens_cuts_the_text(http: httpx.AsyncClient, cluster: FakeCluster) -> None:
    text = ids("one two END three")
    cluster.script = playing(*([token] for token in text), pause_s=0.002)
    body = {"prompt": "a", "stop": ["END"], "max_tokens": 50, "return_token_ids": True}
    events = await sse(http, "/v1/completions", body)
    assert joined(events) == "one two "
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert TOKENIZER is not None
    delivered = [token for event in events[:-1] for token in event["choices"][0]["token_ids"]]
    assert "END" in TOKENIZER.decode(delivered)
    assert "END" not in TOKENIZER.decode(delivered[:-1])
    await cluster.wait_for(lambda: cluster.cancelled)
    answer = (await http.post("/v1/completions", json=body)).json()
    assert answer["choices"][0]["text"] == "one two "
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["token_ids"] == delivered
    assert answer["usage"]["completion_tokens"] == len(delivered)


async def test_a_worker_that_finds_the_stop_string_needs_no_cancel(
    http: httpx.AsyncClient, cluster: FakeCluster
) -> None:
    cluster.script = playing(ids("one "), ids("END"), finish=FinishReason.STOP)
    answer = (await http.post("/v1/completions", json={"prompt": "a", "stop": "END"})).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("one ", "stop")
    assert not cluster.cancelled


async def test_text_that_only_looked_like_a_stop_string_is_released(
    http: httpx.AsyncClient, cluster: FakeCluster
) -> None:
    cluster.script = playing(ids("one E"), ids("N"), pause_s=0.01)
    events = await sse(http, "/v1/completions", {"prompt": "a", "stop": "END"})
    assert joined(events) == "one EN"


async def test_a_stop_token_is_no_text(http: httpx.AsyncClient, cluster: FakeCluster) -> None:
    stop = ids(" list")[0]
    cluster.script = playing([*ids("one"), stop], finish=FinishReason.STOP)
    body = {"prompt": "a", "stop_token_ids": [stop], "return_token_ids": True}
    (choice,) = (await http.post("/v1/completions", json=body)).json()["choices"]
    assert (choice["text"], choice["token_ids"][-1], choice["finish_reason"]) == ("one", stop, "stop")


async def test_a_character_split_over_tokens_is_sent_whole(http: httpx.AsyncClient, cluster: FakeCluster) -> None:
    text = "naïve 😀 你好"
    cluster.script = playing(*([token] for token in ids(text)), pause_s=0.001)
    events = await sse(http, "/v1/chat/completions", {"messages": HI})
    pieces = [event["choices"][0]["delta"].get("content", "") for event in events[:-1]]
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)


async def test_a_model_without_a_tokenizer_answers_in_token_ids(cluster: FakeCluster, tmp_path: Any) -> None:
    async with (
        running_gateway(cluster, model_path=tmp_path) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as http,
    ):
        body = {"prompt": [5, 6], "max_tokens": 3, "return_token_ids": True, "logprobs": 0}
        (choice,) = (await http.post("/v1/completions", json=body)).json()["choices"]
        assert (choice["text"], choice["token_ids"]) == ("", [100, 101, 102])
        assert choice["logprobs"]["tokens"] == ["token_id:100", "token_id:101", "token_id:102"]
        assert [event["choices"][0]["text"] for event in (await sse(http, "/v1/completions", body))[:-1]]


# ---- failures


async def fails_after_a_token(cluster: FakeCluster, spec: RequestSpec) -> None:
    cluster.emit(spec, ids("one"))
    await asyncio.sleep(0.02)
    cluster.emit(spec, error=TransferError("a copy could not be trusted"))


async def test_a_failure_in_a_stream_is_its_last_event(http: httpx.AsyncClient, cluster: FakeCluster) -> None:
    cluster.script = fails_after_a_token
    events = await sse(http, "/v1/completions", {"prompt": "a"})
    assert joined(events[:-1]) == "one"
    assert events[-1]["error"]["code"] == "transfer_failed"
    assert events[-1]["error"]["message"] == "a copy could not be trusted"


async def test_a_failure_before_the_first_token_is_a_status(http: httpx.AsyncClient, cluster: FakeCluster) -> None:
    async def fail(cluster: FakeCluster, spec: RequestSpec) -> None:
        cluster.emit(spec, error=AlignedServeError("boom"))

    cluster.script = fail
    for stream in (True, False):
        answer = await http.post("/v1/completions", json={"prompt": "a", "stream": stream})
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")


async def test_one_answer_that_fails_ends_the_whole_call(http: httpx.AsyncClient, cluster: FakeCluster) -> None:
    async def second_fails(cluster: FakeCluster, spec: RequestSpec) -> None:
        if spec.key.request_id.endswith("-1"):
            cluster.emit(spec, error=TransferError("lost"))

    cluster.script = second_fails
    answer = await http.post("/v1/completions", json={"prompt": "a", "n": 3})
    assert answer.status_code == 500
    await cluster.wait_for(lambda: len(cluster.cancelled) == 2)
    assert {key.request_id[-2:] for key in cluster.cancelled} == {"-0", "-2"}


async def test_a_time_limit_ends_a_request(http: httpx.AsyncClient, cluster: FakeCluster) -> None:
    cluster.script = silent_script
    answer = await http.post("/v1/completions", json={"prompt": "a", "timeout_s": 0.1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "deadline_exceeded")
    assert answer.headers["x-should-retry"] == "false"  # to the openai package
    await cluster.wait_for(lambda: cluster.cancelled)
    assert 50_000_000 < cluster.submitted[0].deadline_ns - cluster.submitted[0].arrival_ns <= 100_000_000


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token_is_cancelled(
    http: httpx.AsyncClient, cluster: FakeCluster, gateway: RunningGateway, stream: bool
) -> None:
    cluster.script = silent_script
    waiting = asyncio.create_task(http.post("/v1/completions", json={"prompt": "a", "stream": stream, "n": 2}))
    await cluster.wait_for(lambda: len(cluster.submitted) == 2)
    waiting.cancel()
    await cluster.wait_for(lambda: len(cluster.cancelled) == 2, timeout_s=1.0)
    assert {key.request_id for key in cluster.cancelled} == {spec.key.request_id for spec in cluster.submitted}
    assert len(gateway.server.ledger) == 0


async def test_a_client_that_leaves_a_stream_is_cancelled(
    http: httpx.AsyncClient, cluster: FakeCluster, gateway: RunningGateway
) -> None:
    cluster.script = playing(*([300] for _ in range(400)), pause_s=0.01)
    async with http.stream(
        "POST", "/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 400}
    ) as answer:
        async for line in answer.aiter_lines():
            assert line.startswith("data: ")
            break
    await cluster.wait_for(lambda: cluster.cancelled, timeout_s=1.0)
    assert len(gateway.server.ledger) == 0


async def test_a_curl_like_request_over_a_bare_socket(gateway: RunningGateway, cluster: FakeCluster) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = b'{"prompt": "hi", "max_tokens": 2, "stream": true}'
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    writer.write(head.encode() + b"Connection: close\r\nExpect: 100-continue\r\n\r\n" + body)
    answer = await asyncio.wait_for(reader.read(), 5.0)
    writer.close()
    assert b" 200 OK\r\n" in answer
    assert b"data: [DONE]\n\n" in answer


async def test_many_streams_at_once_get_their_own_tokens(http: httpx.AsyncClient, cluster: FakeCluster) -> None:
    async def own(cluster: FakeCluster, spec: RequestSpec) -> None:
        for number in range(20):
            cluster.emit(spec, [spec.prompt_token_ids[0]], finish=FinishReason.LENGTH if number == 19 else None)
            await asyncio.sleep(0.001)

    cluster.script = own

    async def one(number: int) -> list[int]:
        body = {"prompt": [number], "max_tokens": 20, "return_token_ids": True}
        events = await sse(http, "/v1/completions", body)
        return [token for event in events[:-1] for token in event["choices"][0]["token_ids"]]

    answers = await asyncio.gather(*map(one, range(200, 260)))
    assert answers == [[number] * 20 for number in range(200, 260)]
