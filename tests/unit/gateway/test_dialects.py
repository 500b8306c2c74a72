"""Parsers of tool calls and reasoning: recorded answers at every cut, cut answers, and text that only looks alike."""

from __future__ import annotations

import itertools
import json
import re

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.errors import ConfigError, ModelError
from alignedserve.gateway.dialects import schema_types
from alignedserve.gateway.dialects.detection import reasoning_dialect_of, tool_dialect_of
from alignedserve.gateway.dialects.families import REASONING, TOOLS
from alignedserve.gateway.dialects.machine import Machine, Reading, Tool
from alignedserve.gateway.dialects.model_dialects import ModelDialects, choose_dialects
from alignedserve.gateway.dialects.pieces import CallStart, Piece, joined
from alignedserve.gateway.dialects.response_template import TemplateParser, check_template, markers_of
from alignedserve.gateway.dialects.thinking import ThinkingParser
from alignedserve.model import resolve_model
from alignedserve.text import Tokenizer
from support.dialect_samples import ODD_SAMPLES, SAMPLES, TOOL_LIST, Sample, make_parser, parse, read_pieces
from support.machines import FACTOR

EXAMPLES = int(40 * FACTOR)
NAMES = (*TOOLS, "")


def parser_of(sample: Sample):  # type: ignore[no-untyped-def]
    return make_parser(sample.dialect, sample.reasoning, sample.prompt)


@pytest.mark.parametrize(
    "sample", [*SAMPLES, *ODD_SAMPLES], ids=lambda sample: f"{sample.dialect}-{sample.text[:12]!r}"
)
def test_a_recorded_answer_means_what_it_says_however_it_is_cut(sample: Sample) -> None:
    pieces = parse(parser_of(sample), sample.text)
    found = read_pieces(pieces)
    assert (found.content, found.reasoning) == (sample.content, sample.thought)
    assert found.arguments == list(sample.calls)
    assert tuple(found.calls[at][2] for at in range(len(sample.ids))) == sample.ids
    for cut in range(1, len(sample.text)):
        assert parse(parser_of(sample), sample.text[:cut], sample.text[cut:]) == pieces
    assert parse(parser_of(sample), *sample.text) == pieces


@pytest.mark.parametrize(
    "sample", [*SAMPLES, *ODD_SAMPLES], ids=lambda sample: f"{sample.dialect}-{sample.text[:12]!r}"
)
def test_an_answer_that_ends_early_loses_nothing_that_it_said(sample: Sample) -> None:
    whole = read_pieces(parse(parser_of(sample), sample.text))
    for cut in range(len(sample.text)):
        found = read_pieces(parse(parser_of(sample), sample.text[:cut]))
        for (name, arguments, _), (its_name, its_arguments, _) in zip(found.calls, whole.calls, strict=False):
            assert name == its_name
            if arguments == its_arguments:
                json.loads(arguments)


def test_arguments_arrive_while_they_are_written() -> None:
    parser = make_parser("hermes")
    parser.feed('<tool_call>\n{"name": "get_weather", "arguments": ')
    assert isinstance(parser.feed('{"ci')[0], CallStart)
    assert read_pieces(make_parser("hermes").feed('<tool_call>{"name": "get", "arguments": {"a": "b')).calls == (
        ("get", '{"a": "b', "call-0"),
    )


def test_no_more_calls_are_read_than_asked_for() -> None:
    one = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    found = read_pieces(parse(make_parser("hermes", most=1), one + one))
    assert (len(found.calls), found.content) == (1, one)


def test_an_id_that_the_model_writes_twice_is_replaced() -> None:
    one = "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    found = read_pieces(parse(make_parser("kimi_k2"), one + one))
    assert [call[2] for call in found.calls] == ["functions.now:0", "call-1"]


def test_control_characters_in_strings_are_escaped_and_wrong_json_is_content_from_there_on() -> None:
    text = '<tool_call>{"name": "get", "arguments": {"a": "x\ny", "b": nix}}</tool_call>'
    found = read_pieces(parse(make_parser("hermes"), text))
    assert found.calls[0][1] == '{"a": "x\\ny", "b": n'
    assert found.content == "ix}}</tool_call>"


