"""Conversations with tools: calls and results over a real gateway, errors, bounds; sync, async and streamed."""

from __future__ import annotations

import asyncio
import json
import pickle
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from alignedserve.client import (
    AsyncClient,
    ChatTurn,
    Chunk,
    Client,
    Completion,
    IncompleteAnswerError,
    InvalidRequestError,
    Message,
    Tool,
    ToolArgumentsError,
    ToolCall,
    ToolError,
    ToolFailedError,
    ToolResult,
    ToolRoundsError,
    ToolRun,
    UnknownToolError,
)
from alignedserve.client.tool_loop import ToolLoop, run_tools, run_tools_async
from alignedserve.client.types import Choice, ClientTimings, Usage
from alignedserve.model import resolve_model
from alignedserve.request import FinishReason
from alignedserve.text import Tokenizer
from support.fake_cluster import FakeCluster, fake_model_info, playing
from support.gateway import RunningGateway

TOKENIZER = Tokenizer.from_folder(resolve_model("tiny"))
assert TOKENIZER is not None
END = 5
HI = [Message("user", "hi")]
Converse = Callable[..., Any]


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with FakeCluster(info=fake_model_info(max_positions=2048)) as cluster:
        yield cluster


def ids(text: str) -> list[int]:
    assert TOKENIZER is not None
    return TOKENIZER.encode(text, special_tokens=False)


def text_of(tokens: Any) -> str:
    assert TOKENIZER is not None
    return TOKENIZER.backend.decode(list(tokens), skip_special_tokens=False)


def calling(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def look(place: str, days: int = 1) -> dict[str, Any]:
    """Look at a place."""
    return {"place": place, "days": days}


async def wait(place: str) -> str:
    """Look, slowly."""
    await asyncio.sleep(0)
    return f"{place} at last"


def fail(place: str) -> str:
    raise KeyError(place)


# ---- over a gateway


async def sync_run(gateway: RunningGateway, **options: Any) -> ToolRun:
    def run() -> ToolRun:
        with Client(gateway.grpc_address, timeout_s=20) as client:
            return client.run_tools(HI, **options)

    return await asyncio.to_thread(run)


async def sync_stream(gateway: RunningGateway, **options: Any) -> ToolRun:
    def run() -> ToolRun:
        with Client(gateway.grpc_address, timeout_s=20) as client, client.stream_tools(HI, **options) as stream:
            check_events(events := list(stream))
            return checked(stream.run(), events)

    return await asyncio.to_thread(run)


async def async_run(gateway: RunningGateway, **options: Any) -> ToolRun:
    async with AsyncClient(gateway.grpc_address, timeout_s=20) as client:
        return await client.run_tools(HI, **options)


async def async_stream(gateway: RunningGateway, **options: Any) -> ToolRun:
    async with AsyncClient(gateway.grpc_address, timeout_s=20) as client, client.stream_tools(HI, **options) as stream:
        check_events(events := [event async for event in stream])
        return checked(await stream.run(), events)


def check_events(events: list[Chunk | ToolResult]) -> None:
    """The results come after the chunks with their calls."""
    kinds = [type(event) for event in events]
    assert kinds[0] is Chunk
    assert kinds[-1] is Chunk


def checked(run: ToolRun, events: list[Chunk | ToolResult]) -> ToolRun:
    assert [event for event in events if isinstance(event, ToolResult)] == list(run.results)
    chunks = [event for event in events if isinstance(event, Chunk)]
    assert "".join(chunk.text for chunk in chunks).endswith(run.text)
    return run


WAYS = [sync_run, sync_stream, async_run, async_stream]


def answers(*texts: str) -> Any:
    """A script: the n-th request gets the n-th text."""
    left = list(texts)

    async def play(cluster: FakeCluster, spec: Any) -> None:
        tokens = ids(left.pop(0))
        await playing(*([token] for token in tokens), [END], finish=FinishReason.STOP)(cluster, spec)

    return play


@pytest.mark.parametrize("way", WAYS)
async def test_functions_are_called_until_there_is_an_answer(
    cluster: FakeCluster, gateway: RunningGateway, way: Converse
) -> None:
    both = f"{calling('look', {'place': 'Bern'})}\n{calling('look', {'place': 'Basel', 'days': 2})}"
    cluster.script = answers("I look.\n" + both, calling("look", {"place": "Chur"}), "Sunny.")
    run = await way(gateway, tools=[look], tool_choice="required", request_id="mine", max_tokens=100)
    assert (run.text, run.rounds) == ("Sunny.", 3)
    assert [result.value for result in run.results] == [
        {"place": "Bern", "days": 1}, {"place": "Basel", "days": 2}, {"place": "Chur", "days": 1}
    ]  # fmt: skip
    roles = [turn.role for turn in run.messages]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "tool", "assistant"]
    ids_of_calls = [result.call.id for result in run.results]
    assert len(set(ids_of_calls)) == 3
    assert [turn.tool_call_id for turn in run.messages if turn.role == "tool"] == ids_of_calls
    assert run.usage.completion_tokens == sum(len(spec.output_token_ids) for spec in cluster.submitted)
    first, _, last = cluster.submitted
    assert first.sampling.grammar is not None, "a call is forced, and strict"
    prompt = text_of(last.prompt_token_ids)
    assert '<tool_call>\n{"name": "look", "arguments": {"place": "Bern"}}\n</tool_call>' in prompt
    assert '<tool_response>\n{"place": "Chur", "days": 1}\n</tool_response>' in prompt


