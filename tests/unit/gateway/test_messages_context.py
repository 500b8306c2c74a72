"""What /v1/messages makes of edits of a conversation, later instructions, thinking, and long names of tools."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from alignedserve.errors import InvalidRequestError
from alignedserve.gateway.body.planning import ServedModel
from alignedserve.gateway.dialects.model_dialects import ModelDialects, choose_dialects
from alignedserve.gateway.translated.messages_request import _for_model, parse_messages, plan_message
from alignedserve.gateway.translated.responses_request import parse_responses
from alignedserve.model import resolve_model
from alignedserve.text import ChatTemplate, Tokenizer
from support.fake_cluster import FakeCluster, fake_model_info, playing

CLEAR, THINK = "clear_tool_uses_20250919", "clear_thinking_20251015"
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def thinking(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "thinking", "thinking": text, "signature": ""}]}


@pytest.mark.parametrize(
    ("keep", "kept"),
    [({}, ["c", "d"]), ({"keep": "all"}, ["a", "b", "c", "d"]), ({"keep": {"type": "all"}}, ["a", "b", "c", "d"]),
     ({"keep": {"type": "thinking_turns", "value": 2}}, ["b", "c", "d"])],
)  # fmt: skip
def test_thinking_of_earlier_turns_is_cleared_if_asked_for(keep: dict[str, Any], kept: list[str]) -> None:
    """A turn reaches from a user's message to the next one, over results of tools."""
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x"}]}
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]}
    turns = [USER, thinking("a"), USER, thinking("b"), USER, thinking("c"), called, result, thinking("d"), USER]
    edits = {"edits": [{"type": THINK, **keep}], "later": 1}
    request = parse_messages({"model": "tiny", "max_tokens": 5, "messages": turns, "context_management": edits})
    assert [message.reasoning_content for message in request.messages if message.reasoning_content] == kept
    assert request.ignored == ["context_management.later"]


async def test_edits_that_never_apply_are_accepted(http: httpx.AsyncClient, cluster: FakeCluster) -> None:
    cluster.script = playing([5])
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        for edit, allowed in (
            ({"type": THINK, "keep": "all"}, True),
            ({"type": CLEAR}, True),
            ({"type": "compact_20260112"}, True),
            ({"type": CLEAR, "trigger": {"type": "input_tokens", "value": 50}}, False),
            ({"type": CLEAR, "trigger": {"type": "tool_uses", "value": 50}}, False),
        ):
            body = {"model": "tiny", "max_tokens": 1, "messages": [USER], "context_management": {"edits": [edit]}}
            answer = await http.post(path, json=body)
            assert answer.status_code == (200 if allowed else 400), answer.text
            assert allowed or "context_management.edits[0] is not supported" in answer.json()["error"]["message"]


def test_instructions_may_follow_a_users_message() -> None:
    later = {"role": "system", "content": [{"type": "text", "text": "Be short."}]}
    request = parse_messages({"model": "tiny", "max_tokens": 5, "messages": [USER, later]})
    assert [message.turn for message in request.messages] == [USER, {"role": "system", "content": "Be short."}]


def test_names_of_tools_are_as_long_as_each_api_allows() -> None:
    tool = {"name": "a" * 128, "input_schema": SCHEMA}
    request = parse_messages({"model": "tiny", "max_tokens": 5, "messages": [USER], "tools": [tool]})
    assert request.tool_use().tools[0].name == tool["name"]
    tool["name"] = "a" * 129
    with pytest.raises(InvalidRequestError, match="1 to 128 letters"):
        parse_messages({"model": "tiny", "max_tokens": 5, "messages": [USER], "tools": [tool]}).tool_use()
    other = {"type": "function", "name": "a" * 129}
    with pytest.raises(InvalidRequestError, match="1 to 128 letters"):
        parse_responses({"input": "hi", "tools": [other]}).tool_use()


