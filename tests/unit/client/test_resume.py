"""A stream whose connection breaks continues through another one: same tokens and text, no duplicates."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from typing import Any

import grpc
import pytest

from alignedserve.client import AsyncClient, CancelledError, Chunk, Client, DeadlineError, UnavailableError
from alignedserve.model import resolve_model
from alignedserve.proto import inference_pb2 as inf
from alignedserve.proto.inference_pb2_grpc import InferenceStub
from alignedserve.request import FinishReason
from alignedserve.text import StoppableText, Tokenizer
from support.fake_cluster import FakeCluster, silent_script
from support.forwarder import Forwarder
from support.gateway import RunningGateway, running_gateway
from support.pauses import STEPS, Pauses

TOKENIZER = Tokenizer.from_folder(resolve_model("tiny"))
assert TOKENIZER is not None
EOS = 5
TEXT = "naïve 你好 – 🙂 stop_here and go on"


def ids(text: str) -> list[int]:
    assert TOKENIZER is not None
    return TOKENIZER.encode(text, special_tokens=False)


TOKENS = [*ids(TEXT), EOS]


@pytest.fixture
async def stub(gateway: RunningGateway) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(gateway.grpc_address) as channel:
        yield InferenceStub(channel)


def joined(chunks: Sequence[Chunk]) -> dict[int, tuple[str, list[int], list[float], str | None]]:
    """Text, tokens, log-probabilities and finish reason of each answer, by index."""
    answers = {}
    for index in sorted({chunk.index for chunk in chunks}):
        mine = [chunk for chunk in chunks if chunk.index == index]
        answers[index] = (
            "".join(chunk.text for chunk in mine),
            [token for chunk in mine for token in chunk.token_ids],
            [entry.logprob for chunk in mine for entry in chunk.logprobs],
            mine[-1].finish_reason,
        )
    return answers


@pytest.mark.parametrize("options", [{}, {"n": 2}, {"stop": "here"}, {"min_tokens": 6, "stop": ["–", "zz"]}], ids=str)
async def test_a_stream_over_connections_that_break_is_the_undisturbed_one(
    cluster: FakeCluster, gateway: RunningGateway, options: dict[str, Any]
) -> None:
    calm, broken = Pauses(TOKENS), Pauses(TOKENS)
    calm.gate.set()
    options = {"max_tokens": 64, "logprobs": 0, **options}
    async with Forwarder([gateway.grpc_address]) as forwarder, AsyncClient(forwarder.address) as client:
        cluster.script = calm
        expected = [chunk async for chunk in client.stream("a", **options)]
        cluster.script = broken
        chunks, breaks = [], 0
        stream = client.stream("a", **options)
        async for chunk in stream:
            chunks.append(chunk)
            paused = [len(tokens) % STEPS == 0 or bool(end) for _, tokens, _, end in joined(chunks).values()]
            if len(paused) == options.get("n", 1) and all(paused):
                breaks += forwarder.cut()  # everything generated so far has arrived, and no more will come
    assert breaks > 1
    assert joined(chunks) == joined(expected)
    assert chunks[-1].usage == expected[-1].usage
    assert [bool(chunk.prompt_token_ids) for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    assert {chunk.request_id for chunk in chunks} == {stream.request_id}
    seeds = {spec.sampling.seed for spec in cluster.submitted}
    assert len(cluster.submitted) > len(seeds) == 2 * len(joined(chunks)), "an answer keeps its own"


async def test_answers_that_end_at_once_have_one_usage_with_the_last_chunk(
    cluster: FakeCluster, gateway: RunningGateway
) -> None:
    cluster.script = silent_script
    async with AsyncClient(gateway.grpc_address) as client:
        stream = client.stream("a", n=3, max_tokens=2, include_timings=True)
        waiting = asyncio.create_task(collect(stream))
        await cluster.wait_for(lambda: len(cluster.submitted) == 3)
        cluster.emit_together(cluster.submitted, [100, 101], FinishReason.LENGTH)
        chunks = await waiting
        answer = await stream.completion()
    assert [chunk.finish_reason for chunk in chunks] == ["length"] * 3
    assert [(chunk.usage is not None, chunk.timings is not None) for chunk in chunks] == [
        (False, False),
        (False, False),
        (True, True),
    ]
    assert [choice.token_ids for choice in answer.choices] == [(100, 101)] * 3
    assert answer.usage.completion_tokens == 6


async def test_a_call_goes_on_after_any_of_its_tokens(cluster: FakeCluster, stub: Any) -> None:
    """Also if the cut is inside a character or a stop string: the text held back follows, then the rest."""
    script = cluster.script = Pauses(TOKENS)
    script.gate.set()
    stops = ["and go off"]
    shown = StoppableText(TOKENIZER, stops, ids("a"))
    given = 0
    for cut in range(len(TOKENS)):
        request = inf.GenerateRequest(prompt="a", max_tokens=64, seed=1, stop=stops)
        request.resume.add(token_ids=TOKENS[:cut])
        rest = [chunk async for chunk in stub.Stream(request)]
        assert "".join(chunk.choice.text for chunk in rest) == TEXT[given:]
        assert [token for chunk in rest for token in chunk.choice.token_ids] == TOKENS[cut:]
        assert rest[-1].usage.completion_tokens == len(TOKENS)
        assert rest[0].seed == 1
        given += len(shown.push(TOKENS[cut]))


async def test_an_end_that_was_not_heard_of_is_told_without_work(cluster: FakeCluster, stub: Any) -> None:
    for tokens, options, finish, text in (
        (TOKENS, {}, "stop", ""),
        (TOKENS[:4], {"max_tokens": 4}, "length", None),
        (ids("x stop_here"), {"stop": ["here"]}, "stop", ""),
    ):
        request = inf.GenerateRequest(prompt="a", seed=1, **{"max_tokens": 64, **options})
        request.resume.add(token_ids=tokens)
        (chunk,) = [chunk async for chunk in stub.Stream(request)]
        assert (chunk.choice.finish_reason, list(chunk.choice.token_ids)) == (finish, [])
        assert text is None or chunk.choice.text == text
        assert chunk.usage.completion_tokens == len(tokens)
    assert not cluster.submitted


async def test_an_answer_that_has_ended_is_left_alone(cluster: FakeCluster, stub: Any) -> None:
    script = cluster.script = Pauses(TOKENS)
    script.gate.set()
    request = inf.GenerateRequest(prompt="a", seed=1, max_tokens=64, n=2)
    request.resume.add(token_ids=TOKENS, finish_reason="stop")
    request.resume.add(token_ids=TOKENS[:2])
    chunks = [chunk async for chunk in stub.Stream(request)]
    assert {chunk.choice.index for chunk in chunks} == {1}
    assert chunks[-1].usage.completion_tokens == 2 * len(TOKENS)
    assert len(cluster.submitted) == 1
    assert cluster.submitted[0].sampling.seed != 1, "the second answer's own"


@pytest.mark.parametrize(
    ("resume", "options", "words"),
    [
        ([{"token_ids": [1]}], {}, "needs the seed"),
        ([{"token_ids": [1] * 5}], {"seed": 1, "max_tokens": 4}, "5 tokens, more than max_tokens, 4"),
        ([{"token_ids": [2048]}], {"seed": 1}, "token id 2048 is outside"),
        ([{"token_ids": [1]}], {"seed": 1, "n": 2}, "each of the 2 answers, got 1"),
        ([{"finish_reason": "error"}], {"seed": 1}, "finish_reason must be"),
    ],
)
async def test_nonsense_is_refused(
    cluster: FakeCluster, stub: Any, resume: list[Any], options: dict[str, Any], words: str
) -> None:
    request = inf.GenerateRequest(prompt="a", resume=resume, **options)
    with pytest.raises(grpc.aio.AioRpcError, match=words) as refused:
        await stub.Generate(request)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not cluster.submitted


async def test_a_named_call_takes_the_place_of_the_one_that_it_goes_on_with(
    cluster: FakeCluster, gateway: RunningGateway, stub: Any
) -> None:
    script = cluster.script = Pauses(TOKENS)
    old = aiter(stub.Stream(inf.GenerateRequest(prompt="a", max_tokens=64, request_id="mine")))
    first = await anext(old)
    await cluster.wait_for(lambda: script.waiting)
    script.gate.set()
    again = inf.GenerateRequest(prompt="a", max_tokens=64, request_id="mine", seed=first.seed)
    again.resume.add(token_ids=first.choice.token_ids)
    script.gate.clear()
    rest = asyncio.ensure_future(stub.Generate(again))
    with pytest.raises(grpc.aio.AioRpcError, match="another connection"):
        await collect(old)
    await cluster.wait_for(lambda: cluster.cancelled)
    script.gate.set()
    tokens = [*first.choice.token_ids, *(await rest).choices[0].token_ids]
    assert tokens == TOKENS
    assert len(gateway.server.ledger) == 0


async def test_a_gateway_that_ends_hands_its_streams_to_the_next(cluster: FakeCluster, gateway: RunningGateway) -> None:
    script = cluster.script = Pauses(TOKENS)
    async with (
        running_gateway(cluster, gateway_id="gateway-1") as second,
        Forwarder([gateway.grpc_address]) as forwarder,
        AsyncClient(forwarder.address) as client,
    ):
        stream = client.stream("a", max_tokens=64, request_id="mine")
        chunks = [await anext(stream)]
        await cluster.wait_for(lambda: script.waiting)
        gateway.server.ledger.close_all()
        rest = asyncio.create_task(collect(stream))
        await asyncio.sleep(0.1)  # it hears so
        assert not rest.done()
        forwarder.targets = [second.grpc_address]
        forwarder.cut()
        await cluster.wait_for(lambda: len(second.server.ledger))
        script.gate.set()
        chunks += await rest
    assert joined(chunks)[0][:2] == (TEXT, TOKENS)


async def collect(stream: AsyncIterable[Any]) -> list[Any]:
    return [chunk async for chunk in stream]


async def test_a_whole_answer_is_asked_for_again(cluster: FakeCluster, gateway: RunningGateway) -> None:
    script = cluster.script = Pauses(TOKENS)
    async with Forwarder([gateway.grpc_address]) as forwarder, AsyncClient(forwarder.address) as client:
        waiting = asyncio.create_task(client.generate("a", max_tokens=64, request_id="mine"))
        await cluster.wait_for(lambda: script.waiting)
        assert forwarder.cut() == 1
        await cluster.wait_for(lambda: len(cluster.submitted) == 2)
        script.gate.set()
        assert (await waiting).text == TEXT
    await cluster.wait_for(lambda: len(gateway.server.ledger) == 0)


async def test_patience_has_an_end(cluster: FakeCluster, gateway: RunningGateway) -> None:
    script = cluster.script = Pauses(TOKENS)
    for patience_s, options, kind in (
        (0.0, {}, UnavailableError),
        (0.4, {}, UnavailableError),
        (60.0, {"timeout_s": 0.5}, DeadlineError),
    ):
        async with (
            Forwarder([gateway.grpc_address]) as forwarder,
            AsyncClient(forwarder.address, resume_s=patience_s) as client,
        ):
            stream = client.stream("a", max_tokens=64, **options)
            await anext(stream)
            await cluster.wait_for(lambda: script.waiting)
            begun_s = time.monotonic()
            forwarder.targets.clear()
            forwarder.cut()
            with pytest.raises(kind) as failed:
                await collect(stream)
            seconds = time.monotonic() - begun_s
            assert failed.value.details["request_id"] == stream.request_id
            assert patience_s == 60.0 or patience_s <= seconds
            assert seconds < min(patience_s, 1.0) + 3.0
        await cluster.wait_for(lambda: len(gateway.server.ledger) == 0)
        script.gate.set()
        script.gate = asyncio.Event()


def test_a_server_that_is_not_there_is_said_so_at_once() -> None:
    begun_s = time.monotonic()
    with Client("127.0.0.1:1") as client, pytest.raises(UnavailableError):
        client.generate("a")
    assert time.monotonic() - begun_s < 5.0


async def test_the_blocking_client_goes_on_too(cluster: FakeCluster, gateway: RunningGateway) -> None:
    script = cluster.script = Pauses(TOKENS)
    async with Forwarder([gateway.grpc_address]) as forwarder:
        with Client(forwarder.address) as client:
            stream = client.stream("a", max_tokens=64)
            chunks = [await asyncio.to_thread(next, stream)]
            await cluster.wait_for(lambda: script.waiting)
            forwarder.cut()
            script.gate.set()
            chunks += await asyncio.to_thread(list, stream)
    assert joined(chunks)[0][:2] == (TEXT, TOKENS)


async def test_closing_ends_a_stream_that_waits_for_its_server(cluster: FakeCluster, gateway: RunningGateway) -> None:
    cluster.script = silent_script
    async with Forwarder([gateway.grpc_address]) as forwarder:
        with Client(forwarder.address, resume_s=60.0) as client:
            stream = client.stream("a")
            waiting = asyncio.create_task(asyncio.to_thread(list, stream))
            await cluster.wait_for(lambda: cluster.submitted)
            forwarder.targets.clear()
            forwarder.cut()
            await cluster.wait_for(lambda: forwarder.accepted > 2)
            stream.close()
            with pytest.raises(CancelledError):
                await waiting


async def test_a_stream_that_goes_on_keeps_its_limit(cluster: FakeCluster, gateway: RunningGateway) -> None:
    script = cluster.script = Pauses(TOKENS)
    cluster.publish_capacity(100)
    await cluster.wait_for(lambda: gateway.server.model.capacity_tokens == 100)
    async with Forwarder([gateway.grpc_address]) as forwarder, AsyncClient(forwarder.address) as client:
        stream = client.chat_stream([{"role": "user", "content": "hi"}])
        await anext(stream)
        await cluster.wait_for(lambda: script.waiting)
        cluster.publish_capacity(200)
        await cluster.wait_for(lambda: gateway.server.model.capacity_tokens == 200)
        forwarder.cut()
        script.gate.set()
        await collect(stream)
    first, *_, last = cluster.submitted
    assert last is not first
    assert last.sampling.max_tokens == first.sampling.max_tokens < 100


async def test_only_what_has_tokens_goes_on_in_a_full_cluster(
    cluster: FakeCluster, gateway: RunningGateway, stub: Any
) -> None:
    script = cluster.script = Pauses(TOKENS)
    script.gate.set()
    cluster.publish_intake(0, again_s=30.0)
    cluster.publish_capacity(400)
    await cluster.wait_for(lambda: gateway.server.model.capacity_tokens == 400)
    request = inf.GenerateRequest(prompt="a", seed=1, max_tokens=64)
    request.resume.add()
    with pytest.raises(grpc.aio.AioRpcError, match="full"):
        await stub.Generate(request)
    assert not cluster.submitted
    request.resume[0].token_ids.extend(TOKENS[:2])
    assert list((await stub.Generate(request)).choices[0].token_ids) == TOKENS[2:]
    assert cluster.submitted[0].key.epoch == 1
    gateway.server.intake._max_calls = 0
    with pytest.raises(grpc.aio.AioRpcError, match="which is its limit"):
        await stub.Generate(request)
