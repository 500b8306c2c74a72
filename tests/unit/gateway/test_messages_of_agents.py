"""What coding agents send to /v1/messages whatever the model is, and the turns that a chat template gets of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import unquote

import anthropic
import httpx
import pytest

from alignedserve.gateway.body.messages import Message
from alignedserve.gateway.body.planning import ServedModel
from alignedserve.gateway.body.turns import turns_for
from alignedserve.gateway.dialects.model_dialects import ModelDialects, choose_dialects
from alignedserve.gateway.http import keep_alive
from alignedserve.gateway.translated.messages_reply import SIGNATURE
from alignedserve.gateway.translated.messages_request import _for_model, parse_messages
from alignedserve.model import resolve_model
from alignedserve.request import FinishReason, RequestSpec
from alignedserve.text import ChatTemplate, Tokenizer
from support.fake_cluster import FakeCluster, fake_model_info, playing
from support.gateway import RunningGateway

TOKENIZER = Tokenizer.from_folder(resolve_model("tiny"))
assert TOKENIZER is not None
USER = {"role": "user", "content": "hi"}
IGNORED = "x-alignedserve-ignored-fields"
CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}!{% endif %}{% endfor %}"
STRICT = """{% for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be the first.') }}{% endif %}
{%- if m.role == 'user' and not loop.first and loop.previtem.role in ('user', 'tool') %}
{{- raise_exception('roles must alternate') }}{% endif %}
{{- '<' + m.role + '>' + m.content }}{% endfor %}"""
DROPPING = CHATML.replace("<{{ m.role }}>", "{% if m.role != 'system' or loop.first %}<{{ m.role }}>").replace(
    "{{ m.content }}", "{{ m.content }}{% endif %}"
)
CALL = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]}


def ids(text: str) -> list[int]:
    assert TOKENIZER is not None
    return TOKENIZER.encode(text)


def claudes(**fields: Any) -> dict[str, Any]:
    """A body with the settings that Claude Code sends to a model that it does not know."""
    return {
        "model": "tiny",
        "max_tokens": 32000,
        "messages": [USER],
        "thinking": {"type": "adaptive", "display": "omitted"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "u"},
        **fields,
    }


def ignored(answer: httpx.Response) -> set[str]:
    return set(unquote(answer.headers[IGNORED]).split(", "))


def prompt_of(cluster: FakeCluster) -> str:
    assert TOKENIZER is not None
    return TOKENIZER.decode(list(cluster.submitted[-1].prompt_token_ids), skip_special=False)


async def test_settings_that_this_model_has_not_are_named(http: httpx.AsyncClient, cluster: FakeCluster) -> None:
    cluster.script = playing(ids(" value"), finish=FinishReason.STOP)
    thinking = {"type": "enabled", "budget_tokens": 1024}
    answer = await http.post("/v1/messages?beta=true", json=claudes(thinking=thinking))
    assert answer.status_code == 200, answer.text
    assert {"output_config.effort", "thinking.budget_tokens"} <= ignored(answer)
    counted = await http.post("/v1/messages/count_tokens", json=claudes())
    assert counted.json() == {"input_tokens": answer.json()["usage"]["input_tokens"]}
    assert "output_config.effort" in ignored(counted)


def test_a_template_that_reads_the_effort_gets_it() -> None:
    template = ChatTemplate("{{ messages }}{{ reasoning_effort }}", {})
    model = ServedModel("m", None, template, fake_model_info(), dialects=ModelDialects())
    request = _for_model(model, parse_messages(claudes()))
    assert request.template_variables(template)["reasoning_effort"] == "high"
    assert "output_config.effort" not in request.ignored


async def test_an_answer_may_fill_the_room_that_is_left(
    claude: anthropic.AsyncAnthropic, gateway: RunningGateway, cluster: FakeCluster
) -> None:
    gateway.server.model.capacity_tokens = 100
    cluster.script = playing(*[[token] for token in ids(" value") * 200])
    answer = await claude.messages.create(model="tiny", max_tokens=32000, messages=[USER])  # type: ignore[list-item]
    asked = cluster.submitted[-1]
    assert asked.sampling.max_tokens == 100 - len(asked.prompt_token_ids)
    assert answer.stop_reason == "model_context_window_exceeded"
    answer = await claude.messages.create(model="tiny", max_tokens=3, messages=[USER])  # type: ignore[list-item]
    assert answer.stop_reason == "max_tokens"


async def test_a_prompt_that_leaves_no_room_is_refused_in_words_that_agents_know(
    http: httpx.AsyncClient, gateway: RunningGateway
) -> None:
    tokens = (await http.post("/v1/messages/count_tokens", json=claudes())).json()["input_tokens"]
    gateway.server.model.capacity_tokens = tokens
    answer = await http.post("/v1/messages", json=claudes())
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"] == f"prompt is too long: {tokens} tokens > {tokens - 1} maximum"
    long = await http.post("/v1/messages", json=claudes(messages=[{"role": "user", "content": "a b " * 5000}]))
    assert long.json()["error"]["message"].startswith("prompt is too long: ")


def messages(*turns: dict[str, Any]) -> list[Message]:
    return [Message(**turn) for turn in turns]


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "1", "content": text}


@pytest.mark.parametrize(
    ("source", "written"),
    [
        (CHATML, "<system>a<user>hi<system>b<assistant>!<tool>r<user>hi<user>hi"),
        (
            DROPPING,
            "<system>a<user>hi<user><system>\nb\n</system><assistant>!<tool>r<user>hi<user>hi",
        ),
        (STRICT, "<system>a<user>hi\n\n<system>\nb\n</system><assistant><tool>r\n\nhi\n\nhi"),
    ],
    ids=["all", "dropping", "strict"],
)
def test_a_template_gets_turns_that_it_writes(source: str, written: str) -> None:
    template = ChatTemplate(source, {})
    given = messages(system("a"), USER, system("b"), CALL, result("r"), USER, USER)
    turns = [message.turn for message in turns_for(template, given)]
    assert template.render(turns) == written
    assert [message.turn for message in given] == [
        message.turn for message in messages(system("a"), USER, system("b"), CALL, result("r"), USER, USER)
    ]


def test_a_system_message_never_comes_between_a_call_and_its_result() -> None:
    given = messages(USER, CALL, system("b"), result("r"), system("c"), USER)
    found = [(one.role, one.content) for one in turns_for(ChatTemplate(DROPPING, {}), given)]
    assert found == [
        ("user", "hi"), ("assistant", ""), ("tool", "r"), ("user", "<system>\nb\n</system>"),
        ("user", "<system>\nc\n</system>"), ("user", "hi"),
    ]  # fmt: skip


def test_plain_conversations_are_left_as_they_are() -> None:
    given = messages(system("a"), USER, {"role": "assistant", "content": "x"}, USER)
    assert turns_for(ChatTemplate(STRICT, {}), given) is given


def test_what_a_template_does_not_write_at_all_is_left_where_it_is() -> None:
    """One without results of tools, which would lose a text that is joined to one."""
    silent = CHATML.replace("{{ m.content }}", "{% if m.role != 'tool' %}{{ m.content }}{% endif %}")
    given = messages(USER, CALL, result("r"), USER)
    assert turns_for(ChatTemplate(silent, {}), given) is given


def test_a_template_without_system_messages_gets_them_as_the_users_text() -> None:
    refusal = "{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    template = ChatTemplate(CHATML.replace("<{{", refusal + "<{{"), {})
    given = messages(system("a"), {"role": "developer", "content": "b"}, USER)
    assert template.render([message.turn for message in turns_for(template, given)]) == "<user>a\n\nb\n\nhi"


async def test_messages_of_the_system_may_stand_anywhere(http: httpx.AsyncClient, cluster: FakeCluster) -> None:
    cluster.script = playing(ids(" value"), finish=FinishReason.STOP)
    turns = [system("Be short."), USER, system("Be kind."), {"role": "system"}]
    answer = await http.post("/v1/messages", json=claudes(messages=turns))
    assert answer.status_code == 200, answer.text
    assert prompt_of(cluster).index("Be short.") < prompt_of(cluster).index("Be kind.")
    assert "messages[3]" in ignored(answer)


def test_what_differs_with_each_conversation_is_no_part_of_the_system_prompt() -> None:
    blocks = [{"type": "text", "text": text} for text in ("x-anthropic-billing-header: cc_version=1;", "Be short.")]
    request = parse_messages(claudes(system=blocks))
    assert request.messages[0].content == "Be short."
    assert parse_messages(claudes(system=blocks[:1])).messages[0].role == "user"


def test_an_image_in_a_result_is_left_out_and_named() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    text = {"type": "text", "text": "one"}
    document = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "two"}}
    reference = {"type": "tool_reference", "tool_name": "g"}
    returned = {"type": "tool_result", "tool_use_id": "1", "content": [text, image, document, reference]}
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}
    turns = [USER, called, {"role": "user", "content": [returned, text, document]}]
    request = parse_messages(claudes(messages=turns))
    found = [message.content for message in request.messages[2:]]
    assert found == [
        "one\n[an image, which this model cannot read]\nT\n\ntwo\nThe tool g can be used now.", "one\nT\n\ntwo"
    ]  # fmt: skip
    assert "messages[2].content[0].content[1]" in request.ignored


async def test_thinking_is_signed_so_that_clients_keep_it(http: httpx.AsyncClient, thinking: FakeCluster) -> None:
    body = {"model": "tiny", "max_tokens": 50, "messages": [USER]}
    whole = (await http.post("/v1/messages", json=body)).json()
    assert whole["content"][0] == {"type": "thinking", "thinking": "hm", "signature": SIGNATURE}
    assert "citations" not in whole["content"][1]
    lines = (await http.post("/v1/messages", json={**body, "stream": True})).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    of_first = [event for event in events if event.get("index") == 0]
    assert of_first[0]["content_block"]["signature"] == ""
    assert [event["type"] for event in of_first[-2:]] == ["content_block_delta", "content_block_stop"]
    assert of_first[-2]["delta"] == {"type": "signature_delta", "signature": SIGNATURE}


@pytest.fixture
async def claude(gateway: RunningGateway) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0, timeout=10.0) as client:
        yield client


@pytest.fixture
def thinking(gateway: RunningGateway, cluster: FakeCluster) -> FakeCluster:
    """A model that thinks."""
    gateway.server.model.dialects = choose_dialects("none", "qwen3", chat_template="", tokenizer=TOKENIZER)
    cluster.script = playing(*[[token] for token in ids("<think>hm</think>yes")], finish=FinishReason.STOP)
    return cluster


async def test_a_model_has_more_names(http: httpx.AsyncClient, gateway: RunningGateway, cluster: FakeCluster) -> None:
    cluster.script = playing(ids(" value"), finish=FinishReason.STOP)
    gateway.server.model.aliases = ("gpt-5", "claude-*")
    for name, status in (("tiny", 200), ("gpt-5", 200), ("claude-haiku-4-5", 200), ("gpt-5-mini", 404)):
        assert (await http.post("/v1/messages", json=claudes(model=name))).status_code == status, name
        chat = {"model": name, "messages": [USER], "max_tokens": 1}
        assert (await http.post("/v1/chat/completions", json=chat)).status_code == status, name
        card = await http.get(f"/v1/models/{name}")
        assert (card.status_code, card.json().get("id", name)) == (status, name)
    listed = (await http.get("/v1/models")).json()
    assert [card["id"] for card in listed["data"]] == ["tiny", "gpt-5"]
    assert listed["data"][0]["max_input_tokens"] == listed["data"][0]["max_model_len"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
async def test_a_stream_that_is_silent_shows_that_it_lives(
    http: httpx.AsyncClient, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(keep_alive, "PAUSE_S", 0.1)
    cluster.script = playing(ids(" value"), ids(" of"), finish=FinishReason.STOP, pause_s=0.5)
    body = {"model": "tiny", "max_tokens": 9, "messages": [USER], "stream": True}
    text = (await http.post(path, json=body)).text
    begun, ended = text.index(" value"), text.index(" of")
    assert text[begun:ended].count(": nothing new\n\n") >= 2


async def test_a_stream_begins_before_its_first_token_if_that_is_late(
    http: httpx.AsyncClient, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keep_alive, "FIRST_S", 0.1)

    async def late(cluster: FakeCluster, spec: RequestSpec) -> None:
        await asyncio.sleep(0.6)
        await playing(ids(" value"), finish=FinishReason.STOP)(cluster, spec)

    cluster.script = late
    body = {"model": "tiny", "max_tokens": 9, "messages": [USER], "stream": True}
    begun_s = time.monotonic()
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert (answer.status_code, time.monotonic() - begun_s < 0.6) == (200, True)
        text = (await answer.aread()).decode()
    assert " value" in text
    assert text.endswith("data: [DONE]\n\n")


def test_thinking_between_tools_is_thinking() -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "tiny", "max_tokens": 5, "messages": messages, "thinking": {"type": "between_tools"}}
    assert parse_messages(body).enable_thinking is True