_MARKS = sorted({mark for dialect in TOOLS.values() for mark in dialect.markers}
                | {mark for dialect in REASONING.values() for mark in (dialect.open, dialect.close)})  # fmt: skip
_BITS = [
    *_MARKS, "<function=get>", "<function=", "<parameter=city>", "</parameter>", "</function>", "call:get{", "get",
    "now", "get_weather", '{"name": "get", "arguments": {', '{"name": "now"}', '{"arguments": {"a": 1}, "name": "get"}',
    "functions.get:0", "function", "```json\n", "\n```", "{", "}", "[", "]", "(", ")", '"', "'", "=", ":", ",", ";",
    "\\", "\n", " ", "a", "1", "-", "nul", "true", "final", "analysis", "commentary", " to=functions.get ", "<", "|>",
    "[get(a='\\ud800')]", "<arg_key>", "</arg_key><arg_value>", ', "id": "1"',
]  # fmt: skip
_SENTINEL = "§"
WILD = st.lists(st.one_of(st.sampled_from(_BITS), st.text(max_size=3), st.just(_SENTINEL)), max_size=30).map("".join)


@pytest.mark.parametrize("dialect", NAMES)
@settings(max_examples=EXAMPLES, deadline=None)
@given(text=WILD, reasoning=st.sampled_from(("", *REASONING)), cuts=st.lists(st.integers(0, 200), max_size=6))
def test_no_text_raises_or_is_lost_and_cuts_change_nothing(
    dialect: str, text: str, reasoning: str, cuts: list[int]
) -> None:
    if not dialect and not reasoning:
        return
    pieces = parse(make_parser(dialect, reasoning), text)
    at = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    parts = [text[begin:end] for begin, end in itertools.pairwise(at)]
    assert parse(make_parser(dialect, reasoning), *parts) == pieces
    assert parse(make_parser(dialect, reasoning), *text) == pieces
    found = read_pieces(pieces)
    orjson.dumps([found.content, found.reasoning, found.calls])
    kept = found.content + found.reasoning + "".join(arguments for _, arguments, _ in found.calls)
    assert kept.count(_SENTINEL) == text.count(_SENTINEL)
    if not found.calls and not found.reasoning and dialect not in ("harmony", "") and not reasoning:
        assert found.content == text


_TAGS = [
    "<tool_call>", "<function=get>", "<parameter=a>", "<parameter=b>", "</parameter>", "</function>", "get", "\n",
    "</tool_call>", "<arg_key>a</arg_key>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
]  # fmt: skip


@pytest.mark.parametrize("dialect", ["qwen3_coder", "glm45", "glm47"])
@settings(max_examples=EXAMPLES, deadline=None)
@given(bits=st.lists(st.one_of(st.sampled_from(_TAGS), st.text(max_size=3), st.just(_SENTINEL)), max_size=20),
       cuts=st.lists(st.integers(0, 200), max_size=6))  # fmt: skip
def test_arguments_between_tags_are_an_object_whatever_the_model_writes(
    dialect: str, bits: list[str], cuts: list[int]
) -> None:
    begin = (
        "<tool_call><function=get><parameter=a>" if dialect == "qwen3_coder" else "<tool_call>get<arg_key>a</arg_key>"
    )
    text = f"{begin}{'' if dialect == 'qwen3_coder' else '<arg_value>'}{''.join(bits)}"

    def read(*parts: str) -> list[Piece]:
        parser = make_parser(dialect)
        return joined([*(piece for part in parts for piece in parser.feed(part)), *parser.end_whole()])

    at = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = read(text)
    assert read(*(text[begin:end] for begin, end in itertools.pairwise(at))) == read(*text) == pieces
    found = read_pieces(pieces)
    assert found.calls
    assert all(isinstance(arguments, dict) for _, arguments in found.arguments)
    kept = found.content + "".join(arguments for _, arguments, _ in found.calls)
    assert kept.count(_SENTINEL) == text.count(_SENTINEL)


