"""How the parts of a chat answer become the blocks of a message or a response."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from alignedserve.gateway.translated import messages_reply
from alignedserve.gateway.translated.blocks import Block, Blocks, Kind, Op


def delta(finish: str | None = None, **of: Any) -> dict[str, Any]:
    return {"index": 0, "delta": of, "logprobs": None, "finish_reason": finish}


def test_a_delta_of_another_kind_closes_the_open_block() -> None:
    blocks = Blocks()
    first = {"index": 0, "id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}
    second = {"index": 1, "id": "2", "type": "function", "function": {"name": "g", "arguments": "{}"}}
    more = [{"index": 0, "function": {"arguments": piece}} for piece in ('{"x"', ":1}")]
    given = [delta(role="assistant", content=""), delta(reasoning_content="hm"), delta(content="a"), delta(content="b")]
    given += [delta(tool_calls=[first]), *(delta(tool_calls=[one]) for one in more), delta(tool_calls=[second])]
    given += [delta("tool_calls")]
    steps = [step for one in given for step in blocks.take(one)]
    assert [(block.kind, block.text, block.name, block.index) for block in blocks.all] == [
        (Kind.REASONING, "hm", "", 0),
        (Kind.TEXT, "ab", "", 1),
        (Kind.CALL, '{"x":1}', "f", 2),
        (Kind.CALL, "{}", "g", 3),
    ]
    assert blocks.finish == "tool_calls"
    order = [(step.op, step.block.index) for step in steps if step.op is not Op.ADD]
    assert order == [(op, index) for index in range(4) for op in (Op.OPEN, Op.CLOSE)]
    assert json.loads("".join(step.piece for step in steps if step.block.index == 2)) == {"x": 1}


def test_text_in_the_chunk_that_ends_a_call_follows_the_call() -> None:
    blocks = Blocks()
    first = {"index": 0, "id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": '}}
    second = {"index": 1, "id": "2", "type": "function", "function": {"name": "g", "arguments": "{}"}}
    rest = {"index": 0, "function": {"arguments": "n"}}
    for one in (delta(tool_calls=[first]), delta(content="ix", tool_calls=[rest, second]), delta("tool_calls")):
        blocks.take(one)
    assert [(block.kind, block.text, block.name) for block in blocks.all] == [
        (Kind.CALL, '{"x": n', "f"),
        (Kind.TEXT, "ix", ""),
        (Kind.CALL, "{}", "g"),
    ]


@pytest.mark.parametrize("text", ['{"a": "\\ud800"}', '{"a": 12345678901234567890123}', '{"a": 1e999}', '{ "b":[] }'])
def test_arguments_of_a_call_are_written_as_the_model_wrote_them(text: str) -> None:
    block = Block(Kind.CALL, 0, name="f", call_id="c", text=text)
    assert orjson.dumps(messages_reply._block(block)) == orjson.dumps(
        {"type": "tool_use", "id": "c", "name": "f", "input": orjson.Fragment(text)}
    )


@pytest.mark.parametrize("text", ["", '{"a": NaN}', '{"a": ', "[1]", pytest.param("[" * 100_000, id="deep")])
def test_arguments_that_are_no_object_are_empty(text: str) -> None:
    assert messages_reply._block(Block(Kind.CALL, 0, name="f", call_id="c", text=text))["input"] == {}