@pytest.mark.parametrize("way", WAYS)
async def test_an_answer_that_is_cut_in_a_call_ends_the_loop(
    cluster: FakeCluster, gateway: RunningGateway, way: Converse
) -> None:
    tokens = ids(calling("look", {"place": "Bern"}))[:-8]
    cluster.script = playing(tokens, finish=FinishReason.LENGTH)
    with pytest.raises(IncompleteAnswerError, match="max_tokens"):
        await way(gateway, tools=[Tool.of(look, strict=False)], max_tokens=len(tokens))


@pytest.fixture
async def asking(gateway: RunningGateway) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(gateway.grpc_address, timeout_s=20) as client:
        yield client


async def test_calls_in_chunks_are_those_of_the_whole(cluster: FakeCluster, asking: AsyncClient) -> None:
    text = f"I look.\n{calling('look', {'place': 'Bern'})}\n{calling('look', {'place': 'Chur'})}"
    options: Any = {"tools": [look], "request_id": "mine", "seed": 1}
    cluster.script = answers(text, text)
    whole = await asking.chat(HI, **options)
    stream = asking.chat_stream(HI, **options)
    parts = [part async for chunk in stream for part in chunk.tool_calls]
    assert [bool(part.name) for part in parts].count(True) == 2
    assert len(parts) > 6
    assert {part.index for part in parts} == {0, 1}
    joined = await stream.completion()
    assert joined.choices == whole.choices
    assert whole.choices[0].finish_reason == "tool_calls"
    assert [call.parsed_arguments["place"] for call in whole.tool_calls] == ["Bern", "Chur"]
    assert (whole.text, whole.parsed) == ("I look.", None)
    assert whole.message == Message("assistant", "I look.", tool_calls=whole.tool_calls)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [look], "tool_choice": "chop"}, "tool_choice"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"response_format": {"type": "array", "uniqueItems": True}}, "response_format"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"chat_template_kwargs": {"a": {1}}}, "chat_template_kwargs"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": {1}}}}]}, "tools"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "object"}}, "structured_outputs"),
        ({"prompt_logprobs": 99}, "prompt_logprobs"),
    ],
)
async def test_a_refusal_names_the_option(asking: AsyncClient, options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await asking.chat(HI, **options)
    assert caught.value.param == param


async def test_tools_of_a_prompt_are_refused_by_name(asking: AsyncClient) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await asking.generate("hi", tools=[look])
    assert caught.value.param == "tools"
    for option in ({"best_of": 2}, {"prompt_logprobs": 1}):
        with pytest.raises(InvalidRequestError, match="streamed"):
            await asking.stream("hi", **option).completion()  # type: ignore[arg-type]


async def test_the_best_answers_and_the_prompt_s_scores_come_back(cluster: FakeCluster, asking: AsyncClient) -> None:
    from alignedserve.request import TokenLogprobs

    async def play(cluster: FakeCluster, spec: Any) -> None:
        number = int(spec.key.request_id.rpartition("-")[2])
        prompt = [
            TokenLogprobs(-float(position), ((7, -0.5),), 3) for position in range(len(spec.prompt_token_ids) - 1)
        ]
        scored = prompt if spec.sampling.prompt_logprobs is not None else []
        logprobs = [TokenLogprobs(-abs(number - 1) - 1.0)]
        cluster.emit(spec, [100 + number], logprobs=logprobs, prompt_logprobs=scored, finish=FinishReason.LENGTH)

    cluster.script = play
    answer = await asking.generate("ab cd", best_of=3, n=2, max_tokens=1, prompt_logprobs=1)
    assert [choice.token_ids for choice in answer.choices] == [(101,), (100,)]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage.completion_tokens == 3
    assert len(answer.prompt_logprobs) == len(answer.prompt_token_ids)
    assert answer.prompt_logprobs[0] is None
    second = answer.prompt_logprobs[1]
    assert second is not None
    assert (second.token_id, second.logprob, second.rank) == (answer.prompt_token_ids[1], 0.0, 3)
    assert [(top.token_id, top.logprob) for top in second.top] == [(7, -0.5)]


# ---- the loop alone


def answered(*calls: tuple[str, str], text: str = "", finish: str = "tool_calls") -> Completion:
    found = tuple(ToolCall(f"call_{number}", name, arguments) for number, (name, arguments) in enumerate(calls))
    choice = Choice(0, text, (), finish, tool_calls=found)
    return Completion("r", "m", (), (choice,), Usage(1, 2, 1), ClientTimings(0.1))


def converse(*replies: Completion, max_rounds: int = 5, on_error: Any = "raise", **options: Any) -> ToolRun:
    left = list(replies)

    def ask(messages: Any, **options: Any) -> Completion:
        return left.pop(0)

    return run_tools(ToolLoop(HI, {"tools": [look, fail], **options}, max_rounds, on_error, tasks=False), ask)  # type: ignore[typeddict-item]


DONE = answered(text="done", finish="stop")


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (("chop", "{}"), UnknownToolError),
        (("look", "{"), ToolArgumentsError),
        (("look", '{"place": 3}'), ToolArgumentsError),
        (("look", "{}"), ToolArgumentsError),
        (("fail", '{"place": "Bern"}'), ToolFailedError),
    ],
)
def test_a_call_that_fails_is_a_typed_error_or_is_told(wrong: tuple[str, str], error: type[ToolError]) -> None:
    with pytest.raises(error) as caught:
        converse(answered(wrong), DONE)
    assert caught.value.call == ToolCall("call_0", *wrong)
    assert caught.value.messages[0] == HI[0]
    assert isinstance(caught.value.__cause__, KeyError) is (error is ToolFailedError)
    again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301
    assert (type(again), again.call, again.code) == (error, caught.value.call, error.code)

    run = converse(answered(wrong, ("look", '{"place": "Chur"}')), DONE, on_error="tell")
    told, fine = run.results
    assert type(told.error) is error
    assert told.text == f"error: {caught.value.message}"
    assert fine.value == {"place": "Chur", "days": 1}
    assert run.usage == Usage(2, 4, 2)


