"""Requests of `alignedserve.client`, and its handling of answers, statuses and bad arguments; sync and async."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from alignedserve.client import (
    AlignedServeError,
    CancelledError,
    Choice,
    Chunk,
    DeadlineError,
    InvalidRequestError,
    Logprob,
    Message,
    ModelCard,
    NotFoundError,
    OverloadedError,
    TooLargeError,
    UnavailableError,
    Usage,
)
from support.inference import LONG_TEXT, TIMINGS, ScriptedInference, ask_async, ask_sync, start_server

Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[ScriptedInference, str]]:
    service = ScriptedInference()
    server, address = start_server(service)
    yield service, address
    server.stop(0).wait()


@pytest.fixture
def service(running: tuple[ScriptedInference, str]) -> ScriptedInference:
    running[0].reset()
    return running[0]


@pytest.fixture(params=[ask_sync, ask_async], ids=["sync", "async"])
def ask(request: pytest.FixtureRequest, running: tuple[ScriptedInference, str], service: ScriptedInference) -> Ask:
    """`ask(method, *args, settings={...}, **options)`: one call with a new client."""

    def call(method: str, *args: Any, settings: dict[str, Any] | None = None, **options: Any) -> Any:
        return request.param(running[1], settings or {}, method, *args, **options)

    return call


def test_generate_returns_the_typed_answer(ask: Ask) -> None:
    completion = ask("generate", "go", logprobs=1, include_timings=True, request_id="mine")
    logprobs = (Logprob(7, " a", -0.5, (Logprob(8, " b", -1.0),)),)
    assert completion.choices == (Choice(0, " a b", (7, 8, 9), "length", logprobs),)
    assert (completion.text, completion.token_ids, completion.prompt_token_ids) == (" a b", (7, 8, 9), (1, 2))
    assert (completion.request_id, completion.model) == ("mine", "tiny")
    assert completion.usage == Usage(2, 3)
    assert completion.usage.total_tokens == 5
    assert completion.timings == TIMINGS


def test_stream_hands_over_each_piece(ask: Ask) -> None:
    first, last = ask("stream", "go", request_id="mine")
    assert first == Chunk("mine", "tiny", 0, " a", (7,), prompt_token_ids=(1, 2))
    assert last == Chunk("mine", "tiny", 0, " b", (8, 9), finish_reason="length", usage=Usage(2, 3))


def test_options_and_defaults_reach_the_server(ask: Ask, service: ScriptedInference) -> None:
    options = {"max_tokens": 9, "temperature": 0, "seed": -5, "stop_token_ids": [4], "n": 2, "ignore_eos": True}
    settings = {"model": "tiny", "application": "front", "timeout_s": 30}
    ask("generate", "go", settings=settings, stop="x", logit_bias={3: -1.5}, top_p=None, **options)
    (sent,) = service.requests
    assert {name: getattr(sent, name) for name in options} == options
    assert (sent.model, sent.timeout_s, list(sent.stop)) == ("tiny", 30, ["x"])
    assert [(entry.token_id, entry.bias) for entry in sent.logit_bias] == [(3, -1.5)]
    assert not sent.HasField("top_p")
    assert service.metadata["application"] == "front"
    assert "traceparent" not in service.metadata


def test_a_call_within_a_trace_is_a_part_of_it(ask: Ask, service: ScriptedInference) -> None:
    with TracerProvider().get_tracer("test").start_as_current_span("mine") as span:
        ask("generate", "go")
    context = span.get_span_context()
    assert service.metadata["traceparent"].startswith(f"00-{context.trace_id:032x}-{context.span_id:016x}-")


def test_a_call_may_lift_the_clients_limit_and_name_another_model(ask: Ask, service: ScriptedInference) -> None:
    ask("generate", "go", settings={"timeout_s": 0.001, "model": "tiny"}, timeout_s=float("inf"), model="other")
    assert not service.requests[0].HasField("timeout_s")
    assert service.requests[0].model == "other"


def test_token_ids_and_conversations_are_inputs_even_when_empty(ask: Ask, service: ScriptedInference) -> None:
    ask("generate", prompt_token_ids=iter([5, 6]))
    ask("stream", prompt_token_ids=[])
    ask("chat", [Message("system", "Be brief."), {"role": "user", "content": "Hi"}])
    assert ask("chat_stream", [])[0].text == " a"
    kinds = [request.WhichOneof("input") for request in service.requests]
    assert kinds == ["prompt_token_ids", "prompt_token_ids", "conversation", "conversation"]
    assert list(service.requests[0].prompt_token_ids.ids) == [5, 6]
    turns = [(turn.role, turn.content) for turn in service.requests[2].conversation.messages]
    assert turns == [("system", "Be brief."), ("user", "Hi")]


@pytest.mark.parametrize(
    ("status", "details", "kind"),
    [
        ("INVALID_ARGUMENT", "no [code=invalid_value param=messages[0]]", InvalidRequestError),
        ("INVALID_ARGUMENT", "no [code=request_too_large]", TooLargeError),
        ("NOT_FOUND", "no", NotFoundError),
        ("RESOURCE_EXHAUSTED", "no", OverloadedError),
        ("DEADLINE_EXCEEDED", "no", DeadlineError),
        ("CANCELLED", "no", CancelledError),
        ("UNAVAILABLE", "no", UnavailableError),
        ("INTERNAL", "no", AlignedServeError),
        ("UNIMPLEMENTED", "no", AlignedServeError),
    ],
)
@pytest.mark.parametrize("method", ["generate", "stream"])
def test_a_status_becomes_its_error(
    ask: Ask, method: str, status: str, details: str, kind: type[AlignedServeError]
) -> None:
    with pytest.raises(kind) as caught:
        ask(method, f"fail {status} {details}", request_id="mine", settings={"resume_s": 0, "max_retries": 0})
    assert type(caught.value) is kind
    assert str(caught.value) == "no"
    assert caught.value.details["status"] == status
    assert caught.value.details["request_id"] == "mine"
    assert pickle.loads(pickle.dumps(caught.value)).details == caught.value.details  # noqa: S301  # our own bytes


def test_what_stands_in_brackets_reaches_the_error(ask: Ask) -> None:
    with pytest.raises(OverloadedError) as full:
        ask("generate", "fail RESOURCE_EXHAUSTED full [code=overloaded retry-after-s=2.5]", max_retries=0)
    assert full.value.retry_after_s == 2.5
    with pytest.raises(InvalidRequestError) as bad:
        ask("generate", "fail INVALID_ARGUMENT [x] is bad [param=stop]")
    assert (bad.value.param, str(bad.value)) == ("stop", "[x] is bad")
    with pytest.raises(InvalidRequestError) as long:  # a code without a class in the client
        ask("generate", "fail INVALID_ARGUMENT too long [code=context_length_exceeded]")
    assert long.value.details["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("args", "options", "param"),
    [
        ((), {}, "prompt"),
        (("go",), {"prompt_token_ids": [1]}, "prompt"),
        (([1, 2],), {}, "prompt"),
        (("\ud800",), {}, "prompt"),
        ((), {"prompt_token_ids": "go"}, "prompt_token_ids"),
        ((), {"prompt_token_ids": [-1]}, "prompt_token_ids"),
        (("go",), {"max_token": 3}, "max_token"),
        (("go",), {"max_tokens": -1}, "max_tokens"),
        (("go",), {"temperature": "hot"}, "temperature"),
        (("go",), {"n": 0}, "n"),
        (("go",), {"stop": 3}, "stop"),
        (("go",), {"bad_words_ids": 3}, "bad_words_ids"),
        (("go",), {"structured_outputs": {"choice": "abc"}}, "structured_outputs"),
        (("go",), {"structured_outputs": {"choice": 5}}, "structured_outputs"),
        (("go",), {"logit_bias": [1]}, "logit_bias"),
        (("go",), {"logit_bias": {"a": 1.0}}, "logit_bias"),
        (("go",), {"max_retries": -1}, "max_retries"),
        (("go",), {"timeout_s": 0}, "timeout_s"),
        (("go",), {"timeout_s": float("nan")}, "timeout_s"),
        (("go",), {"timeout_s": "5"}, "timeout_s"),
        (("go",), {"temperature": 10**400}, "temperature"),
    ],
)
def test_a_malformed_argument_is_named_and_not_sent(
    ask: Ask, service: ScriptedInference, args: tuple[Any, ...], options: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ask("stream", *args, **options)
    assert caught.value.param == param
    assert service.requests == []


@pytest.mark.parametrize(
    "turn", ["hello", {"role": "user"}, {"role": "user", "content": None}, {"role": "user", "content": "", "nam": "x"}]
)
def test_a_malformed_turn_is_counted_and_not_sent(ask: Ask, service: ScriptedInference, turn: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[1\]") as caught:
        ask("chat", [Message("user", "Hi"), turn])
    assert caught.value.param == "messages"
    assert service.requests == []


@pytest.mark.parametrize("messages", [None, 3, float("nan")], ids=str)
def test_a_conversation_that_is_none_is_named_and_not_sent(ask: Ask, service: ScriptedInference, messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match="messages must be") as caught:
        ask("chat", messages)
    assert caught.value.param == "messages"
    assert service.requests == []


def test_a_misspelt_option_is_answered_with_the_nearest(ask: Ask) -> None:
    with pytest.raises(InvalidRequestError, match="did you mean 'temperature'"):
        ask("generate", "go", temprature=0.5)


def test_models_are_typed(ask: Ask) -> None:
    assert ask("models") == (ModelCard("tiny", 8192),)


def test_a_malformed_limit_of_a_call_that_generates_nothing_is_named(ask: Ask) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ask("models", timeout_s="5")
    assert caught.value.param == "timeout_s"


def test_cancelling_an_unknown_request_finds_nothing(ask: Ask) -> None:
    assert ask("cancel", "unknown") is False
    with pytest.raises(InvalidRequestError):
        ask("cancel", "")


def test_answers_of_megabytes_arrive(ask: Ask) -> None:
    assert ask("generate", "long").text == LONG_TEXT + " b"


def test_a_request_over_the_servers_limit_is_too_large_not_overload(ask: Ask) -> None:
    with pytest.raises(TooLargeError):
        ask("generate", "x" * 5_000_000)
