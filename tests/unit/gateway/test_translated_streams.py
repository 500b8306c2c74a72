"""Streams of /v1/responses and /v1/messages with calls and reasoning, read by the clients' own helpers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from alignedserve.gateway.dialects.model_dialects import choose_dialects
from alignedserve.model import resolve_model
from alignedserve.request import FinishReason
from alignedserve.text import Tokenizer
from support.fake_cluster import FakeCluster, playing
from support.gateway import RunningGateway

TOKENIZER = Tokenizer.from_folder(resolve_model("tiny"))
assert TOKENIZER is not None
USER: Any = {"role": "user", "content": "hi"}
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
CALLS = "".join(
    f'<tool_call>\n{{"name": "{name}", "arguments": {{"city": "{city}"}}}}\n</tool_call>\n'
    for name, city in (("warm", "Bern"), ("cold", "Oslo"))
)


def piecewise(text: str, finish: FinishReason = FinishReason.STOP) -> Any:
    assert TOKENIZER is not None
    return playing(*([token] for token in TOKENIZER.encode(text)), finish=finish, pause_s=0.001)


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=10.0) as client:
        yield client


@pytest.fixture
async def claude(gateway: RunningGateway) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0, timeout=10.0) as client:
        yield client


def thinking(gateway: RunningGateway) -> None:
    gateway.server.model.dialects = choose_dialects("none", "qwen3", chat_template="", tokenizer=TOKENIZER)


# ---- responses


async def test_calls_of_a_streamed_response(client: openai.AsyncOpenAI, cluster: FakeCluster) -> None:
    cluster.script = piecewise(f"I look.\n{CALLS}")
    tools: Any = [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("warm", "cold")]
    async with client.responses.stream(model="tiny", input="hi", tools=tools) as stream:
        events = [event async for event in stream]
        answer = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [item.type for item in answer.output] == ["message", "function_call", "function_call"]
    calls = [item for item in answer.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("warm", {"city": "Bern"}),
        ("cold", {"city": "Oslo"}),
    ]
    assert len({call.call_id for call in calls}) == 2
    for index, call in enumerate(answer.output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        assert own[0].type == "response.output_item.added"
        assert own[-1].type == "response.output_item.done"
        assert own[-1].item.id == call.id  # type: ignore[union-attr]
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(event.delta for event in deltas if event.item_id == calls[0].id) == calls[0].arguments
    assert answer.status == "completed"


async def test_a_call_that_is_cut_is_incomplete(client: openai.AsyncOpenAI, cluster: FakeCluster) -> None:
    cluster.script = piecewise(CALLS[: CALLS.index("Bern") + 2], FinishReason.LENGTH)
    tools: Any = [{"type": "function", "name": "warm", "parameters": SCHEMA}]
    answer = await client.responses.create(model="tiny", input="hi", tools=tools, max_output_tokens=99)
    assert (answer.status, answer.output[0].type, answer.output[0].status) == (  # type: ignore[union-attr]
        "incomplete",
        "function_call",
        "incomplete",
    )


async def test_reasoning_is_an_item_of_its_own(
    client: openai.AsyncOpenAI, gateway: RunningGateway, cluster: FakeCluster
) -> None:
    thinking(gateway)
    cluster.script = piecewise("<think>hm hm</think>yes")
    async with client.responses.stream(model="tiny", input="hi") as stream:
        kinds = [event.type.removeprefix("response.") async for event in stream]
        answer = await stream.get_final_response()
    thought, message = answer.output
    assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", "hm hm", [])  # type: ignore[union-attr, index]
    assert answer.output_text == "yes"
    assert answer.usage is not None
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    order = list(dict.fromkeys(kinds))
    assert order.index("reasoning_text.delta") < order.index("reasoning_text.done") < order.index("output_text.delta")
    again: Any = [USER, thought.to_dict(), message.to_dict(), USER]
    cluster.script = piecewise("ok")
    assert (await client.responses.create(model="tiny", input=again)).output_text == "ok"


async def test_openais_helper_parses_an_answer(client: openai.AsyncOpenAI, cluster: FakeCluster) -> None:
    class Place(BaseModel):
        city: str

    cluster.script = piecewise('{"city":"Bern"}')
    answer = await client.responses.parse(model="tiny", input="hi", text_format=Place)
    assert answer.output_parsed == Place(city="Bern")
    assert cluster.submitted[0].sampling.grammar is not None


# ---- messages


async def test_calls_of_a_streamed_message(claude: anthropic.AsyncAnthropic, cluster: FakeCluster) -> None:
    cluster.script = piecewise(f"I look.\n{CALLS}")
    tools: Any = [{"name": name, "input_schema": SCHEMA} for name in ("warm", "cold")]
    async with claude.messages.stream(model="tiny", max_tokens=99, messages=[USER], tools=tools) as stream:
        kinds = [event.type async for event in stream]
        answer = await stream.get_final_message()
    assert answer.stop_reason == "tool_use"
    assert [block.type for block in answer.content] == ["text", "tool_use", "tool_use"]
    called = [block for block in answer.content if block.type == "tool_use"]
    assert [(block.name, block.input) for block in called] == [("warm", {"city": "Bern"}), ("cold", {"city": "Oslo"})]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])

    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "7", "is_error": True} for block in called]
    cluster.script = piecewise("ok")
    history: Any = [
        USER,
        {"role": "assistant", "content": [block.to_dict() for block in answer.content]},
        {"role": "user", "content": results},
    ]
    assert (await claude.messages.create(model="tiny", max_tokens=9, messages=history, tools=tools)).stop_reason == (
        "end_turn"
    )


SPOKEN = CALLS.replace("\n<tool_call>", "\nAnd this.\n<tool_call>", 1)  # text between the calls
HARMONY = (
    "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.warm json<|message|>{"city": "Bern"}<|call|>'
)
CALL = ("tool_use", "")
ORDERS = [
    (f"I look.\n{CALLS}", "hermes", [("text", "I look."), CALL, CALL]),
    (f"{CALLS}Done.", "hermes", [CALL, CALL, ("text", "Done.")]),
    (f"I look.\n{SPOKEN}Done.", "hermes",
     [("text", "I look."), CALL, ("text", "And this."), CALL, ("text", "Done.")]),
    (HARMONY, "harmony", [("text", "I look."), ("thinking", "Hm."), CALL]),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(("text", "dialect", "wanted"), ORDERS)
async def test_blocks_do_not_depend_on_how_tokens_come(
    claude: anthropic.AsyncAnthropic,
    client: openai.AsyncOpenAI,
    gateway: RunningGateway,
    cluster: FakeCluster,
    text: str,
    dialect: str,
    wanted: list[tuple[str, str]],
    size: int,
) -> None:
    assert TOKENIZER is not None
    reasoning = "harmony" if dialect == "harmony" else "none"
    gateway.server.model.dialects = choose_dialects(dialect, reasoning, chat_template="", tokenizer=TOKENIZER)
    tokens = TOKENIZER.encode(text)
    parts = (tokens[start : start + size] for start in range(0, len(tokens), size))
    cluster.script = playing(*parts, finish=FinishReason.STOP, pause_s=0.001)
    tools: Any = [{"name": name, "input_schema": SCHEMA} for name in ("warm", "cold")]
    answer = await claude.messages.create(model="tiny", max_tokens=99, messages=[USER], tools=tools)
    found = [(block.type, getattr(block, "text", getattr(block, "thinking", "")).strip()) for block in answer.content]
    assert found == wanted
    functions: Any = [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("warm", "cold")]
    response = await client.responses.create(model="tiny", input="hi", tools=functions)
    kinds = {"message": "text", "reasoning": "thinking", "function_call": "tool_use"}
    items: Any = response.output
    assert [(kinds[item.type], _said(item)) for item in items] == wanted


def _said(item: Any) -> str:
    return "".join(part.text for part in getattr(item, "content", None) or ()).strip()


async def test_thinking_is_a_block_of_its_own(
    claude: anthropic.AsyncAnthropic, gateway: RunningGateway, cluster: FakeCluster
) -> None:
    thinking(gateway)
    cluster.script = piecewise("<think>hm hm</think>yes")
    async with claude.messages.stream(model="tiny", max_tokens=99, messages=[USER]) as stream:
        deltas = [event.delta.type async for event in stream if event.type == "content_block_delta"]
        answer = await stream.get_final_message()
    first, second = answer.content
    assert (first.type, first.thinking) == ("thinking", "hm hm")  # type: ignore[union-attr]
    assert (second.type, second.text) == ("text", "yes")  # type: ignore[union-attr]
    assert list(dict.fromkeys(deltas)) == ["thinking_delta", "signature_delta", "text_delta"]
    whole = await claude.messages.create(model="tiny", max_tokens=99, messages=[USER])
    assert [block.to_dict() for block in whole.content] == [block.to_dict() for block in answer.content]
