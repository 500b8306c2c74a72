"""What parsers make of calls that models write in other ways, and of text that only begins like one."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.gateway.dialects.families import REASONING, TOOLS
from alignedserve.gateway.dialects.machine import Tool
from alignedserve.gateway.dialects.model_dialects import ModelDialects, Reading
from alignedserve.gateway.dialects.pieces import Bound, Content, Parser
from alignedserve.gateway.dialects.response_template import TemplateParser
from alignedserve.gateway.dialects.schema_types import parameter_types
from support.dialect_samples import TOOL_LIST, Read, make_parser, parse, read_pieces
from support.machines import FACTOR

COLOURS = {"$defs": {"Colour": {"type": "string", "enum": ["red", "7"]}}}
LOOSE = {
    **COLOURS,
    "type": "object",
    "properties": {
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "either": {"type": ["string", "integer"]},
        "colour": {"$ref": "#/$defs/Colour"},
        "colours": {"anyOf": [{"$ref": "#/$defs/Colour"}, {"type": "null"}]},
        "size": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "more": {"type": "object"},
        "any": {},
        "one": {"const": 3},
        "all": {"allOf": [{"type": "string"}, {"minLength": 1}]},
        "round": {"$ref": "#/properties/round"},
        "far": {"$ref": "https://example.com/schema"},
    },
}
DASHED = Tool("my-tool.v2", LOOSE)


def read_with(dialect: str, text: str, tools: tuple[Tool, ...] = (DASHED,)) -> Read:
    return read_pieces(parse(TOOLS[dialect].parser(tools, str), text))


# ---- values by the types of their schemas


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("maybe", {"string", "null"}),
        ("either", {"string", "number"}),
        ("colour", {"string"}),
        ("colours", {"string", "null"}),
        ("size", {"number", "null"}),
        ("one", {"number"}),
        ("all", {"string"}),
        ("any", None),
        ("round", None),
        ("far", None),
        ("unknown", {"string"}),
    ],
)
def test_a_parameter_has_the_types_of_its_schema(name: str, types: set[str] | None) -> None:
    assert parameter_types(LOOSE, name) == types


VALUES = [
    ("maybe", "Bern", "Bern"),
    ("maybe", "null", None),
    ("maybe", "None", None),
    ("maybe", "12", "12"),
    ("maybe", '"12"', "12"),
    ("maybe", "true", "true"),
    ("maybe", "a\nb", "a\nb"),
    ("either", "12", 12),
    ("either", "[1]", "[1]"),
    ("colour", "7", "7"),
    ("colour", "red", "red"),
    ("colours", "7", "7"),
    ("size", "12", 12),
    ("size", "None", None),
    ("more", '{"a": 1}', {"a": 1}),
    ("more", "{'a': True, 'b': (1, None)}", {"a": True, "b": [1, None]}),
    ("any", "12", 12),
    ("any", "twelve", "twelve"),
    ("all", "12", "12"),
    ("unknown", "12", "12"),
]


@pytest.mark.parametrize(("name", "written", "meant"), VALUES)
def test_a_value_means_what_its_schema_allows(name: str, written: str, meant: Any) -> None:
    coder = f"<function=my-tool.v2>\n<parameter={name}>\n{written}\n</parameter>\n</function>\n</tool_call>"
    glm = f"<tool_call>my-tool.v2\n<arg_key>{name}</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>"
    for dialect, text in (("qwen3_coder", coder), ("glm45", glm)):
        found = read_with(dialect, text)
        assert found.arguments == [("my-tool.v2", {name: meant})]
        assert found.content == ""


# ---- other ways to write a call

OTHERS = [
    ("mistral", '[TOOL_CALLS] [{"name": "get", "arguments": {"a": 1}, "id": "abcdefghi"}, '
     '{"name": "now", "arguments": {}, "id": "bcdefghij"}]', [("get", {"a": 1}), ("now", {})]),
    ("hermes", '<tool_call>{"id": "1", "name": "get", "type": "function", "arguments": {"a": 1}, "type": "x"}'
     "</tool_call>", [("get", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "now", "id": "1"}</tool_call>', [("now", {})]),
    ("llama3_json", '{"name": "get", "parameters": {"a": 1}, "type": "function"}', [("get", {"a": 1})]),
    ("harmony", "<|channel|>commentary to=functions.now<|message|><|call|>", [("now", {})]),
    ("harmony", "<|channel|>commentary to=functions.now<|message|>", [("now", {})]),
    ("harmony", '<|channel|>analysis to=functions.get code<|message|>{"a": 1}<|call|><|start|>assistant'
     '<|channel|>commentary to=functions.now json<|message|>{}<|call|>', [("get", {"a": 1}), ("now", {})]),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</tool_call>", [("now", {})]),
    ("qwen3_coder", "<tool_call>\n<function=get>\n<parameter=a>\n1\n</parameter>\n</tool_call>", [("get", {"a": "1"})]),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>get:0 <|tool_call_argument_begin|> "
     '{"a": 1} <|tool_call_end|> <|tool_calls_section_end|>', [("get", {"a": 1})]),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n"
     '{\n  "a": 1\n}\n```<｜tool▁call▁end｜>', [("get", {"a": 1})]),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "text", "calls"), OTHERS)
def test_a_call_may_be_written_in_other_ways(dialect: str, text: str, calls: list[Any]) -> None:
    pieces = parse(make_parser(dialect), text)
    found = read_pieces(pieces)
    assert (found.arguments, found.content) == (calls, "")
    for cut in range(len(text)):
        assert parse(make_parser(dialect), text[:cut], text[cut:]) == pieces


def test_a_tool_may_be_called_like_the_type_that_deepseek_v3_writes() -> None:
    begin, separator = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
    for dialect, text in (
        ("deepseek_v31", f'{begin}function{separator}{{"a": 1}}<｜tool▁call▁end｜>'),
        ("deepseek_v3", f'{begin}function{separator}function\n```json\n{{"a": 1}}\n```<｜tool▁call▁end｜>'),
    ):
        found = read_with(dialect, text, (Tool("function"),))
        assert (found.arguments, found.content) == ([("function", {"a": 1})], "")


# ---- text that only begins like a call

ALIKE = [
    ("hermes", '<tool_call>{"name": "get", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get", "arguments": {a: 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get", "colour": "red"}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "get", "colour": "red"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": nil}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": null null}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": "none"}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": "none", "name": "now"}</tool_call>'),
    ("hermes", r'<tool_call>{"name": "get", "arguments": "{\"a\": x}"}</tool_call>'),
    ("hermes", r'<tool_call>{"arguments": "{\"a\": x}", "name": "get"}</tool_call>'),
    ("hermes", r'<tool_call>{"name": "get", "arguments": "{\"a\": 1"}</tool_call>'),
    ("hermes", r'<tool_call>{"name": "get", "arguments": "{\"a\": 1}}"}</tool_call>'),
    ("hermes", r'<tool_call>{"name": "get", "arguments": "{\"a\": \"\ud800\"}"}</tool_call>'),
    ("hermes", r'<tool_call>{"name": "get", "arguments": "{\"a\": 1'),
    ("hermes", '<tool_call>{"name": "get", "arguments": "{}" "id"}</tool_call>'),
    ("llama3_json", 'Write <|python_tag|>print(1) or ; {"name": "now"}'),
    ("mistral", "[TOOL_CALLS]get[ARGS]{...}"),
    ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>{x}<｜tool▁call▁end｜>"),
    ("kimi_k2", "<|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>[]<|tool_call_end|>"),
    ("qwen3_coder", "Write <function=get> to begin one."),
    ("pythonic", "[get(5)]"),
    ("pythonic", "[get('a', b=1)]"),
    ("pythonic", "[get(...)] is how"),
    ("gemma4", "<|tool_call>call:get{...}"),
    ("functiongemma", "<start_function_call>call:get{1, 2}"),
]


@pytest.mark.parametrize(("dialect", "text"), ALIKE)
def test_what_only_begins_like_a_call_is_text(dialect: str, text: str) -> None:
    found = read_pieces(parse(make_parser(dialect), text))
    assert found.calls == ()
    assert found.content == text
    for cut in range(len(text)):
        assert read_pieces(parse(make_parser(dialect), text[:cut], text[cut:])) == found


def test_a_second_call_that_is_none_is_text_and_the_first_one_stays() -> None:
    found = read_pieces(parse(make_parser("pythonic"), "[now(), get(5)]"))
    assert (found.arguments, found.content) == ([("now", {})], ", get(5)]")


def test_white_space_after_a_call_is_kept_where_text_follows() -> None:
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n\nSo.'
    assert read_pieces(parse(make_parser("hermes"), text)).content == "\n\nSo."
    text = "<function=now>\n</function>\n\n So."
    assert read_pieces(parse(make_parser("qwen3_coder"), text)).content == "\n\n So."


def test_text_of_a_grammar_is_no_call_even_if_it_has_llamas_tag() -> None:
    text = 'Write <|python_tag|>{"name": "now"}'
    dialects = ModelDialects(TOOLS["llama3_json"])
    found = read_pieces(parse(Reading(dialects, "", TOOL_LIST, begins=("{", "<|python_tag|>")).parser("a"), text))
    assert (found.content, found.calls) == (text, ())
    free = read_pieces(parse(Reading(dialects, "", TOOL_LIST).parser("a"), text))
    assert (free.content, free.arguments) == ("Write", [("now", {})])


# ---- calls that the model ends too early

_CODER = "<tool_call>\n<function=get_weather>\n<parameter=city>\nBern"
_GLM = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Bern"
EARLY = [
    ("qwen3_coder", _CODER, "{", '"city": "Bern'),
    ("qwen3_coder", f"{_CODER}\n</parameter>\n", "{", '"city": "Bern"'),
    ("qwen3_coder", f"{_CODER}\n</parameter>\n<parameter=days>\n2", "{", '"city": "Bern", "days": 2'),
    ("glm45", _GLM, "{", '"city": "Bern'),
    ("glm45", f"{_GLM}</arg_value>\n", "{", '"city": "Bern"'),
]


@pytest.mark.parametrize(("dialect", "text", "brace", "written"), EARLY)
@pytest.mark.parametrize("within", ["", "chain", "bound"])
def test_a_call_that_the_model_ended_is_whole_and_one_that_was_cut_is_not(
    dialect: str, text: str, brace: str, written: str, within: str
) -> None:
    def parser() -> Parser:
        found = make_parser(dialect, "qwen3" if within == "chain" else "")
        return Bound(found, ("<tool_call>",), forced=False, first=False) if within == "bound" else found

    cut = read_pieces(parse(parser(), text))
    assert [call[1] for call in cut.calls] == [brace + written]
    ended = parser()
    whole = read_pieces([*ended.feed(text), *ended.end_whole()])
    ((_, arguments),) = whole.arguments
    assert whole.content == ""
    assert arguments["city"] == "Bern"


# ---- values with tags in them

_TAGS = ["</parameter>", "</function>", "<parameter=a>", "</tool_call>x", "</arg_value>x", " ", "x", "\nx", '"']


@settings(max_examples=int(60 * FACTOR), deadline=None)
@given(values=st.lists(st.lists(st.sampled_from(_TAGS), max_size=6).map(lambda bits: f"x{''.join(bits)}x"), max_size=3))
def test_values_may_contain_the_tags_of_their_format(values: list[str]) -> None:
    named = {f"k{number}": value for number, value in enumerate(values)}
    coder = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in named.items())
    glm = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in named.items())
    for dialect, text in (
        ("qwen3_coder", f"<tool_call>\n<function=get>\n{coder}</function>\n</tool_call>"),
        ("glm47", f"<tool_call>get{glm}</tool_call>"),
    ):
        assert read_pieces(parse(make_parser(dialect), text)).arguments == [("get", named)]


# ---- text that JSON, or UTF-8, cannot hold


@pytest.mark.parametrize(
    "value", ["'\\ud800'", "{'\\udfff': ['\\ud83d']}", "float('nan')", "1e999", "-1e999", "1j", "b'a'", "{1, 2}"]
)
def test_any_literal_is_written_as_json_that_utf_8_can_hold(value: str) -> None:
    (call,) = read_pieces(parse(make_parser("pythonic"), f"[get(a={value})]")).calls
    assert set(json.loads(call[1])) == {"a"}
    assert orjson.loads(orjson.dumps({"arguments": call[1]}))["arguments"] == call[1]


CALLS_AS_JSON = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<start>",
    "fields": {
        "tool_calls": {"open": "<call>", "close": "</call>", "repeats": True, "content": "json"},
        "content": {},
    },
}


@pytest.mark.parametrize("arguments", ['{"a": "\\ud800"}', '{"a": NaN}', '"{\\"a\\": 1}"', '"\\ud800"'])
def test_arguments_of_a_response_template_are_json_or_the_call_is_text(arguments: str) -> None:
    text = f'<call>{{"name": "get", "arguments": {arguments}}}</call>'
    found = read_pieces(parse(TemplateParser(CALLS_AS_JSON, "", TOOL_LIST, str), text))
    assert orjson.dumps([found.content, found.calls])
    if found.calls:
        assert "a" in json.loads(found.calls[0][1])
    else:
        assert arguments in found.content


def test_a_response_template_has_no_more_calls_than_asked_for() -> None:
    one = '<call>{"name": "now"}</call>'
    found = read_pieces(parse(TemplateParser(CALLS_AS_JSON, "", TOOL_LIST, str, 1), one + one))
    assert len(found.calls) == 1
    assert found.content == '{"name": "now"}'


# ---- calls within reasoning, and reasoning as a part of the content


def reading(tools: str, reasoning: str, prompt: str = "", **options: Any) -> Reading:
    return Reading(ModelDialects(TOOLS[tools], REASONING[reasoning]), prompt, TOOL_LIST, **options)


_K2 = "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"


@pytest.mark.parametrize(
    ("tools", "reasoning", "call"),
    [("kimi_k2", "kimi_k2", _K2), ("qwen3_coder", "qwen3", "<tool_call>\n<function=now>\n</function>\n</tool_call>")],
)
def test_a_call_ends_reasoning_that_was_not_closed(tools: str, reasoning: str, call: str) -> None:
    text = f"<think>Hm, a <tool_call>.\n{call}"
    known = reading(tools, reasoning)
    pieces = parse(known.parser("a"), text)
    found = read_pieces(pieces)
    assert (found.reasoning, found.content, found.arguments) == ("Hm, a <tool_call>.", "", [("now", {})])
    for cut in range(len(text)):
        assert parse(known.parser("a"), text[:cut], text[cut:]) == pieces
    bound = read_pieces(parse(reading(tools, reasoning, free=False).parser("a"), f"{text}</think>{call}"))
    assert bound.reasoning == text.removeprefix("<think>")
    assert bound.arguments == [("now", {})]


def test_reasoning_that_is_not_apart_keeps_its_markers_and_has_no_calls() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    text = f"\n<think>\nLike {call}?\n</think>\n\nWell.\n{call}"
    known = reading("hermes", "qwen3", separate_reasoning=False)
    pieces = parse(known.parser("a"), text)
    found = read_pieces(pieces)
    assert found.reasoning + found.content == f"\n<think>\nLike {call}?\n</think>\n\nWell."
    assert found.arguments == [("now", {})]
    assert not any(isinstance(piece, Content) and "think" in piece.text for piece in pieces)
    for cut in range(len(text)):
        assert parse(known.parser("a"), text[:cut], text[cut:]) == pieces
