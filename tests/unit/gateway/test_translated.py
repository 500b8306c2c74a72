"""/v1/responses and /v1/messages with the clients that people use, and what their bodies become."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import orjson
import pytest
from openai.types.responses import Response

from alignedserve.errors import InvalidRequestError, TransferError
from alignedserve.gateway.failures import UnsupportedFeatureError
from alignedserve.gateway.translated import messages_request, responses_request
from alignedserve.gateway.translated.messages_request import parse_messages
from alignedserve.gateway.translated.responses_request import parse_responses
from alignedserve.model import resolve_model
from alignedserve.request import FinishReason, RequestSpec
from alignedserve.text import Tokenizer
from support.fake_cluster import FakeCluster, playing
from support.gateway import RunningGateway, running_gateway

TOKENIZER = Tokenizer.from_folder(resolve_model("tiny"))
assert TOKENIZER is not None
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
USE = {"type": "tool_use", "id": "1", "name": "f"}
DEEP: Any = orjson.loads("[" * 300 + "]" * 300)
DEEPER: Any = orjson.loads("[" * 1000 + "]" * 1000)


def ids(text: str) -> list[int]:
    assert TOKENIZER is not None
    return TOKENIZER.encode(text)


async def failing(cluster: FakeCluster, spec: RequestSpec) -> None:
    cluster.emit(spec, ids(" value"))
    await asyncio.sleep(0.02)  # it waits in the gateway's stream to its client
    cluster.emit(spec, error=TransferError("a copy could not be trusted"))


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=10.0) as client:
        yield client


@pytest.fixture
async def claude(gateway: RunningGateway) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0, timeout=10.0) as client:
        yield client


# ---- responses


async def test_a_response_whole(client: openai.AsyncOpenAI, cluster: FakeCluster) -> None:
    cluster.script = playing(ids(" value"), ids(" of it"), finish=FinishReason.STOP)
    answer = await client.responses.create(model="tiny", input="Return the", instructions="Be short.", temperature=0)
    assert answer.output_text == " value of it"
    assert (answer.status, answer.instructions, answer.temperature) == ("completed", "Be short.", 0)
    assert answer.usage is not None
    assert answer.usage.output_tokens == len(ids(" value")) + len(ids(" of it"))
    assert cluster.submitted[0].sampling.temperature == 0


async def test_a_streamed_response_is_the_whole_one(client: openai.AsyncOpenAI, cluster: FakeCluster) -> None:
    cluster.script = playing(ids(" value"), ids(" of"), ids(" it"), pause_s=0.01)
    stream = await client.responses.create(
        model="tiny",
        input=[USER],
        max_output_tokens=9,
        stream=True,
        top_logprobs=1,  # type: ignore[list-item]
    )
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    pieces = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in pieces) == " value of it"
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == " value of it"
    assert last.response.incomplete_details is not None
    assert last.response.incomplete_details.reason == "max_output_tokens"
    Response.model_validate(last.response.model_dump(), strict=True)


async def test_openais_helper_assembles_a_streamed_response(client: openai.AsyncOpenAI, cluster: FakeCluster) -> None:
    cluster.script = playing(ids(" value"), ids(" of it"), finish=FinishReason.STOP)
    async with client.responses.stream(model="tiny", input="Return the") as stream:
        text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
        answer = await stream.get_final_response()
    assert text == answer.output_text == " value of it"


async def test_a_streamed_response_that_fails_ends_so(client: openai.AsyncOpenAI, cluster: FakeCluster) -> None:
    cluster.script = failing
    events = [event async for event in await client.responses.create(model="tiny", input="Return the", stream=True)]
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == ("server_error", "a copy could not be trusted")


async def test_a_refused_response_names_the_clients_own_fields(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="tiny", input="hi", max_output_tokens=0)
    assert caught.value.param == "max_output_tokens"
    assert "max_output_tokens must" in caught.value.message
    for fields, param in (
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"input": "hi " * 3000}, "input"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**{"model": "tiny", "input": "hi", **fields})
        assert caught.value.param == param
    assert (await client.responses.create(model="tiny", input="hi", max_output_tokens=100_000)).output_text


async def test_a_response_that_fails_has_what_was_written(client: openai.AsyncOpenAI, cluster: FakeCluster) -> None:
    cluster.script = failing
    tool: Any = {"type": "function", "name": "f", "parameters": SCHEMA}
    asked = client.responses.create(model="tiny", input="Return the", stream=True, tools=[tool])
    events = [event async for event in await asked]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.output_text == " value"
    assert last.response.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert last.response.tools[0].to_dict() == {**tool, "description": None, "strict": None}


def chat(**fields: Any) -> dict[str, Any]:
    return responses_request._chat_body(responses_request.Fields({"input": "hi", **fields}, ""))[0]


def test_items_become_messages() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "y"}]},
        {"role": "developer", "content": "d"},
    ]
    calls = [
        {"id": number, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for number, name in (("1", "f"), ("2", "g"))
    ]
    assert chat(input=items, instructions="i")["messages"] == [
        {"role": "system", "content": "i"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
        {"role": "tool", "tool_call_id": "2", "content": "y"},
        {"role": "developer", "content": "d"},
    ]


def test_tools_formats_and_effort_become_chats() -> None:
    tool = {"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}
    wanted = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    named = {"type": "function", "name": "f"}
    body = chat(tools=[tool], tool_choice=named, text={"format": wanted}, top_k=3)
    assert body["tools"] == [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert body["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
    }
    assert body["top_k"] == 3
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    body = chat(tools=[tool, {**tool, "name": "g"}], tool_choice=allowed, reasoning={"effort": "low"})
    assert [one["function"]["name"] for one in body["tools"]] == ["f", "g"]
    (only,) = body["tool_choice"]["allowed_tools"]["tools"]
    assert (only["function"], body["reasoning_effort"]) == ({"name": "f"}, "low")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "middle"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "searching"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "name": ["a"]}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f"}, {"type": "web_search", "x": DEEP}]}, "tools"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"input": 3}, "input"),
        ({"input": [USER, {"type": "function_call", "name": "f"}]}, "input[1].arguments"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "f"}]}}, "tool_choice.tools"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "any", "tools": []}}, "tool_choice.mode"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"max_tool_calls": "3"}, "max_tool_calls"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"store": "yes"}, "store"),
        ({"metadata": {"a": DEEP}}, "metadata"),
        ({"reasoning": {"a": DEEP}}, "reasoning"),
        ({"input": [{"role": "user", "content": "x", "a": DEEP}]}, "input"),
        ({"include": [DEEPER]}, "include"),
        ({"text": {"format": {"type": DEEP}}}, "text"),
    ],
)
def test_what_responses_refuses_it_names(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_responses({"input": "hi", **fields})
    assert caught.value.param == param


@pytest.mark.parametrize("name", ["reasoning", "text", "tool_choice", "input", "metadata"])
def test_what_an_answer_could_not_repeat_is_refused(name: str) -> None:
    deep: Any = {}
    for _ in range(250):
        deep = {"deep": deep}
    value = [{"role": "user", "content": "hi", **deep}] if name == "input" else deep
    with pytest.raises(InvalidRequestError, match="nests deeper") as refused:
        parse_responses({"input": "hi", name: value})
    assert refused.value.param == name


def test_an_input_that_fits_needs_no_truncation() -> None:
    assert parse_responses({"input": "hi", "truncation": "auto"}).ignored == []


def test_what_has_no_effect_is_named() -> None:
    body = {"input": "hi", "reasoning": {"summary": "auto", "other": 1}, "text": {"x": 1}, "unknown": 1, "n": 1}
    assert set(parse_responses(body).ignored) == {"reasoning.other", "text.x", "unknown"}
    for tools in ([], [{"type": "function", "name": "f", "parameters": SCHEMA}]):  # it is a limit of OpenAI's own tools
        assert parse_responses({"input": "hi", "tools": tools, "max_tool_calls": 3}).ignored == ["max_tool_calls"]
    thinking = {"type": "adaptive", "display": "omitted"}
    message = parse_messages(
        {"model": "tiny", "max_tokens": 5, "messages": [USER], "metadata": {"user_id": "u"}, "thinking": thinking}
    )
    assert set(message.ignored) == {"metadata.user_id", "thinking.display"}


# ---- messages


async def test_a_message_whole(claude: anthropic.AsyncAnthropic, cluster: FakeCluster) -> None:
    cluster.script = playing(ids(" value"), ids(" of it"), finish=FinishReason.STOP)
    answer = await claude.messages.create(model="tiny", max_tokens=9, messages=[USER], system="Be short.")  # type: ignore[list-item]
    assert [block.model_dump(exclude_none=True) for block in answer.content] == [
        {"type": "text", "text": " value of it"}
    ]
    assert (answer.stop_reason, answer.role) == ("end_turn", "assistant")
    assert answer.usage.output_tokens == len(ids(" value")) + len(ids(" of it"))
    assert answer.usage.input_tokens > len(ids("hi"))


async def test_a_streamed_message_is_the_whole_one(claude: anthropic.AsyncAnthropic, cluster: FakeCluster) -> None:
    cluster.script = playing(ids(" value"), ids(" of"), ids(" it"), pause_s=0.01)
    async with claude.messages.stream(model="tiny", max_tokens=9, messages=[USER], stop_sequences=[" it"]) as stream:  # type: ignore[list-item]
        text = "".join([piece async for piece in stream.text_stream])
        answer = await stream.get_final_message()
    assert text == " value of"
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " it")
    assert answer.usage.output_tokens == len(ids(" value of it"))


async def test_a_stream_begins_once_whatever_its_first_tokens_show(
    http: httpx.AsyncClient, cluster: FakeCluster
) -> None:
    first, rest = ids(" \u20ac")[:1], ids(" \u20ac")[1:]
    cluster.script = playing(first, rest, ids(" it"), pause_s=0.02)
    body = {"model": "tiny", "max_tokens": 9, "messages": [USER], "stop_sequences": [" \u20ac\u20ac"], "stream": True}
    text = (await http.post("/v1/messages", json=body)).text
    assert text.count("event: message_start") == text.count("event: message_stop") == text.count("event: ping") == 1


async def test_a_message_that_is_cut_says_so(claude: anthropic.AsyncAnthropic, cluster: FakeCluster) -> None:
    cluster.script = playing(ids(" value"))
    answer = await claude.messages.create(model="tiny", max_tokens=1, messages=[USER])  # type: ignore[list-item]
    assert answer.stop_reason == "max_tokens"


async def test_an_answer_that_the_client_begins_goes_on(claude: anthropic.AsyncAnthropic, cluster: FakeCluster) -> None:
    begun: list[Any] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It is <b>"}]
    message = await claude.messages.create(model="tiny", max_tokens=8, messages=begun)
    assert message.content[0].type == "text"
    counted = await claude.messages.count_tokens(model="tiny", messages=begun)
    (spec,) = cluster.submitted
    assert counted.input_tokens == message.usage.input_tokens == len(spec.prompt_token_ids)
    assert TOKENIZER is not None
    text = TOKENIZER.decode(spec.prompt_token_ids, skip_special=False)
    assert text.endswith("<|user|>hi<|end|><|assistant|>It is <b>")


async def test_a_wrong_tool_is_named_as_the_client_wrote_it(
    claude: anthropic.AsyncAnthropic, client: openai.AsyncOpenAI
) -> None:
    tool: Any = {"name": "f", "input_schema": {"type": "array"}}
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]\.input_schema: arguments are an object"):
        await claude.messages.create(model="tiny", max_tokens=1, messages=[USER], tools=[tool])  # type: ignore[list-item]
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="tiny", input="hi", tools=[{"type": "function", "name": "a b"}])  # type: ignore[list-item]
    assert caught.value.param == "tools[0].name"


async def test_tokens_are_counted_as_the_prompt_has_them(
    claude: anthropic.AsyncAnthropic, cluster: FakeCluster
) -> None:
    tool = {"name": "f", "description": "d", "input_schema": SCHEMA}
    asked: Any = {"model": "tiny", "messages": [USER], "system": "Be short.", "tools": [tool]}
    counted = await claude.messages.count_tokens(**asked)
    cluster.script = playing(ids(" value"))
    answer = await claude.messages.create(max_tokens=1, thinking={"type": "disabled"}, **asked)
    assert counted.input_tokens == answer.usage.input_tokens == len(cluster.submitted[0].prompt_token_ids)


async def test_tokens_of_a_response_are_counted_as_the_prompt_has_them(
    client: openai.AsyncOpenAI, cluster: FakeCluster
) -> None:
    tool = {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": False}
    asked: Any = {"model": "tiny", "input": "hi", "instructions": "Be short.", "tools": [tool]}
    counted = await client.responses.input_tokens.count(**asked)
    assert counted.object == "response.input_tokens"
    assert not cluster.submitted
    cluster.script = playing(ids(" value"))
    answer = await client.responses.create(**asked)
    assert counted.input_tokens == answer.usage.input_tokens == len(cluster.submitted[0].prompt_token_ids)
    with pytest.raises(openai.NotFoundError):
        await client.responses.input_tokens.count(model="other", input="hi")


async def test_errors_have_anthropics_shape(
    claude: anthropic.AsyncAnthropic, cluster: FakeCluster, http: httpx.AsyncClient
) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        await claude.messages.create(model="other", max_tokens=1, messages=[USER])  # type: ignore[list-item]
    answer = await http.post("/v1/messages", json={"model": "tiny", "messages": [USER]})
    assert answer.status_code == 400
    error = {"type": "invalid_request_error", "message": "max_tokens is required"}
    assert answer.json() == {"type": "error", "error": error}
    cluster.script = failing
    with pytest.raises(anthropic.APIStatusError, match="could not be trusted"):
        async with claude.messages.stream(model="tiny", max_tokens=9, messages=[USER]) as stream:  # type: ignore[list-item]
            await stream.get_final_message()


async def test_a_key_that_is_missing_is_an_error_in_anthropics_shape(cluster: FakeCluster, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text("sk-known\n")
    async with running_gateway(cluster, api_key_file=str(keys)) as gateway:
        known, unknown = (
            anthropic.AsyncAnthropic(base_url=gateway.url, api_key=key, max_retries=0) for key in ("sk-known", "sk-no")
        )
        async with known, unknown, httpx.AsyncClient(base_url=gateway.url) as http:
            asked: Any = {"model": "tiny", "max_tokens": 1, "messages": [USER]}
            assert (await known.messages.create(**asked)).stop_reason == "max_tokens"
            for ask in (unknown.messages.create(**asked), unknown.messages.count_tokens(model="tiny", messages=[])):
                with pytest.raises(anthropic.AuthenticationError) as caught:
                    await ask
                assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
            wrong = (await http.get("/v1/messages"), await http.post("/v1/messages", headers={"content-encoding": "x"}))
    assert [answer.status_code for answer in wrong] == [405, 401]
    assert {answer.json()["type"] for answer in wrong} == {"error"}


def of_messages(**fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "max_tokens": 5, "messages": [USER], **fields}
    return messages_request._chat_body(messages_request.Fields(body, ""), [])


def test_blocks_become_chats_messages() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "y"}]},
                {"type": "text", "text": "c"},
            ],
        },
    ]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
    assert of_messages(messages=messages, system=[{"type": "text", "text": "s"}])["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "1", "content": "y"},
        {"role": "user", "content": "c"},
    ]


@pytest.mark.parametrize(("said", "told"), [("no city", "Error: no city"), ("", "Error"), ("error: x", "error: x")])
def test_a_template_is_told_that_a_tool_failed(said: str, told: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": said, "is_error": True}
    called = {"role": "assistant", "content": [{**USE, "input": {}}]}
    (*_, message) = of_messages(messages=[called, {"role": "user", "content": [result]}])["messages"]
    assert message == {"role": "tool", "tool_call_id": "1", "content": told}


def test_tools_thinking_and_formats_become_chats() -> None:
    tool = {"name": "f", "description": "d", "input_schema": SCHEMA}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = of_messages(tools=[tool], tool_choice=choice, thinking=thinking, top_k=4, stop_sequences=["x"])
    assert body["tools"] == [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}},
    ]
    assert (body["tool_choice"], body["parallel_tool_calls"]) == ("required", False)
    assert (body["enable_thinking"], body["thinking_token_budget"]) == (True, 1024)
    assert (body["top_k"], body["stop"]) == (4, ["x"])
    config = {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}}
    body = of_messages(tool_choice={"type": "tool", "name": "f"}, output_config=config)
    assert body["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert body["response_format"]["json_schema"]["schema"] == SCHEMA
    assert body["reasoning_effort"] == "high"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"continue_final_message": True}, "continue_final_message"),
        (
            {
                "messages": [USER, {"role": "assistant", "content": "{"}],
                "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
            },
            "output_config.format",
        ),
        ({"messages": [{"role": "system", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
        ({"tools": [{"name": "w"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"stop_sequences": [3]}, "stop_sequences"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [USER, {"role": "assistant", "content": [{**USE, "input": {}}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": [{**USE, "input": "{}"}]}]}, "messages[0].content[0].input"),
        ({"n": 2}, "n"),
        ({"stop": ["x"]}, "stop"),
        ({"logprobs": True}, "logprobs"),
        ({"metadata": {"user_id": 3}}, "metadata.user_id"),
        ({"output_config": {"effort": "wild"}}, "output_config.effort"),
        ({"messages": [USER, {"role": "robot", "content": "x"}]}, "messages[1].role"),
        (
            {"messages": [{"role": "assistant", "content": [{**USE, "input": DEEP}]}]},
            "messages[0].content[0].input",
        ),
    ],
)
def test_what_messages_refuses_it_names(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_messages({"model": "tiny", "max_tokens": 5, "messages": [USER], **fields})
    assert caught.value.param == param


@pytest.mark.parametrize("parse", [parse_responses, parse_messages])
@pytest.mark.parametrize("body", [None, [], "x", {"input": [[]]}, {"input": {}, "tools": 3}, {"messages": [None]}])
def test_other_shapes_are_refused(parse: Any, body: Any) -> None:
    with pytest.raises(InvalidRequestError):
        parse(body)


def test_a_field_that_chat_refuses_is_refused() -> None:
    with pytest.raises(UnsupportedFeatureError, match="beam"):
        parse_responses({"input": "hi", "use_beam_search": True})