@pytest.mark.parametrize(
    ("edit", "param"),
    [
        ({"type": "other"}, "type"),
        ({"type": THINK, "keep": {"type": "thinking_turns"}}, "keep.value"),
        ({"type": THINK, "keep": {"type": "thinking_turns", "value": 0}}, "keep.value"),
        ({"type": THINK, "keep": "some"}, "keep"),
        ({"type": CLEAR, "trigger": {"type": "input_tokens", "value": "x"}}, "trigger.value"),
    ],
)
def test_an_edit_that_cannot_be_read_is_refused_by_name(edit: dict[str, Any], param: str) -> None:
    body = {"model": "tiny", "max_tokens": 5, "messages": [USER], "context_management": {"edits": [edit]}}
    with pytest.raises(InvalidRequestError) as caught:
        parse_messages(body)
    assert caught.value.param == f"context_management.edits[0].{param}"


@pytest.mark.parametrize(("switch", "switched"), [("thinking", True), ("enable_thinking", True), ("other", False)])
def test_thinking_is_switched_by_whichever_variable_the_template_has(switch: str, switched: bool) -> None:
    template = ChatTemplate(f"{{{{ messages }}}}{{{{ {switch} }}}}", {})
    model = ServedModel("m", None, template, fake_model_info(), dialects=ModelDialects())
    body = {"model": "m", "max_tokens": 5, "messages": [USER], "thinking": {"type": "disabled"}}
    request = _for_model(model, parse_messages(body))
    assert request.enable_thinking is (False if switched else None)


SWITCHED = (
    "{{ messages[-1].content }}{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
ALWAYS = "{{ messages[-1].content }}{{ enable_thinking }}<think>"


@pytest.mark.parametrize(
    ("source", "fields", "begins"),
    [
        (SWITCHED, {}, "hi<think></think>"),
        (SWITCHED, {"thinking": {"type": "disabled"}}, "hi<think></think>"),
        (SWITCHED, {"thinking": None, "output_config": {"effort": "high"}}, "hi<think></think>"),
        (SWITCHED, {"thinking": {"type": "adaptive"}}, "hi"),
        (SWITCHED, {"chat_template_kwargs": {"enable_thinking": True}}, "hi"),
        (SWITCHED, {"enable_thinking": True}, "hi"),
        (SWITCHED, {"thinking_token_budget": 5}, "hi"),
        (ALWAYS, {}, "hiFalse<think>"),
        ("{{ messages[-1].content }}<think>", {}, "hi<think>"),
    ],
)
async def test_thinking_is_off_unless_it_is_asked_for(source: str, fields: dict[str, Any], begins: str) -> None:
    """Where the template cannot turn it off nothing is refused, and a field that was not sent is not named."""
    tokenizer = Tokenizer.from_folder(resolve_model("tiny"))
    dialects = choose_dialects("none", "qwen3", chat_template="", tokenizer=tokenizer)
    model = ServedModel("m", tokenizer, ChatTemplate(source, {}), fake_model_info(), dialects=dialects)
    request = parse_messages({"model": "m", "max_tokens": 5, "messages": [USER], **fields})
    plan = await plan_message(model, request)
    assert plan.prompts[0].text == begins
    assert plan.reading is not None
    assert set(request.ignored) == ({"output_config.effort"} if "output_config" in fields else set())


async def test_only_thinking_that_was_turned_off_is_named_where_the_model_always_thinks() -> None:
    tokenizer = Tokenizer.from_folder(resolve_model("tiny"))
    dialects = choose_dialects("none", "qwen3", chat_template="", tokenizer=tokenizer)
    model = ServedModel("m", tokenizer, ChatTemplate(ALWAYS, {}), fake_model_info(), dialects=dialects)
    body = {"model": "m", "max_tokens": 5, "messages": [USER], "thinking": {"type": "disabled"}}
    request = parse_messages(body)
    await plan_message(model, request)
    assert request.ignored == ["thinking"]