def test_nothing_is_called_when_one_of_several_calls_is_wrong() -> None:
    called = []

    def note(place: str) -> None:
        called.append(place)

    with pytest.raises(UnknownToolError):
        converse(answered(("note", '{"place": "a"}'), ("chop", "{}")), tools=[note])
    assert called == []


def test_rounds_are_bounded() -> None:
    again = answered(("look", '{"place": "Bern"}'))
    with pytest.raises(ToolRoundsError, match="2 rounds") as caught:
        converse(again, again, DONE, max_rounds=2)
    assert [turn.role for turn in caught.value.messages] == ["user", "assistant", "tool", "assistant"]
    assert converse(again, DONE, max_rounds=2).rounds == 2


def test_a_call_that_is_cut_is_not_made() -> None:
    with pytest.raises(IncompleteAnswerError):
        converse(answered(("look", '{"place": "Be'), finish="length"))


def test_a_forced_call_that_has_not_begun_is_no_answer() -> None:
    cut = answered(finish="length")
    assert converse(cut).rounds == 1
    for choice in ("required", look):
        with pytest.raises(IncompleteAnswerError, match="'length' ended the answer before the call"):
            converse(cut, tool_choice=choice)
    assert converse(answered(("look", '{"place": "Bern"}')), cut, tool_choice="required").rounds == 2


