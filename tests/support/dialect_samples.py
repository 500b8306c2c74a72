"""What models of each family write, by the formats that the families document, and what it means."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from alignedserve.gateway.dialects.base import ReasoningDialect
from alignedserve.gateway.dialects.families import REASONING, TOOLS
from alignedserve.gateway.dialects.machine import Tool
from alignedserve.gateway.dialects.pieces import (
    CallArguments,
    CallStart,
    Chain,
    Content,
    Parser,
    Piece,
    Reasoning,
    joined,
)
from alignedserve.gateway.dialects.thinking import ThinkingParser

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "units": {"enum": ["metric", "imperial"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "exact": {"type": "boolean"},
    },
    "required": ["city"],
}
FLAT = {**WEATHER, "properties": {name: entry for name, entry in WEATHER["properties"].items() if name != "tags"}}  # type: ignore[attr-defined]
TOOL_LIST = (Tool("get_weather", WEATHER), Tool("get", {}), Tool("now", {"type": "object", "properties": {}}))
Call = tuple[str, Any]


@dataclass(frozen=True)
class Read:
    """What a parser found: content, reasoning, and each call's name, arguments and id."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str, str], ...] = ()

    @property
    def arguments(self) -> list[Call]:
        return [(name, json.loads(arguments)) for name, arguments, _ in self.calls]


def make_parser(dialect: str = "", reasoning: str = "", prompt: str = "", most: int | None = None) -> Parser:
    """The parser of a request with TOOL_LIST."""
    known: ReasoningDialect | None = REASONING[reasoning] if reasoning else None
    thoughts = None if known is None else ThinkingParser(known.open, known.close, begun=known.begun_by(prompt))
    calls = TOOLS[dialect].parser(TOOL_LIST, lambda index: f"call-{index}", most) if dialect else None
    if thoughts is None:
        assert calls is not None
        return calls
    return thoughts if calls is None else Chain(thoughts, calls)


def read_pieces(pieces: list[Piece]) -> Read:
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    starts = [piece for piece in pieces if isinstance(piece, CallStart)]
    assert [start.index for start in starts] == list(range(len(starts)))
    calls = tuple(
        (
            start.name,
            "".join(p.text for p in pieces if isinstance(p, CallArguments) and p.index == start.index),
            start.id,
        )
        for start in starts
    )
    return Read(content, reasoning, calls)


def parse(parser: Parser, *texts: str) -> list[Piece]:
    """All pieces, joined."""
    pieces: list[Piece] = []
    for text in texts:
        pieces += parser.feed(text)
    return joined([*pieces, *parser.end()])


@dataclass(frozen=True)
class Sample:
    """`text`, read by a dialect of tools and one of reasoning ("": none), with what it means."""

    dialect: str
    text: str
    calls: tuple[Call, ...] = ()
    content: str = ""
    thought: str = ""
    reasoning: str = ""
    prompt: str = ""
    ids: tuple[str, ...] = ()


BERN: Call = ("get_weather", {"city": "Bern", "days": 2})
NOW: Call = ("now", {})
_DS = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
_DS_END = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
_K2 = "<|tool_calls_section_begin|><|tool_call_begin|>"