@settings(max_examples=EXAMPLES, deadline=None)
@given(value=st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8),
)  # fmt: skip
def test_any_json_object_arrives_as_arguments_unchanged(value: object) -> None:
    written = json.dumps({"v": value}, ensure_ascii=False)
    text = f'<tool_call>{{"name": "get", "arguments": {written}}}</tool_call>'
    found = read_pieces(parse(make_parser("hermes"), text))
    assert [arguments for _, arguments, _ in found.calls] == [written]
    assert found.content == ""


@pytest.mark.parametrize("dialect", TOOLS)
def test_a_text_of_openers_is_read_a_bounded_number_of_times(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    original = Machine.char

    def counted(self: Machine) -> Reading[str]:
        nonlocal steps
        steps += 1
        return original(self)

    monkeypatch.setattr(Machine, "char", counted)
    for mark in (*TOOLS[dialect].markers, '{"arguments": {"a":', "[get(", "<|channel|>analysis", "[[", "<"):
        steps, text = 0, mark * (4000 // len(mark))
        read_pieces(parse(make_parser(dialect), text))
        assert steps < 40 * len(text)


@pytest.mark.parametrize("keyword", ["anyOf", "allOf"])
def test_types_of_a_schema_that_repeats_another_a_million_times_are_found_at_once(
    keyword: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    definitions: dict[str, object] = {"d0": {"type": "string"}}
    for number in range(1, 8):
        definitions[f"d{number}"] = {keyword: [{"$ref": f"#/$defs/d{number - 1}"}] * 8}
    schema = {"$defs": definitions, "properties": {"a": {"$ref": "#/$defs/d7"}}}
    visits = itertools.count()
    original = schema_types.target_of
    monkeypatch.setattr(schema_types, "target_of", lambda *of: (next(visits), original(*of))[1])
    schema_types.parameter_types(schema, "a")
    assert next(visits) < 10_000


# ---- reasoning


@pytest.mark.parametrize(("prompt", "begun"), [("a<think>\n", True), ("<think>\n\n</think>\n\n", False), ("a", False)])
def test_a_prompt_says_whether_its_answer_begins_within_reasoning(prompt: str, begun: bool) -> None:
    assert REASONING["qwen3"].begun_by(prompt) is begun
    assert REASONING["deepseek_r1"].begun_by(prompt) is (begun or "</think>" not in prompt)


def test_a_marker_in_the_middle_of_an_answer_is_text() -> None:
    parser = ThinkingParser("<think>", "</think>", begun=False)
    assert read_pieces(parse(parser, "The tag <think> opens.")).content == "The tag <think> opens."


def test_the_parser_says_whether_it_is_within_reasoning() -> None:
    parser = make_parser("hermes", "qwen3")
    states = []
    for text in ("<thi", "nk>", "a", "</think", ">", "b"):
        parser.feed(text)
        states.append(parser.reasoning)
    assert states == [False, True, True, True, False, False]


# ---- transformers' response templates

TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
}


def template_parser(prompt: str = "") -> TemplateParser:
    return TemplateParser(TEMPLATE, prompt, TOOL_LIST, lambda index: f"call-{index}")


def test_a_response_template_is_read_by_the_library() -> None:
    check_template(TEMPLATE)
    assert markers_of(TEMPLATE) == ("<think>", "</think>", "<tool_call>", "</tool_call>")
    text = '<think>Hm.</think>I look.<tool_call>{"name": "get", "arguments": {"a": 1}}</tool_call>'
    pieces = parse(template_parser(), text)
    found = read_pieces(pieces)
    assert (found.content, found.reasoning, found.arguments) == ("I look.", "Hm.", [("get", {"a": 1})])
    for cut in range(len(text)):
        assert parse(template_parser(), text[:cut], text[cut:]) == pieces
    assert read_pieces(parse(template_parser("<|im_start|>assistant\n<think>"), "a</think>b")).reasoning == "a"


@pytest.mark.parametrize("body", ["nonsense", '{"name": "unknown", "arguments": {}}', "[1]", '{"a":'])
def test_what_the_library_cannot_read_is_content(body: str) -> None:
    for text in (f"<tool_call>{body}</tool_call> so", f"<tool_call>{body}"):
        found = read_pieces(parse(template_parser(), text))
        assert body in found.content
        assert not found.calls
        assert found.content.endswith(" so") or not text.endswith(" so")


def test_samples_cover_every_dialect() -> None:
    assert {sample.dialect for sample in SAMPLES} == set(TOOLS)
    assert all(re.fullmatch(r"[a-z0-9_]+", name) for name in (*TOOLS, *REASONING))
    assert Tool("a").parameters == {}


# ---- which dialect a model has

_ONES = "{%- for tool in tools %}{{ tool }}{% endfor %}"
_FOUND = [
    (f"{_ONES}<tool_call>", "qwen2", "hermes", ""),
    (f"{_ONES}<tool_call><think></think>", "qwen3", "hermes", "qwen3"),
    (f"{_ONES}<tool_call><function=a><parameter=b>", "qwen3_moe", "qwen3_coder", ""),
    (f"{_ONES}<tool_call><arg_key></think>", "glm4_moe", "glm45", "glm45"),
    (f"{_ONES}<tool_call><arg_key>k</arg_key><arg_value></think>", "glm4_moe", "glm47", "glm45"),
    (f"{_ONES}" + '{"name": x, "parameters": y}', "llama", "llama3_json", ""),
    (f"{_ONES}[func_name1(a=b)]", "llama4", "pythonic", ""),
    (f"{_ONES}<|python_start|>" + '{"name": x, "parameters": y}', "llama4", "llama3_json", ""),
    (f"{_ONES}<|python_start|>[func_name1(a=b)]" + '"parameters"', "llama4", "pythonic", ""),
    (f"{_ONES}[TOOL_CALLS][THINK]", "mistral3", "mistral", "mistral"),
    (f"{_ONES}<|tool_calls_section_begin|></think>", "kimi_k2", "kimi_k2", "kimi_k2"),
    (f"{_ONES}<|im_system|>tool_declare<|im_middle|>", "kimi_k2", "kimi_k2", ""),
    (f"{_ONES}<｜tool▁calls▁begin｜>```json<｜Assistant｜></think>", "deepseek_v3", "deepseek_v3", "deepseek_v3"),
    (f"{_ONES}<｜tool▁calls▁begin｜><｜Assistant｜></think>", "deepseek_v3", "deepseek_v31", "deepseek_v3"),
    (f"{_ONES}<|tool_call><|channel>", "gemma4", "gemma4", "gemma4"),
    (f"{_ONES}<start_function_call>", "gemma3_text", "functiongemma", ""),
    (f"{_ONES}<|channel|><|message|>", "gpt_oss", "harmony", "harmony"),
    ("<tool_call>", "qwen2", "", ""),
    (_ONES, "phi3", "", ""),
]


@pytest.mark.parametrize(("template", "architecture", "tools", "reasoning"), _FOUND)
def test_a_dialect_is_found_by_chat_template_and_architecture(
    template: str, architecture: str, tools: str, reasoning: str
) -> None:
    assert tool_dialect_of(template, architecture) == tools
    assert reasoning_dialect_of(template, architecture) == reasoning


def test_a_configured_name_wins_and_an_unknown_one_is_refused() -> None:
    tokenizer = Tokenizer.from_folder(resolve_model("tiny"))

    def chosen(*names: str, response_template: dict[str, object] | None = None) -> ModelDialects:
        return choose_dialects(
            *names, chat_template=f"{_ONES}<tool_call>", tokenizer=tokenizer, response_template=response_template
        )

    assert chosen("auto", "auto") == ModelDialects(TOOLS["hermes"])
    assert chosen("glm45", "none") == ModelDialects(TOOLS["glm45"])
    assert chosen("none", "qwen3") == ModelDialects(None, REASONING["qwen3"])
    assert chosen("openai", "gpt_oss") == ModelDialects(TOOLS["harmony"], REASONING["harmony"], None, {5: "<|end|>"})
    assert chosen("auto", "auto", response_template=TEMPLATE).template == TEMPLATE
    assert chosen("hermes", "auto", response_template=TEMPLATE).template is None
    for names in (("nothing", "auto"), ("auto", "nothing"), ("response_template", "auto")):
        with pytest.raises(ConfigError):
            chosen(*names)
    with pytest.raises(ModelError):
        chosen("auto", "auto", response_template={"fields": {}})
