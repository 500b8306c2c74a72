"""Calls of tools, reasoning and structured answers over connections that break: as if nothing had happened."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from alignedserve.client import AsyncClient, Choice, Chunk, Message
from alignedserve.model import resolve_model
from alignedserve.request import FinishReason
from alignedserve.text import Tokenizer
from support.fake_cluster import FakeCluster
from support.forwarder import Forwarder
from support.gateway import RunningGateway, running_gateway
from support.pauses import Pauses

TINY = resolve_model("tiny")
TOKENIZER = Tokenizer.from_folder(TINY)
assert TOKENIZER is not None
END = 5
STEPS = 7
HI = [Message("user", "hi")]
CALLS = "\n".join(
    f"<tool_call>\n{json.dumps({'name': 'look', 'arguments': {'place': place}}, ensure_ascii=False)}\n</tool_call>"
    for place in ("Zürich", "你好")
)
THOUGHT = "<think>\nHm 🙂, well.\n</think>\n\n"


@dataclass
class City:
    name: str
    people: int


def look(place: str) -> str:
    """Look at a place."""
    return place


ANSWERS: list[tuple[str, dict[str, Any]]] = [
    (f"I look.\n{CALLS}", {"tools": [look]}),
    (f"{THOUGHT}I look.\n{CALLS}", {"tools": [look]}),
    (f"{THOUGHT}{CALLS}", {"tools": [look], "n": 2}),
    (f"{THOUGHT}Hello there.", {}),
    (f"{THOUGHT}Hello there.", {"include_reasoning": False, "stop": ["there"]}),
    (f'{THOUGHT}{{"name": "Zürich", "people": 3}}', {"response_format": City}),
    ('{"name": "Zürich", "people": 3}', {"response_format": City, "enable_thinking": False}),
]


@pytest.fixture
async def gateway(cluster: FakeCluster, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """Of a model with tools and reasoning."""
    folder = tmp_path / "thinks"
    shutil.copytree(TINY, folder)
    template = folder / "chat_template.jinja"
    closed = "{{- '<think>\\n\\n</think>\\n\\n' -}}"
    more = f"{{%- if enable_thinking is defined and not enable_thinking -%}}{closed}{{%- endif -%}}"
    template.write_text(template.read_text() + more)
    async with running_gateway(cluster, model_path=folder) as gateway:
        yield gateway


def script(text: str, *, open_gate: bool) -> Pauses:
    assert TOKENIZER is not None
    found = Pauses([*TOKENIZER.encode(text, special_tokens=False), END], FinishReason.STOP, STEPS)
    if open_gate:
        found.gate.set()
    return found


def without_reader(choices: tuple[Choice, ...]) -> list[Any]:
    return [(choice, choice.parsed if choice.finish_reason == "stop" else None) for choice in choices]


@pytest.mark.parametrize(("text", "options"), ANSWERS, ids=range(len(ANSWERS)))
async def test_an_answer_over_connections_that_break_is_the_undisturbed_one(
    cluster: FakeCluster, gateway: RunningGateway, text: str, options: dict[str, Any]
) -> None:
    options = {"seed": 1, "request_id": "mine", "timeout_s": 30, **options}
    async with Forwarder([gateway.grpc_address]) as forwarder, AsyncClient(forwarder.address) as client:
        cluster.script = script(text, open_gate=True)
        calm = await client.chat_stream(HI, **options).completion()
        cluster.script = script(text, open_gate=False)
        stream = client.chat_stream(HI, **options)
        counts: dict[int, int] = {}
        ended: set[int] = set()
        breaks = 0
        async for chunk in stream:
            assert isinstance(chunk, Chunk)
            counts[chunk.index] = counts.get(chunk.index, 0) + len(chunk.token_ids)
            ended |= {chunk.index} if chunk.finish_reason else set()
            paused = [counts[index] % STEPS == 0 or index in ended for index in counts]
            if len(paused) == options.get("n", 1) and all(paused):
                breaks += forwarder.cut()
        broken = await stream.completion()
    assert breaks > 2
    assert without_reader(broken.choices) == without_reader(calm.choices)
    assert broken.usage == calm.usage
    (choice, *_) = calm.choices
    if "tools" in options:
        assert [call.parsed_arguments["place"] for call in choice.tool_calls] == ["Zürich", "你好"]
        assert choice.finish_reason == "tool_calls"
    if "response_format" in options:
        assert choice.parsed == City("Zürich", 3)
    thought = THOUGHT in text and "include_reasoning" not in options
    assert choice.reasoning == ("Hm 🙂, well." if thought else "")
    assert ((calm.usage.reasoning_tokens or 0) > 3) is (THOUGHT in text)
    assert "think" not in choice.text