SAMPLES = (
    Sample("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern", "days": 2}}\n</tool_call>',
           (BERN,)),
    Sample("hermes", 'Let me look.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern", "days": 2}}\n'
           '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', (BERN, NOW), "Let me look."),
    Sample("hermes", '<tool_call>{"arguments": {"city": "Bern", "days": 2}, "name": "get_weather"}</tool_call>',
           (BERN,)),
    Sample("hermes", '<tool_call>{"name": "now"}</tool_call>\n', (NOW,)),
    Sample("hermes", 'Use <tool_call>{"name": "unknown", "arguments": {}}</tool_call> like this.', (),
           'Use <tool_call>{"name": "unknown", "arguments": {}}</tool_call> like this.'),
    Sample("hermes", "<think>\nThe user asks.\n</think>\n\n<tool_call>\n"
           '{"name": "get", "arguments": {"a": "</tool_call> \\u00e9 \\"q\\""}}\n</tool_call>',
           (("get", {"a": '</tool_call> é "q"'}),), thought="The user asks.", reasoning="qwen3"),
    Sample("hermes", "It is warm.", (), "It is warm.", reasoning="qwen3"),
    Sample("hermes", "Two and two.\n</think>\n\nFour.", (), "Four.", "Two and two.", "deepseek_r1"),
    Sample("hermes", "Four.", (), "Four.", "", "deepseek_r1", prompt="<｜Assistant｜></think>"),
    Sample("hermes", "Hm.</think>Four.", (), "Four.", "Hm.", "qwen3", prompt="<|im_start|>assistant\n<think>\n"),
    Sample("llama3_json", '{"name": "get_weather", "parameters": {"city": "Bern", "days": 2}}', (BERN,)),
    Sample("llama3_json", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Bern", "days": 2}}; '
           '{"name": "now", "parameters": {}}', (BERN, NOW)),
    Sample("llama3_json", '{"type": "function", "name": "now", "parameters": {}}', (NOW,)),
    Sample("llama3_json", 'Like {"name": "now", "parameters": {}}', (), 'Like {"name": "now", "parameters": {}}'),
    Sample("qwen3_coder", "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nBern\n</parameter>\n"
           "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>", (BERN,), "I look."),
    Sample("qwen3_coder", "<function=get_weather>\n<parameter=city>\na\n<b>\"\\\n</parameter>\n<parameter=tags>\n"
           '["x", "y"]\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n</function>',
           (("get_weather", {"city": 'a\n<b>"\\', "tags": ["x", "y"], "exact": True}),)),
    Sample("deepseek_v3", f"{_DS}function<｜tool▁sep｜>get_weather\n```json\n"
           '{"city": "Bern", "days": 2}\n```' + "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>"
           "function<｜tool▁sep｜>now\n```json\n{}\n```" + _DS_END, (BERN, NOW)),
    Sample("deepseek_v31", f"Yes.{_DS}get_weather<｜tool▁sep｜>" '{"city": "Bern", "days": 2}' + _DS_END, (BERN,),
           "Yes."),
    Sample("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Bern", "days": 2}}, '
           '{"name": "now", "arguments": {}}]', (BERN, NOW)),
    Sample("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Bern", "days": 2}[TOOL_CALLS]now[ARGS]{}', (BERN, NOW)),
    Sample("mistral", "[THINK]So.[/THINK][TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{}", (NOW,), thought="So.",
           reasoning="mistral", ids=("a1b2c3d4e",)),
    Sample("glm45", "<think>hm</think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n"
           "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>", (BERN,), thought="hm",
           reasoning="glm45"),
    Sample("glm47", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Bern</arg_value><arg_key>days</arg_key>"
           "<arg_value>2</arg_value></tool_call><tool_call>now</tool_call>", (BERN, NOW)),
    Sample("glm45", "<tool_call>now</tool_call><tool_call>get_weather<arg_key>city</arg_key><arg_value>Bern</arg_value>"
           "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>", (NOW, BERN)),
    Sample("kimi_k2", _K2 + 'functions.get_weather:0<|tool_call_argument_begin|>{"city": "Bern", "days": 2}'
           "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
           "<|tool_calls_section_end|>", (BERN, NOW), ids=("functions.get_weather:0", "functions.now:1")),
    Sample("harmony", "<|channel|>analysis<|message|>The user asks.<|end|><|start|>assistant<|channel|>commentary "
           'to=functions.get_weather <|constrain|>json<|message|>{"city": "Bern", "days": 2}<|call|>', (BERN,), "",
           "The user asks."),
    Sample("harmony", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.now<|channel|>"
           "commentary json<|message|>{}<|call|>", (NOW,), "I look."),
    Sample("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Four.", (),
           "Four.", "Hm."),
    Sample("harmony", "Four <|channel|> five.", (), "Four  five."),
    Sample("gemma4", '<|tool_call>call:get_weather{city:<|"|>Bern<|"|>,days:2}<tool_call|>', (BERN,)),
    Sample("gemma4", '<|channel>thought\nHm.\n<channel|>I look.<|tool_call>call:get{a:[1,<|"|>b"<|"|>,{c:true}],'
           'd:{}}<tool_call|><|tool_call>call:now{}<tool_call|>', (("get", {"a": [1, 'b"', {"c": True}], "d": {}}),
           NOW), "I look.", "Hm.", "gemma4"),
    Sample("functiongemma", "<start_function_call>call:get_weather{city:<escape>Bern<escape>,days:2}"
           "<end_function_call>", (BERN,)),
    Sample("pythonic", "[get_weather(city='Bern', days=2), now()]", (BERN, NOW)),
    Sample("pythonic", '<|python_start|>[get(a=[1, (2, None)], b={"x": "a, (b)"}, c=-1.5, d="it\\\'s")]<|python_end|>',
           (("get", {"a": [1, [2, None]], "b": {"x": "a, (b)"}, "c": -1.5, "d": "it's"}),)),
    Sample("pythonic", "[1, 2] is a list", (), "[1, 2] is a list"),
)  # fmt: skip