def test_what_a_function_returns_must_have_a_form_as_json() -> None:
    def thing() -> Any:
        return threading.Lock()

    with pytest.raises(ToolFailedError, match="no form as JSON"):
        converse(answered(("thing", "")), tools=[thing])


@pytest.mark.parametrize(
    ("options", "param"),
    [({"tools": []}, "tools"), ({"tools": [wait]}, "tools"), ({"tools": [look, look]}, "tools"), ({"n": 2}, "n"),
     ({"tools": [{"type": "function"}]}, "tools"), ({"max_rounds": 0}, "max_rounds"), ({"on_error": "no"}, "on_error")],
)  # fmt: skip
def test_a_loop_that_cannot_be_is_refused(options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        converse(DONE, **options)
    assert caught.value.param == param


async def test_async_calls_of_one_answer_run_together() -> None:
    met = asyncio.Barrier(2)
    here = threading.get_ident()
    threads = []

    async def meet(place: str) -> str:
        async with asyncio.timeout(5):
            await met.wait()
        return place

    def plain(place: str) -> str:
        threads.append(threading.get_ident())
        return place

    left = [answered(("meet", '{"place": "a"}'), ("meet", '{"place": "b"}'), ("plain", '{"place": "c"}')), DONE]

    async def ask(messages: list[ChatTurn], **options: Any) -> Completion:
        return left.pop(0)

    loop = ToolLoop(HI, {"tools": [meet, plain]}, 3, "raise", tasks=True)
    run = await run_tools_async(loop, ask)
    assert [result.text for result in run.results] == ["a", "b", "c"]
    assert threads != [here]


async def test_an_async_call_that_fails_waits_for_the_others() -> None:
    ended = []

    async def slow(place: str) -> str:
        await asyncio.sleep(0.01)
        ended.append(place)
        return place

    left = [answered(("fail", '{"place": "a"}'), ("slow", '{"place": "b"}'))]

    async def ask(messages: list[ChatTurn], **options: Any) -> Completion:
        return left.pop(0)

    with pytest.raises(ToolFailedError):
        await run_tools_async(ToolLoop(HI, {"tools": [fail, slow]}, 3, "raise", tasks=True), ask)
    assert ended == ["b"]


@dataclass
class Held:
    closed: bool = False

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True

    def __iter__(self) -> Any:
        yield Chunk("r", "m", 0, "a", ())
        yield Chunk("r", "m", 0, "b", ())


def test_leaving_a_stream_early_closes_the_open_request() -> None:
    from alignedserve.client import ToolStream

    held = Held()
    with ToolStream(ToolLoop(HI, {"tools": [look]}, 3, "raise", tasks=False), lambda *_, **__: held) as stream:
        first = next(stream)
        assert (isinstance(first, Chunk) and first.text, held.closed) == ("a", False)
    assert held.closed
