"""Blocks of /v1/messages beside text and calls: what is read as text, what is left out and named, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from alignedserve.errors import InvalidRequestError
from alignedserve.gateway.translated.messages_request import MessagesChat, parse_messages

USER = {"role": "user", "content": "hi"}
ONE, TWO = {"type": "text", "text": "one"}, {"type": "text", "text": "two", "citations": None}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
FOUND = {"type": "search_result", "title": "T", "source": "https://a.example", "content": [ONE, TWO]}


def document(source: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, **fields}


def parsed(*turns: dict[str, Any]) -> MessagesChat:
    return parse_messages({"model": "tiny", "max_tokens": 5, "messages": [*turns]})


def result(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [*blocks]}]}


CALLED = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (FOUND, "T\n\nhttps://a.example\n\none\ntwo"),
        (document({"type": "content", "content": [ONE, TWO]}), "one\ntwo"),
        (document({"type": "content", "content": "one"}, title="T", context="C"), "T\n\nC\n\none"),
        (document({"type": "text", "media_type": "text/plain", "data": "one"}, title=None), "one"),
    ],
)
def test_what_is_plain_text_is_read_as_text(block: dict[str, Any], text: str) -> None:
    request = parsed({"role": "user", "content": [block, ONE]}, CALLED, result(block, TWO))
    assert [request.messages[0].content, request.messages[2].content] == [f"{text}\none", f"{text}\ntwo"]
    assert request.ignored == []


@pytest.mark.parametrize(
    ("block", "place"),
    [
        ({**FOUND, "content": [ONE, IMAGE]}, "content[1].type"),
        ({**FOUND, "content": 3}, "content"),
        ({**FOUND, "title": None}, "title"),
        (document({"type": "content", "content": [IMAGE]}), "source.content[0].type"),
        (document({"type": "content"}), "source.content"),
        (document({"type": "base64", "media_type": "application/pdf", "data": "AA=="}), "source"),
        (document(None), "source"),
    ],
)
def test_what_is_no_text_is_refused_by_its_place(block: dict[str, Any], place: str) -> None:
    for turns, where in (
        ([{"role": "user", "content": [block]}], "messages[0].content[0]"),
        ([USER, CALLED, result(block)], "messages[2].content[0].content[0]"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            parsed(*turns)
        assert caught.value.param == f"{where}.{place}"


def test_citations_that_are_asked_for_are_named() -> None:
    blocks = [{**FOUND, "citations": {"enabled": on}} for on in (True, False)]
    assert parsed({"role": "user", "content": blocks}).ignored == ["messages[0].content[0].citations"]


def test_calls_that_anthropic_ran_itself_are_left_out_and_named() -> None:
    use = {"type": "server_tool_use", "id": "srv", "name": "web_search", "input": {"query": "q"}}
    hits = {"type": "web_search_tool_result", "tool_use_id": "srv", "content": [{"type": "web_search_result"}]}
    turn = {"role": "assistant", "content": [ONE, use, hits, {**TWO, "citations": [{"type": "x"}]}]}
    request = parsed(USER, turn, USER)
    assert [(message.role, message.content) for message in request.messages] == [
        ("user", "hi"), ("assistant", "onetwo"), ("user", "hi")
    ]  # fmt: skip
    assert request.ignored == ["messages[1].content[1]", "messages[1].content[2]"]


def test_a_turn_of_nothing_else_is_left_out() -> None:
    turn = {"role": "assistant", "content": [{"type": "mcp_tool_use"}, {"type": "mcp_tool_result"}]}
    request = parsed(USER, turn)
    assert [message.role for message in request.messages] == ["user"]
    assert not request.continue_final_message
    assert len(request.ignored) == 2