_CITY = "<function=get_weather>\n<parameter=city>\nBern"
_CITY_DAYS = f"{_CITY}\n</parameter>\n<parameter=days>\n2\n</parameter>"
_GLM = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>"
_CODER_END, _PARAMETER_END = "\n</function>\n</tool_call>", "\n</parameter>"
_AGAIN = "\n<parameter=city>\nBasel\n</parameter>"
_TAG_IN_CODE = 'print("</parameter> and </function>")\nx = "</tool_call></parameter></function>"\n</function>\nx=1'
_TAG_IN_LINES = "\n<parameter=example>\n</parameter>\n.\n"
_TAG_IN_GLM = 'print("</arg_value> and </tool_call>")\n<arg_key>none</arg_key>'
_WEATHER = "get_weather", '{"city": "Bern", "days": 2}'
_HEAD, _TO = "<|start|>assistant<|channel|>", "<|channel|>commentary to=functions."
_HM = "<|channel|>analysis<|message|>Hm.<|end|>"

ODD_SAMPLES = (
    # A value without its tag
    Sample("qwen3_coder", f"I look.\n<tool_call>\n{_CITY}\n<parameter=days>\n2\n</parameter>{_CODER_END}", (BERN,),
           "I look."),
    Sample("qwen3_coder", f'{_CITY}{_PARAMETER_END}\n<parameter=tags>\n["x"]{_CODER_END}',
           (("get_weather", {"city": "Bern", "tags": ["x"]}),)),
    Sample("qwen3_coder", f"{_CITY}{_CODER_END}\n<tool_call>\n<function=get>\n<parameter=a>\nb\n</tool_call>\n"
           f"<tool_call>\n<function=now>{_CODER_END}", (("get_weather", {"city": "Bern"}), ("get", {"a": "b"}), NOW)),
    Sample("qwen3_coder", "<function=get_weather><parameter=city>Bern<parameter=days>2</function></tool_call>",
           (BERN,)),
    Sample("qwen3_coder", f"{_CITY}</parameter>\n<parameter=days>\n2</parameter>{_CODER_END}", (BERN,)),
    Sample("glm47", f"{_GLM}Bern<arg_key>days</arg_key><arg_value>2</tool_call><tool_call>now</tool_call>",
           (BERN, NOW)),
    Sample("glm45", f"{_GLM}Bern\n<arg_key>days</arg_key>\n<arg_value>2\n</tool_call>", (BERN,)),
    # A value with tags in it
    Sample("qwen3_coder", f"<function=get>\n<parameter=code>\n{_TAG_IN_CODE}{_PARAMETER_END}{_CODER_END}",
           (("get", {"code": _TAG_IN_CODE}),)),
    Sample("qwen3_coder", f"<function=get_weather>\n<parameter=city>\n{_TAG_IN_LINES}{_PARAMETER_END}{_CODER_END}",
           (("get_weather", {"city": _TAG_IN_LINES}),)),
    Sample("qwen3_coder", "<function=get>\n<parameter=a>\n</parameter>\n<parameter=b>\n\n</parameter></function>",
           (("get", {"a": "", "b": ""}),)),
    Sample("glm47", f"{_GLM}{_TAG_IN_GLM}</arg_value></tool_call>", (("get_weather", {"city": _TAG_IN_GLM}),)),
    # Other mistakes: the call is whole, and what is no part of it is content
    Sample("qwen3_coder", f"{_CITY_DAYS}{_AGAIN}{_CODER_END}", (BERN,), _AGAIN),
    Sample("qwen3_coder", f"{_CITY}{_PARAMETER_END}{_AGAIN}\n<parameter=days>\n2{_PARAMETER_END}{_CODER_END}", (BERN,),
           _AGAIN),
    Sample("glm47", f"{_GLM}Bern</arg_value><arg_key>days</arg_key><arg_value>2</arg_value>"
           "<arg_key>city</arg_key><arg_value>Basel</arg_value></tool_call>", (BERN,),
           "<arg_key>city</arg_key><arg_value>Basel</arg_value>"),
    Sample("qwen3_coder", f"{_CITY_DAYS}\n<parameter=>\n2", (BERN,), "\n<parameter=>\n2"),
    Sample("glm45", f"{_GLM}1</arg_value>\n<arg_key></arg_key>\n2", (("get_weather", {"city": "1"}),),
           "\n<arg_key></arg_key>\n2"),
    # gpt-oss: headers off the pattern
    *(Sample("harmony", f"{head}<|message|>{_WEATHER[1]}<|call|>", (BERN,)) for head in (
        f"{_HEAD}commentary to=functions.get_weather<|channel|>commentary <|constrain|>json",
        f"{_TO}get_weather <|constrain|>application/json",
        f"{_TO}get_weather<|constrain|> JSON",
        f"{_TO}get_weather JSON",
    )),
    Sample("harmony", f"<|channel|>commentary to=assistant{_HM}{_HEAD}final<|message|>Four.<|return|>", (), "Four.",
           "Hm."),
    Sample("harmony", f"{_HM}{_HEAD}commentary to=python <|constrain|>code<|message|>print(1)<|call|>", (), "print(1)",
           "Hm."),
    Sample("harmony", "<|channel|>analysis to=python code<|message|>print(1)<|call|>", (), "", "print(1)"),
    Sample("harmony", f"{_HM}{_HEAD}nothing?<|message|>Four.<|end|>{_HEAD}final<|message|> Five.", (),
           "assistantnothing?Four. Five.", "Hm."),
    Sample("harmony", "<|channel|>analysis<|message|>So <|channel|> hm<|channel|>final<|message|>Four.", (), "Four.",
           "So  hm"),
    Sample("harmony", f"{_TO}get json<|message|> [1]<|call|>", (), " [1]"),
    Sample("harmony", f"{_TO}unknown json<|message|>{{}}<|call|>", (), "{}"),
    Sample("harmony", f"{_TO}get_weather json<|message|>", (), ""),
    # Llama 3: the tag after text
    Sample("llama3_json", 'Let me check. <|python_tag|>{"name": "get_weather", "parameters": {"city": "Bern", '
           '"days": 2}}; {"name": "now", "arguments": {}}', (BERN, NOW), "Let me check."),
    # Arguments that are no object, but mean one
    Sample("llama3_json", '{"name": "now", "parameters": null}', (NOW,)),
    Sample("hermes", '<tool_call>{"name": "now", "arguments": null, "id": "1"}</tool_call>', (NOW,)),
    Sample("hermes", '<tool_call>{"arguments": null, "name": "now"}</tool_call>', (NOW,)),
    Sample("hermes", r'<tool_call>{"name": "get_weather", "arguments": "{\"city\": \"Bern\",\n \"days\": 2}"}'
           "</tool_call>", (BERN,)),
    Sample("mistral", r'[TOOL_CALLS][{"arguments": "{\"a\": \"\u00e9 \\\" \\n\"}", "name": "get"}, '
           '{"name": "now", "arguments": "{}"}]', (("get", {"a": 'é " \n'}), NOW)),
)  # fmt: skip
"""Answers with mistakes that models make."""
