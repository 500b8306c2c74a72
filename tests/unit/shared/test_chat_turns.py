"""Conversations with tools and reasoning, as the chat templates of several families read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alignedserve.errors import InvalidRequestError
from alignedserve.text import CallArguments, ChatTemplate

LOOK = {"type": "function", "function": {"name": "look"}}
CITY = {"description": "Looks.", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}

# How templates write an answer's content and calls.
GLM = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<{{ call.function.name }}>{% set found = call.function.arguments or {} %}"
    "{% for k, v in found.items() %}{{ k }}={{ v | tojson if v is not string else v }};{% endfor %}{% endfor %}|"
    "{% endfor %}"
)
PARTS = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}|{% endfor %}"
)
NONE = (
    "{% for m in messages %}{{ m.role }}:{% if m['content'] is none %}calls"
    "{% for call in m['tool_calls'] %}{{ '<' + call['function']['name'] + '>' }}"
    "{{ '' + call['function']['arguments'] }}{% endfor %}"
    "{% else %}{{ m['content'] }}{% endif %}|{% endfor %}"
)
ONE = (
    "{% for m in messages %}{{ m.role }}:{% if 'tool_calls' in m %}{% if m.tool_calls | length > 1 %}"
    "{{ raise_exception('one at a time') }}{% endif %}{% set call = m.tool_calls[0].function %}"
    "{{ call.name }}{{ call.arguments | tojson }}{% else %}{{ m.content }}{% endif %}|{% endfor %}"
)
HARMONY = (
    "{% for m in messages %}{{ m.role }}:{% if m.content and m.thinking and m.tool_calls %}"
    "{{ raise_exception('not both') }}{% endif %}"
    "{% if m.thinking %}({{ m.thinking }}){% endif %}{{ m.content }}|{% endfor %}"
)
HERMES = (
    "{% for tool in tools or [] %}{{ tool.function.name + ': ' + tool.function.description }}"
    "{{ tool.function.parameters.properties | length }};{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' and m.name is not defined %}"
    "{{ raise_exception('a name is required') }}{% endif %}{{ m.role }}:{{ m.name }}|{% endfor %}"
)


def call(name: str, call_id: str = "", **arguments: Any) -> dict[str, Any]:
    written = {"type": "function", "function": {"name": name, "arguments": CallArguments(arguments)}}
    return {"id": call_id, **written} if call_id else written


def rendered(source: str, *turns: dict[str, Any], **variables: Any) -> str:
    return ChatTemplate(source, {}).render(turns, variables=variables)


@pytest.mark.parametrize(
    ("source", "expected"),
    [(GLM, 'assistant:<look>city=Bern;days=2;|'), (PARTS, "assistant:|"),
     (NONE, 'assistant:calls<look>{"city": "Bern", "days": 2}|')],
)  # fmt: skip
def test_an_answer_without_content_is_empty_unless_the_template_asks_for_none(source: str, expected: str) -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": [call("look", city="Bern", days=2)]}
    assert rendered(source, turn) == expected


def test_several_calls_are_answers_of_their_own_where_a_template_writes_one() -> None:
    two = {"role": "assistant", "content": "I look.", "tool_calls": [call("look", "a", x=1), call("now", "b")]}
    results = [{"role": "tool", "tool_call_id": at, "content": at.upper()} for at in ("b", "a")]
    assert rendered(ONE, two, *results, {"role": "user", "content": "So?"}) == (
        'assistant:look{"x": 1}|tool:A|assistant:now{}|tool:B|user:So?|'
    )
    unnamed = {"role": "assistant", "content": None, "tool_calls": [call("look"), call("now")]}
    assert rendered(ONE, unnamed, *results) == "assistant:look{}|assistant:now{}|tool:B|tool:A|"
    assert rendered(ONE, {**unnamed, "tool_calls": [call("now")]}, results[0]) == "assistant:now{}|tool:B|"


SHORT = (
    "{% for m in messages %}{{ m.role }}:{% for call in m.tool_calls or [] %}"
    "{% if call.id is not defined or call.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}{{ call.id }},"
    "{% endfor %}{% if m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    "{{ m.tool_call_id }}{% endif %}|{% endfor %}"
)


def test_ids_of_other_servers_are_as_long_as_the_template_wants_them() -> None:
    calls = [call("look", "abcdefgh1"), call("now", "call_0123456789"), call("look"), call("now", "é")]
    results = [{"role": "tool", "tool_call_id": at, "content": ""} for at in ("call_0123456789", "abcdefgh1", "é")]
    turns = [{"role": "assistant", "content": "", "tool_calls": calls}, *results, {"role": "tool", "content": ""}]
    written = rendered(SHORT, *turns)
    first, second, third, fourth = written.partition("assistant:")[2].partition(",|")[0].split(",")
    assert first == "abcdefgh1"
    assert written.endswith(f"tool:{second}|tool:{first}|tool:{fourth}|tool:{third}|")
    assert len({first, second, third, fourth}) == 4
    assert all(one.isascii() and one.isalnum() and len(one) == 9 for one in (second, third, fourth))


def test_a_template_that_reads_thinking_gets_the_reasoning() -> None:
    turn = {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call("look")]}
    assert rendered(HARMONY, turn) == "assistant:(Hm.)|"
    assert rendered(HARMONY, {**turn, "content": "I look."}) == "assistant:I look.|"
    assert "thinking" not in rendered("{{ messages[0] | tojson }}", turn)


def test_what_clients_may_leave_out_is_completed_where_a_template_requires_it() -> None:
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [call("look", "a")]},
        {"role": "tool", "tool_call_id": "a", "content": "x"},
    ]
    assert rendered(HERMES, *turns, tools=[LOOK]) == "look: 0;assistant:|tool:look|"
    whole = {"type": "function", "function": {"name": "look", **CITY}}
    named = [turns[0], {**turns[1], "name": "mine"}]
    assert rendered(HERMES, *named, tools=[whole]) == "look: Looks.1;assistant:|tool:mine|"
    with pytest.raises(InvalidRequestError, match="a name is required"):
        rendered(HERMES, turns[0], {**turns[1], "tool_call_id": "b"}, tools=[LOOK])
    assert rendered("{{ tools | tojson }}{{ messages | tojson }}", *turns, tools=[LOOK]) == (
        json.dumps([LOOK]) + json.dumps(turns)
    )


def test_a_model_may_have_another_template_for_tools(tmp_path: Path) -> None:
    other = "{{ tools | length }} tools{{ x }}"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": other}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    from_config = ChatTemplate.from_folder(tmp_path, {})
    (tmp_path / "chat_template.jinja").write_text("plain")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(other)
    for template in (from_config, ChatTemplate.from_folder(tmp_path, {})):
        assert template is not None
        turn = [{"role": "user", "content": "hi"}]
        assert template.render(turn) == template.render(turn, variables={"tools": []}) == "plain"
        assert template.render(turn, variables={"tools": [LOOK]}) == "1 tools"
        assert template.mentions("x")
        assert "tools" in template.source
    (tmp_path / "chosen.jinja").write_text("chosen")
    chosen = ChatTemplate.from_folder(tmp_path, {}, str(tmp_path / "chosen.jinja"))
    assert chosen is not None
    assert chosen.render([], variables={"tools": [LOOK]}) == "chosen"


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}", True),
        ("{% macro m() %}{{ thinking }}{% endmacro %}{{ m() }}", True),
        ("{% for m in messages %}{% if thinking %}{% generation %}a{% endgeneration %}{% endif %}{% endfor %}", True),
        ("{% set ns = namespace(thinking=1) %}{{ ns.thinking }}{{ messages[0].thinking }} thinking", False),
        ("{% for thinking in messages %}{{ thinking }}{% endfor %}", False),
        ("{# thinking #}", False),
    ],
)
def test_a_template_is_known_to_read_a_variable_or_not(source: str, reads: bool) -> None:
    assert ChatTemplate(source, {}).mentions("thinking") is reads
