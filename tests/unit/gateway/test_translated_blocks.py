"""How the pieces of an answer become the blocks of a message or a response."""

from __future__ import annotations

import json

import orjson
import pytest

from alignedserve.gateway.dialects.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from alignedserve.gateway.translated import messages_reply
from alignedserve.gateway.translated.blocks import Block, Blocks, Kind, Op


def test_a_piece_of_another_kind_closes_the_open_block() -> None:
    blocks = Blocks()
    given: list[list[Piece]] = [[], [Reasoning("hm")], [Content("a")], [Content("b")], [CallStart(0, "1", "f")],
                                [CallArguments(0, '{"x"')], [CallArguments(0, ":1}")],
                                [CallStart(1, "2", "g"), CallArguments(1, "{}")]]  # fmt: skip
    steps = [step for pieces in given for step in blocks.take(pieces, None)] + blocks.take([], "tool_calls")
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


PIECES: list[Piece] = [
    Content("A"), Reasoning("hm"), CallStart(0, "1", "f"), CallArguments(0, "{"), CallArguments(0, "}"),
    Content(" betw"), Content("een "), CallStart(1, "2", "g"), CallStart(2, "3", "h"), CallArguments(2, "{}"),
    Reasoning("so"), Content("after"),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3, 5, len(PIECES)])
def test_the_order_of_blocks_is_that_of_the_pieces_however_many_come_at_once(size: int) -> None:
    blocks, scored = Blocks(), [one for piece in PIECES for one in ({"of": piece}, piece)]
    steps = [step for start in range(0, len(scored), size) for step in blocks.take(scored[start : start + size], None)]
    blocks.take([], "stop")
    assert [(block.kind, block.text, block.name) for block in blocks.all] == [
        (Kind.TEXT, "A", ""),
        (Kind.REASONING, "hm", ""),
        (Kind.CALL, "{}", "f"),
        (Kind.TEXT, " between ", ""),
        (Kind.CALL, "", "g"),
        (Kind.CALL, "{}", "h"),
        (Kind.REASONING, "so", ""),
        (Kind.TEXT, "after", ""),
    ]
    between = blocks.all[3]
    assert between.logprobs == [{"of": Content(" betw")}, {"of": Content("een ")}]
    added = [step for step in steps if step.op is Op.ADD and step.block is between]
    assert "".join(step.piece for step in added) == between.text
    assert [one for step in added for one in step.logprobs] == between.logprobs


@pytest.mark.parametrize("text", ['{"a": "\\ud800"}', '{"a": 12345678901234567890123}', '{"a": 1e999}', '{ "b":[] }'])
def test_arguments_of_a_call_are_written_as_the_model_wrote_them(text: str) -> None:
    block = Block(Kind.CALL, 0, name="f", call_id="c", text=text)
    assert orjson.dumps(messages_reply._block(block)) == orjson.dumps(
        {"type": "tool_use", "id": "c", "name": "f", "input": orjson.Fragment(text)}
    )


@pytest.mark.parametrize("text", ["", '{"a": NaN}', '{"a": ', "[1]", pytest.param("[" * 100_000, id="deep")])
def test_arguments_that_are_no_object_are_empty(text: str) -> None:
    assert messages_reply._block(Block(Kind.CALL, 0, name="f", call_id="c", text=text))["input"] == {}
