"""Calls that are cut, OpenAI's older form of tools, counted tools, and reasoning that cannot be turned off."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from alignedserve.control.convert import sampling_from_proto, sampling_to_proto
from alignedserve.gateway.body.requests import parse_chat
from alignedserve.gateway.dialects.families import REASONING, TOOLS
from alignedserve.gateway.dialects.model_dialects import ModelDialects
from alignedserve.gateway.reply.replies import SIGN_OF_LIFE
from alignedserve.model import resolve_model
from alignedserve.request import FinishReason
from alignedserve.text import ChatTemplate, Tokenizer
from support.fake_cluster import FakeCluster, playing
from support.gateway import running_gateway
from support.gateway_front import CHAT, HI, Front

TINY = resolve_model("tiny")
FOUND = Tokenizer.from_folder(TINY)
assert FOUND is not None
TOKENIZER: Tokenizer = FOUND
END = 5
PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
LOOK = {"name": "look", "description": "Look at a place.", "parameters": PLACE}
TOOL = {"type": "function", "function": LOOK}
CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "Bern; or not"}}\n</tool_call>'
ALWAYS = "{%- for message in messages -%}{{ message.content }}{%- endfor -%}{{ '<|assistant|><think>\\n' }}"


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


async def chat(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post(CHAT, json={"messages": HI, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def streamed(http: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    answer = await http.post(CHAT, json={"messages": HI, "stream": True, **fields})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [choice for line in lines for choice in json.loads(line)["choices"]]


# ---- why an answer with calls ended


@pytest.mark.parametrize(
    ("text", "finish", "fields", "reason"),
    [
        (CALL, FinishReason.STOP, {}, "tool_calls"),
        (CALL, FinishReason.LENGTH, {}, "length"),
        (CALL[:-20], FinishReason.STOP, {}, "stop"),
        (CALL, FinishReason.LENGTH, {"stop": ";"}, "stop"),
        (CALL, FinishReason.STOP, {"stop": "</tool_call>"}, "tool_calls"),
        (CALL.replace('"Bern; or not"', "nix") + CALL, FinishReason.STOP, {}, "tool_calls"),
        ("None.", FinishReason.STOP, {}, "stop"),
    ],
)
async def test_calls_are_the_reason_of_the_end_only_if_the_last_one_is_whole(
    http: httpx.AsyncClient, cluster: FakeCluster, text: str, finish: FinishReason, fields: dict[str, Any], reason: str
) -> None:
    tokens = ids(text)
    cluster.script = playing([*tokens, END] if finish is FinishReason.STOP else tokens, finish=finish)
    (whole,) = (await chat(http, tools=[TOOL], **fields))["choices"]
    assert whole["finish_reason"] == reason
    assert (await streamed(http, tools=[TOOL], **fields))[-1]["finish_reason"] == reason


async def test_a_call_between_tags_is_whole_if_the_model_ended_it(cluster: FakeCluster, tmp_path: Path) -> None:
    folder = tmp_path / "tags"
    shutil.copytree(TINY, folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{#- <function= -#}")
    call = ids("<tool_call>\n<function=look>\n<parameter=place>\nBern")
    async with running_gateway(cluster, model_path=folder) as gateway, httpx.AsyncClient(base_url=gateway.url) as http:
        for finish, reason, written in (
            (FinishReason.STOP, "tool_calls", '{"place": "Bern"}'),
            (FinishReason.LENGTH, "length", '{"place": "Bern'),
        ):
            cluster.script = playing([*call, END] if finish is FinishReason.STOP else call, finish=finish)
            (whole,) = (await chat(http, tools=[TOOL]))["choices"]
            assert whole["finish_reason"] == reason
            assert whole["message"]["tool_calls"][0]["function"]["arguments"] == written


# ---- OpenAI's older form


async def test_functions_are_tools_and_their_call_comes_back_in_the_older_form(
    http: httpx.AsyncClient, cluster: FakeCluster
) -> None:
    cluster.script = playing(ids("I look.\n"), *([token] for token in ids(CALL)), [END], finish=FinishReason.STOP)
    (choice,) = (await chat(http, functions=[LOOK]))["choices"]
    message, expected = choice["message"], json.dumps({"place": "Bern; or not"})
    assert (message["content"], choice["finish_reason"]) == ("I look.", "function_call")
    assert message["function_call"] == {"name": "look", "arguments": expected}
    assert "tool_calls" not in message

    pieces = await streamed(http, functions=[LOOK], function_call="auto")
    calls = [piece["delta"]["function_call"] for piece in pieces if "function_call" in piece["delta"]]
    assert [call["name"] for call in calls if "name" in call] == ["look"]
    assert "".join(call["arguments"] for call in calls) == expected
    assert len(calls) > 3
    assert pieces[-1]["finish_reason"] == "function_call"


async def test_an_older_conversation_has_the_prompt_of_the_newer_one() -> None:
    function = {"name": "look", "arguments": '{"place": "Bern"}'}
    older = [*HI, {"role": "assistant", "content": None, "function_call": function},
             {"role": "function", "name": "look", "content": "sunny"}]  # fmt: skip
    newer = [*HI, {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]},
             {"role": "tool", "name": "look", "content": "sunny"}]  # fmt: skip
    for first, second in (
        ({}, {}),
        ({"function_call": {"name": "look"}}, {"tool_choice": {"type": "function", "function": {"name": "look"}}}),
        ({}, {"parallel_tool_calls": False}),
    ):
        (one,) = await Front().submit(CHAT, {"messages": older, "functions": [LOOK], "seed": 1, **first})
        (two,) = await Front().submit(CHAT, {"messages": newer, "tools": [TOOL], "seed": 1, **second})
        assert one.prompt_token_ids == two.prompt_token_ids
    assert one.sampling == two.sampling
    (without,) = await Front().submit(CHAT, {"messages": HI, "functions": [LOOK], "function_call": "none", "seed": 1})
    (plain,) = await Front().submit(CHAT, {"messages": HI, "seed": 1})
    assert (without.prompt_token_ids, without.sampling) == (plain.prompt_token_ids, plain.sampling)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [LOOK], "tools": [TOOL]}, "functions"),
        ({"functions": [{"name": "a b"}]}, "functions[0].name"),
        ({"functions": [LOOK, LOOK]}, "functions[1].name"),
        ({"functions": [LOOK], "function_call": {"name": "other"}}, "function_call"),
        ({"functions": [LOOK], "function_call": "required"}, "function_call"),
        ({"functions": [LOOK], "tool_choice": "required"}, "tool_choice"),
        ({"function_call": {"name": "look"}}, "function_call"),
        ({"tools": [TOOL], "function_call": {"name": "look"}}, "function_call"),
        ({"functions": "look"}, "functions"),
    ],
)
async def test_an_older_request_that_cannot_be_followed_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert (await Front().error(CHAT, {"messages": HI, **fields}))["param"] == param


# ---- counting


async def test_tools_are_counted_as_a_chat_has_them(front: Front) -> None:
    for fields in ({"tools": [TOOL]}, {"functions": [LOOK]}, {"tools": [TOOL], "tool_choice": "none"}):
        (spec,) = await front.submit(CHAT, {"messages": HI, **fields})
        answer = await front.client.post("/tokenize", json={"messages": HI, **fields})
        assert answer.json()["tokens"] == spec.prompt_token_ids
    assert (await front.error("/tokenize", {"prompt": "a", "tools": [TOOL]}))["param"] == "tools"
    wrong = {"messages": HI, "tools": [{"type": "function"}]}
    assert (await front.error("/tokenize", wrong))["param"] == "tools[0].function"
    unread = {"messages": HI, "chat_template_kwargs": {"colour": "red"}}
    assert (await front.error("/tokenize", unread))["param"] == "chat_template_kwargs"


# ---- what earlier messages may hold


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ('{"a": "\\ud800"}', {"a": "\ufffd"}),
        ('{"a": "\\ud83d\\ude00 \\n"}', {"a": "\U0001f600 \n"}),
        ('{"a": "\\\\ud800"}', {"a": "\\ud800"}),
        ("", {}),
        (None, {}),
        ("[1]", "[1]"),
        ("null", "null"),
        ("{" * 5000, "{" * 5000),
    ],
)
async def test_arguments_of_earlier_calls_reach_the_prompt_whatever_they_are(arguments: Any, meant: Any) -> None:
    turn = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": arguments}}]}
    (message,) = parse_chat({"messages": [turn]}).messages
    assert message.turn["tool_calls"][0]["function"]["arguments"] == meant
    if arguments is None or len(arguments) < 100:
        assert await Front().submit(CHAT, {"messages": [*HI, turn], "tools": [TOOL]})


RESULT = {"role": "tool", "content": "sunny"}
CALLED = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "look", "arguments": "{}"}}]}
USED = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]}
USED_CALL = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}


@pytest.mark.parametrize(
    ("path", "field", "turns", "place"),
    [
        (CHAT, "messages", [CALLED, {**RESULT, "tool_call_id": "ID"}], "messages[2].tool_call_id"),
        (CHAT, "messages", [{**RESULT, "tool_call_id": "ID"}, CALLED], "messages[1].tool_call_id"),
        ("/v1/messages", "messages",
         [USED, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "ID"}]}],
         "messages[2].content[0].tool_use_id"),
        ("/v1/responses", "input",
         [USED_CALL, {"type": "function_call_output", "call_id": "ID", "output": "sunny"}], "input[2].call_id"),
    ],
)  # fmt: skip
async def test_the_result_of_a_call_that_was_not_made_is_refused(
    http: httpx.AsyncClient, cluster: FakeCluster, path: str, field: str, turns: list[dict[str, Any]], place: str
) -> None:
    cluster.script = playing([END])
    limit = "max_output_tokens" if field == "input" else "max_tokens"
    for call_id, known in (("1", turns[0] in (CALLED, USED, USED_CALL)), ("2", False)):
        written = json.loads(json.dumps([*HI, *turns]).replace('"ID"', f'"{call_id}"'))
        answer = await http.post(path, json={"model": "tiny", limit: 5, field: written})
        assert answer.status_code == (200 if known else 400), answer.text
        if not known:
            error = answer.json()["error"]
            assert place in error["message"]
            assert repr(call_id) in error["message"]
            assert error.get("param", place) == place


async def test_results_without_an_id_belong_to_the_calls_in_their_order() -> None:
    nameless = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]}
    for turns in ([CALLED, RESULT], [nameless, RESULT], [nameless, {**RESULT, "tool_call_id": "any"}]):
        assert parse_chat({"messages": [*HI, *turns]})


# ---- reasoning


async def test_reasoning_that_a_template_always_begins_cannot_be_turned_off() -> None:
    front = Front(template=ChatTemplate(ALWAYS, {}), dialects=ModelDialects(TOOLS["hermes"], REASONING["qwen3"]))
    for field, value in (("reasoning_effort", "none"), ("enable_thinking", False)):
        error = await front.error(CHAT, {"messages": HI, field: value})
        assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    (spec,) = await front.submit(CHAT, {"messages": HI, "thinking_token_budget": 0})
    assert spec.sampling.thinking is not None
    assert spec.sampling.thinking.begun
    assert spec.sampling.thinking.forced([]) == spec.sampling.thinking.close[0]


async def test_the_reasoning_of_gpt_oss_cannot_be_turned_off() -> None:
    template = ChatTemplate("<|channel|><|message|>{{ messages }}{{ reasoning_effort }}", {})
    front = Front(template=template, dialects=ModelDialects(TOOLS["harmony"], REASONING["harmony"]))
    error = await front.error(CHAT, {"messages": HI, "reasoning_effort": "none"})
    assert (error["param"], error["code"]) == ("reasoning_effort", "unsupported_parameter")
    assert "cannot be turned off" in error["message"]


async def test_a_call_within_reasoning_ends_what_a_budget_counts() -> None:
    front = Front(dialects=ModelDialects(TOOLS["qwen3_coder"], REASONING["qwen3"]))
    tool = {"type": "function", "function": {"name": "look"}}
    (spec,) = await front.submit(CHAT, {"messages": HI, "tools": [tool], "thinking_token_budget": 40})
    limit = spec.sampling.thinking
    assert limit is not None
    assert sampling_from_proto(sampling_to_proto(spec.sampling)) == spec.sampling
    thought = [*limit.open, *[70] * 5]
    begun = [*thought, *limit.calls[0], *[70] * 60][: len(limit.open) + 40]
    assert limit.forced([*thought, *[70] * 35]) == limit.close[0]
    assert limit.forced(begun) is None


async def test_white_space_may_come_before_reasoning_that_has_a_budget() -> None:
    front = Front(dialects=ModelDialects(reasoning=REASONING["glm45"]))
    (spec,) = await front.submit(CHAT, {"messages": HI, "thinking_token_budget": 2})
    limit = spec.sampling.thinking
    assert limit is not None
    assert ids("\n")[0] in limit.before
    assert sampling_from_proto(sampling_to_proto(spec.sampling)) == spec.sampling
    begun = [*ids("\n"), *limit.open, 70, 71]
    assert limit.forced(begun) == limit.forced(begun[1:]) == limit.close[0]
    assert all(limit.near(len(begun) + more) for more in range(-2, len(limit.close)))
    assert limit.forced([70, *begun]) is limit.forced(begun[:-1]) is None


async def test_calls_and_reasoning_that_is_not_apart(cluster: FakeCluster, tmp_path: Path) -> None:
    folder = tmp_path / "thinks"
    shutil.copytree(TINY, folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{#- <think> -#}")
    cluster.script = playing(ids(f"<think>\nHm.\n</think>\n\nWell.\n{CALL}"), [END], finish=FinishReason.STOP)
    async with running_gateway(cluster, model_path=folder) as gateway, httpx.AsyncClient(base_url=gateway.url) as http:
        body = await chat(http, tools=[TOOL], separate_reasoning=False)
        (choice,) = body["choices"]
        assert choice["message"]["content"] == "<think>\nHm.\n</think>\n\nWell."
        assert len(choice["message"]["tool_calls"]) == 1
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        pieces = await streamed(http, tools=[TOOL], separate_reasoning=False)
        assert "".join(piece["delta"].get("content") or "" for piece in pieces) == choice["message"]["content"]


# ---- calls that are cut


JSON_OBJECT = {"response_format": {"type": "json_object"}}
STRICT = {"type": "function", "function": {**LOOK, "strict": True}}
OTHER = {"type": "function", "function": {"name": "other"}}


@pytest.mark.parametrize(
    ("text", "content", "fields"),
    [
        (CALL[:4], "", {"tools": [TOOL], "tool_choice": "required"}),
        (CALL[:20], "", {"tools": [TOOL], "tool_choice": "required"}),
        (CALL[:20], "", {"tools": [TOOL, OTHER], "tool_choice": {"type": "function", "function": {"name": "look"}}}),
        (CALL[:4], "", {"tools": [TOOL], **JSON_OBJECT}),
        (CALL[:20], "", {"tools": [TOOL], **JSON_OBJECT}),
        ('{"name": "lo', '{"name": "lo', {"tools": [TOOL], **JSON_OBJECT}),
        ('{"html": "a <', '{"html": "a <', {"tools": [TOOL], **JSON_OBJECT}),
        (f"I look.\n{CALL[:20]}", "I look.", {"tools": [STRICT]}),
        (f"I look.\n{CALL[:4]}", f"I look.\n{CALL[:4]}", {"tools": [STRICT]}),  # a text may end like this
        (CALL[:20], CALL[:20], {"tools": [TOOL]}),  # without a grammar, what only looks like a call is text
    ],
)
async def test_the_beginning_of_a_call_is_no_content_where_a_grammar_knows_it(
    http: httpx.AsyncClient, cluster: FakeCluster, text: str, content: str, fields: dict[str, Any]
) -> None:
    cluster.script = playing(*([token] for token in ids(text)), finish=FinishReason.LENGTH)
    (whole,) = (await chat(http, **fields))["choices"]
    pieces = await streamed(http, **fields)
    assert "tool_calls" not in whole["message"]
    assert "".join(piece["delta"].get("content", "") for piece in pieces) == whole["message"]["content"] == content
    assert whole["finish_reason"] == pieces[-1]["finish_reason"] == "length"


async def test_an_answer_that_the_model_ended_is_whole(http: httpx.AsyncClient, cluster: FakeCluster) -> None:
    text = f"I look.\n{CALL[:20]}"
    cluster.script = playing(*([token] for token in ids(text)), [END], finish=FinishReason.STOP)
    (whole,) = (await chat(http, tools=[STRICT]))["choices"]
    pieces = await streamed(http, tools=[STRICT])
    assert "".join(piece["delta"].get("content", "") for piece in pieces) == whole["message"]["content"] == text


async def test_what_follows_a_call_under_a_grammar_is_no_content(http: httpx.AsyncClient, cluster: FakeCluster) -> None:
    cluster.script = playing(ids(f"{CALL}\n<tool_"), finish=FinishReason.LENGTH)
    for fields in ({"tools": [TOOL], "tool_choice": "required"}, {"tools": [STRICT]}, {"tools": [TOOL], **JSON_OBJECT}):
        (choice,) = (await chat(http, **fields))["choices"]
        assert choice["message"]["content"] is None
        assert len(choice["message"]["tool_calls"]) == 1


async def test_the_first_delta_of_a_forced_call_has_its_name(http: httpx.AsyncClient, cluster: FakeCluster) -> None:
    cluster.script = playing(*([token] for token in ids(CALL)), [END], finish=FinishReason.STOP)
    fields: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required"}
    opening, first, *others, last = await streamed(http, **fields)
    assert opening["delta"] == {"role": "assistant", "content": ""}
    assert list(first["delta"]) == ["tool_calls"]
    assert first["delta"]["tool_calls"][0]["function"]["name"] == "look"
    assert (last["delta"], last["finish_reason"]) == ({}, "tool_calls")
    assert all(list(piece["delta"]) == ["tool_calls"] for piece in others)
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    for asked in ({"logprobs": True}, {"return_token_ids": True}, usage):
        assert len(await streamed(http, **fields, **asked)) == len(ids(CALL)) + 2


async def test_what_is_held_for_long_leaves_signs_of_life(http: httpx.AsyncClient, cluster: FakeCluster) -> None:
    """Arguments before the name: nothing is known of the call until then."""
    late = f'<tool_call>\n{{"arguments": {{"place": "{"Bern " * 100}"}}, "name": "look"}}\n</tool_call>'
    cluster.script = playing(*([token] for token in ids(late)), [END], finish=FinishReason.STOP)
    deltas = [piece["delta"] for piece in await streamed(http, tools=[TOOL])]
    first = next(number for number, delta in enumerate(deltas) if "tool_calls" in delta)
    assert deltas[1:first] == [{"content": ""}] * (len(ids(late.partition(', "name"')[0])) // SIGN_OF_LIFE)
