"""What coding agents send to /v1/responses whatever the model is, and what strict clients need of OpenAI's APIs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import unquote

import httpx
import openai
import pytest

from alignedserve.gateway.dialects.model_dialects import choose_dialects
from alignedserve.gateway.translated import responses_request
from alignedserve.model import resolve_model
from alignedserve.request import FinishReason
from alignedserve.text import Tokenizer
from support.fake_cluster import FakeCluster, fake_model_info, playing
from support.gateway import RunningGateway

TOKENIZER = Tokenizer.from_folder(resolve_model("tiny"))
assert TOKENIZER is not None
IGNORED = "x-alignedserve-ignored-fields"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"q": {"type": "string"}}}


def ids(text: str) -> list[int]:
    assert TOKENIZER is not None
    return TOKENIZER.encode(text)


def saying(cluster: FakeCluster, text: str, *, at_once: bool = False) -> None:
    steps = [ids(text)] if at_once else [[token] for token in ids(text)]
    cluster.script = playing(*steps, finish=FinishReason.STOP, pause_s=0.001)


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def text_item(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def codexs(**fields: Any) -> dict[str, Any]:
    """A body as Codex sends it to a provider that it does not know."""
    return {
        "model": "tiny",
        "instructions": "Be a coding agent.",
        "input": [text_item("developer", "Sandbox."), text_item("user", "Files."), text_item("user", "Hello.")],
        "tools": [
            {"type": "function", "name": "exec", "description": "d", "strict": False, "parameters": SCHEMA},
            {"type": "web_search", "external_web_access": False},
            {"type": "custom", "name": "patch", "description": "d",
             "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}},
            {"type": "namespace", "name": "mcp__docs", "description": "d",
             "tools": [{"type": "function", "name": "find", "parameters": SCHEMA}]},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "c",
        "text": {"verbosity": "low"},
        **fields,
    }  # fmt: skip


def ignored(answer: httpx.Response) -> set[str]:
    return set(unquote(answer.headers[IGNORED]).split(", "))


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def prompt_of(cluster: FakeCluster) -> str:
    assert TOKENIZER is not None
    return TOKENIZER.decode(list(cluster.submitted[-1].prompt_token_ids), skip_special=False)


async def test_an_agents_tools_are_called_by_the_names_that_it_knows(
    http: httpx.AsyncClient, gateway: RunningGateway, cluster: FakeCluster
) -> None:
    gateway.server.model.info = fake_model_info(max_positions=4096)
    saying(cluster, call("mcp__docs__find", q="a") + call("patch", input="one\ntwo") + call("exec", q="ls"))
    answer = await http.post("/v1/responses", json=codexs(stream=True))
    assert answer.status_code == 200, answer.text
    assert {"tools[1]", "tools[2].format", "reasoning.effort", "text.verbosity"} <= ignored(answer)
    prompt = prompt_of(cluster)
    assert [prompt.index(text) for text in ("Be a coding agent.", "Sandbox.", "Files.", "Hello.")] == sorted(
        prompt.index(text) for text in ("Be a coding agent.", "Sandbox.", "Files.", "Hello.")
    )
    events = events_of(answer)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    about = [{key: item.get(key) for key in ("type", "namespace", "name", "arguments", "input")} for item in done]
    assert about == [
        {"type": "function_call", "namespace": "mcp__docs", "name": "find", "arguments": '{"q": "a"}', "input": None},
        {"type": "custom_tool_call", "namespace": None, "name": "patch", "arguments": None, "input": "one\ntwo"},
        {"type": "function_call", "namespace": None, "name": "exec", "arguments": '{"q": "ls"}', "input": None},
    ]
    written = "".join(event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta")
    assert written == "one\ntwo"
    response = events[-1]["response"]
    assert (response["status"], response["output"]) == ("completed", done)
    assert response["tools"][1] == {"type": "web_search", "external_web_access": False}
    assert response["text"] == {"format": {"type": "text"}, "verbosity": "low"}

    results = [
        {"type": "function_call_output", "call_id": done[0]["call_id"], "output": [
            {"type": "input_text", "text": "found"}, {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
        ]},
        {"type": "custom_tool_call_output", "call_id": done[1]["call_id"], "output": "patched"},
        {"type": "function_call_output", "call_id": done[2]["call_id"], "output": "files"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
    ]  # fmt: skip
    saying(cluster, "Done.")
    again = await http.post("/v1/responses", json=codexs(input=[*codexs()["input"], *done, *results]))
    assert again.status_code == 200, again.text
    assert again.json()["output"][0]["content"][0]["text"] == "Done."
    assert {"input[6].output[1]", "input[9]"} <= ignored(again)
    prompt = prompt_of(cluster)
    for text in (call("mcp__docs__find", q="a"), call("patch", input="one\ntwo"), "found[an image", "patched"):
        assert text in prompt, text


async def test_hosted_tools_cannot_be_chosen(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="tool_choice of type web_search"):
        await client.responses.create(**codexs(tool_choice={"type": "web_search"}))
    with pytest.raises(openai.BadRequestError, match="tools of type functoin are not supported"):
        await client.responses.create(**codexs(tools=[{"type": "functoin", "name": "f"}]))
    wrong = {"type": "function", "name": "f", "parameters": {"type": "array"}}
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(**codexs(tools=[{"type": "web_search"}, wrong]))
    assert caught.value.param == "tools[1].parameters"
    with pytest.raises(openai.BadRequestError, match="tools of type web_search are not supported"):
        await client.responses.create(**codexs(tools=[{"type": "web_search"}]))


async def test_reasoning_comes_as_a_summary_if_one_is_asked_for(
    client: openai.AsyncOpenAI, gateway: RunningGateway, cluster: FakeCluster
) -> None:
    gateway.server.model.dialects = choose_dialects("none", "qwen3", chat_template="", tokenizer=TOKENIZER)
    saying(cluster, "<think>hm hm</think>yes")
    async with client.responses.stream(model="tiny", input="hi", reasoning={"summary": "auto"}) as stream:
        events = [event async for event in stream]
        answer = await stream.get_final_response()
    told = "".join(event.delta for event in events if event.type == "response.reasoning_summary_text.delta")
    thought, text = answer.output
    assert thought.type == "reasoning"
    assert (told, thought.summary[0].text, answer.output_text) == ("hm hm", "hm hm", "yes")
    whole = await client.responses.create(model="tiny", input="hi", reasoning={"summary": "auto"})
    assert [item.type for item in whole.output] == [item.type for item in (thought, text)] == ["reasoning", "message"]
    assert (whole.output[0].to_dict()["summary"], whole.output_text) == (thought.to_dict()["summary"], "yes")
    saying(cluster, "<think>hm</think>no")
    await client.responses.create(model="tiny", input=[*whole.to_dict()["output"], text_item("user", "Why?")])  # type: ignore[list-item]


async def test_a_stream_whose_prompt_is_too_long_fails_in_its_events(
    http: httpx.AsyncClient, gateway: RunningGateway
) -> None:
    gateway.server.model.capacity_tokens = 20
    whole = await http.post("/v1/responses", json=codexs())
    error = whole.json()["error"]
    assert (whole.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["message"].startswith("this model's maximum context length is 20 tokens (")
    created, failed = events_of(await http.post("/v1/responses", json=codexs(stream=True)))
    assert (created["type"], failed["type"]) == ("response.created", "response.failed")
    assert failed["response"]["error"] == {"code": error["code"], "message": error["message"]}


async def test_an_item_that_is_not_stored_says_what_to_do(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="store: false"):
        await client.responses.create(model="tiny", input=[{"type": "item_reference", "id": "msg_1"}])


async def test_calls_of_a_chat_come_one_in_a_chunk(http: httpx.AsyncClient, cluster: FakeCluster) -> None:
    saying(cluster, "Look. " + "".join(call(name, q=name) for name in "abc"), at_once=True)
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in "abc"]
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": tools, "stream": True}
    choices = [event["choices"][0] for event in events_of(await http.post("/v1/chat/completions", json=asked))]
    calls = [choice["delta"]["tool_calls"] for choice in choices if choice["delta"].get("tool_calls")]
    assert [[one["index"] for one in each] for each in calls] == [[0], [1], [2]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices).strip() == "Look."
    assert [choice["finish_reason"] for choice in choices].count("tool_calls") == 1
    assert choices[-1]["finish_reason"] == "tool_calls"


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=10.0) as client:
        yield client


def test_reasoning_after_text_begins_a_turn() -> None:
    text = {"role": "assistant", "content": "a"}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    used = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    fields = responses_request.Fields({"input": [text, thought, used]}, "")
    first, second = responses_request._chat_body(fields)[0]["messages"]
    assert first == text
    assert (second["reasoning_content"], second["tool_calls"][0]["id"]) == ("hm", "1")
