"""Grammars of tool calls and reasoning: whatever a wild model writes under one, its dialect's parser reads as asked."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from alignedserve.errors import GrammarError
from alignedserve.gateway.dialects.composing import AnswerForm, grammar_of
from alignedserve.gateway.dialects.families import REASONING, TOOLS
from alignedserve.gateway.dialects.lark import MOST_CALLS
from alignedserve.gateway.dialects.machine import Tool
from alignedserve.gateway.dialects.model_dialects import ModelDialects, Reading
from alignedserve.grammar.compiled import Grammars
from alignedserve.grammar.rows import fill_rows
from alignedserve.model import resolve_model
from alignedserve.request import GrammarKind, GrammarSpec, SamplingParams
from alignedserve.text import Tokenizer
from support.dialect_samples import Read, parse, read_pieces

VOCAB_SIZE, EOS = 2112, 0
FREE = 1000  # tokens: where so many are allowed, the text is free
ENDS = {
    "qwen3_coder": ("\n</parameter>\n",), "glm45": ("</arg_value>",), "glm47": ("</arg_value>",), "gemma4": ('<|"|>',),
    "functiongemma": ("<escape>",),
}  # fmt: skip
TINY = resolve_model("tiny")
PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "units": {"enum": ["metric", "imperial"]},
        "exact": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
LOOK = Tool("look", PLACE)
NOW = Tool("now", {"type": "object", "properties": {}, "additionalProperties": False})
WORD = GrammarSpec(GrammarKind.CHOICE, json.dumps(["yes", "no"]))
SCHEMAS = {tool.name: tool.parameters for tool in (LOOK, NOW)}


@cache
def tokenizer(*special: str) -> Tokenizer:
    """The shipped one, with these special tokens added."""
    backend = Backend.from_file(str(TINY / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return Tokenizer(backend, {"eos_token": "<|endoftext|>"})


def dialects_of(tools: str, reasoning: str, *, special: bool) -> tuple[ModelDialects, Tokenizer]:
    own, thoughts = TOOLS[tools] if tools else None, REASONING[reasoning] if reasoning else None
    marks = sorted({*(own.markers if own else ()), *(thoughts.markers if thoughts else ())}) if special else []
    if special and "harmony" in (tools, reasoning):
        marks = sorted(TOOLS["harmony"].markers)
    known = tokenizer(*marks)
    return ModelDialects(own, thoughts, None, {known.backend.token_to_id(text): text for text in marks}), known


def both(names: Iterable[str]) -> list[tuple[str, bool]]:
    """Each with markers that are special tokens, and without (harmony has its own, always)."""
    return [(name, special) for name in names for special in (True, False) if special or name != "harmony"]


class Walk:
    """Draws tokens that a grammar allows until the answer ends. In free text it tries the texts that may end it."""

    def __init__(self, spec: GrammarSpec, known: Tokenizer, dialects: ModelDialects) -> None:
        sampling = SamplingParams(grammar=spec, eos_token_ids=(EOS,), max_tokens=10**6)
        grammars = Grammars.of(known, VOCAB_SIZE)
        assert grammars is not None
        self._row = grammars.row(sampling)
        self._known = known
        self._ends = ['"', *((dialects.reasoning.close,) if dialects.reasoning else ())]
        if dialects.tools is not None:
            self._ends += ENDS.get(dialects.tools.name, ())
        self.tokens: list[int] = []

    def to_the_end(self, seed: int, most: int = 400) -> str:
        draw, trying = random.Random(seed), list[int]()
        assert self._row is not None
        while len(self.tokens) < most:
            (bits,) = fill_rows([self._row], [self.tokens], VOCAB_SIZE)
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:VOCAB_SIZE]).tolist()
            if EOS in allowed and (len(allowed) == 1 or draw.random() < 0.4):
                return self._text()
            if not trying and len(allowed) > FREE and draw.random() < 0.5:
                trying = self._known.encode(draw.choice(self._ends), special_tokens=False)
            if trying and trying[0] not in allowed:
                trying = []
            self.tokens.append(trying.pop(0) if trying else draw.choice(allowed))
            if self.tokens[-1] == EOS:  # it ends the answer: whatever follows is allowed
                return self._text()
        raise AssertionError(f"no end: {self._text()[-200:]}")

    def _text(self) -> str:
        return self._known.backend.decode(
            [token for token in self.tokens if token != EOS], skip_special_tokens=False
        )  # fmt: skip


def read(text: str, dialects: ModelDialects, tools: Sequence[Tool], prompt: str = "") -> Read:
    return read_pieces(parse(Reading(dialects, prompt, tools).parser("a"), text))


@pytest.mark.parametrize(("name", "special"), both(TOOLS))
def test_a_forced_call_is_a_call_that_its_schema_allows(name: str, special: bool) -> None:
    dialects, known = dialects_of(name, "harmony" if name == "harmony" else "", special=special)
    for most in (1, None):
        spec = grammar_of(AnswerForm(None, (LOOK, NOW), True, most), dialects)
        for seed in range(3):
            text = Walk(spec, known, dialects).to_the_end(seed)
            found = read(text, dialects, (LOOK, NOW))
            assert found.content == "", text
            assert found.calls, text
            assert most is None or len(found.calls) == most
            for called, arguments in found.arguments:
                jsonschema.validate(arguments, SCHEMAS[called])


@pytest.mark.parametrize(("name", "special"), both(TOOLS))
def test_calls_that_are_cut_anywhere_leave_no_content(name: str, special: bool) -> None:
    dialects, known = dialects_of(name, "", special=special)
    begins = TOOLS[name].begins
    text = Walk(grammar_of(AnswerForm(None, (LOOK, NOW), True, 3), dialects), known, dialects).to_the_end(1)
    for forced in (True, False):
        reading = Reading(dialects, "", (LOOK, NOW), begins=begins, forced=forced)
        whole = read_pieces(parse(reading.parser("a"), text))
        for cut in range(len(text)):
            found = read_pieces(parse(reading.parser("a"), text[:cut]))
            if forced or (cut and text[:cut].startswith(begins)):
                assert found.content == "", text[:cut]
            assert found.calls[:-1] == whole.calls[: max(0, len(found.calls) - 1)]


def test_a_cut_header_after_reasoning_is_no_content() -> None:
    thought = "<|channel|>analysis<|message|>hm<|end|>"
    text = f"{thought}<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{{}}"
    dialects = ModelDialects(TOOLS["harmony"], REASONING["harmony"])
    for first in (True, False):  # beside a form that is asked for, or a strict tool
        reading = Reading(dialects, "", (NOW,), begins=TOOLS["harmony"].begins, first=first)
        for cut in range(len(thought), len(text)):
            found = read_pieces(parse(reading.parser("a"), text[:cut]))
            assert (found.content, found.reasoning) == ("", "hm"), text[:cut]


@pytest.mark.parametrize("name", [name for name in TOOLS if len(TOOLS[name].begins[0]) > 1])
def test_what_looks_like_a_call_within_an_answer_is_kept(name: str) -> None:
    opener = TOOLS[name].begins[0]
    reading = Reading(ModelDialects(TOOLS[name]), "", (NOW,), begins=(opener[:1], opener[:2]), first=True)
    for text in (f'{{"html": "a {opener[:1]}', f'["{opener}', f'{{"a": "{opener}\\n{{"'):
        assert read_pieces(parse(reading.parser("a"), text)).content == text
    for text in (opener[:1], opener[:2], opener, f" {opener}"):
        assert read_pieces(parse(reading.parser("a"), text)).content == ""


@pytest.mark.parametrize("name", TOOLS)
def test_with_a_strict_tool_an_answer_is_text_or_calls_that_the_schema_allows(name: str) -> None:
    strict = Tool("look", PLACE, strict=True)
    for special in (True, False):
        dialects, known = dialects_of(name, "", special=special)
        spec = grammar_of(AnswerForm(None, (strict,)), dialects)
        compiled = Grammars.of(known, VOCAB_SIZE)
        assert compiled is not None
        matcher = compiled.compile(spec, (EOS,)).matcher()
        if name != "harmony":
            matcher.accept([*known.encode("It is 5 degrees."), EOS])
        call = Walk(grammar_of(AnswerForm(None, (strict,), True, 1), dialects), known, dialects)
        call.to_the_end(1)
        compiled.compile(spec, (EOS,)).matcher().accept([*call.tokens, EOS])
        if TOOLS[name].calls(lark_of(dialects), (strict,)).trigger:
            compiled.compile(spec, (EOS,)).matcher().accept([*known.encode("I look: "), *call.tokens, EOS])


def lark_of(dialects: ModelDialects) -> Any:
    from alignedserve.gateway.dialects.lark import Lark

    return Lark(dialects.special)


@pytest.mark.parametrize(("name", "special"), both(REASONING))
def test_an_answer_under_a_grammar_begins_after_the_reasoning(name: str, special: bool) -> None:
    dialects, known = dialects_of("", name, special=special)
    thoughts = REASONING[name]
    for begun, prompt in ((True, thoughts.open), (False, f"{thoughts.open}{thoughts.close}")):
        spec = grammar_of(AnswerForm(WORD, begun=begun), dialects)
        for seed in range(2):
            text = Walk(spec, known, dialects).to_the_end(seed)
            found = read(text, dialects, (), prompt)
            if name == "harmony" and begun:
                found = read(thoughts.open + text, dialects, ())
            assert found.content in ("yes", "no"), text


def test_reasoning_comes_before_calls_too() -> None:
    dialects, known = dialects_of("hermes", "qwen3", special=False)
    spec = grammar_of(AnswerForm(None, (NOW,), True, 1, begun=True), dialects)
    text = Walk(spec, known, dialects).to_the_end(2)
    found = read(text, dialects, (NOW,), "<think>\n")
    assert (found.content, found.arguments) == ("", [("now", {})])
    assert "</think>" in text


def test_content_of_a_form_or_calls() -> None:
    dialects, known = dialects_of("hermes", "", special=False)
    spec = grammar_of(AnswerForm(WORD, (NOW,)), dialects)
    texts = {Walk(spec, known, dialects).to_the_end(seed) for seed in range(12)}
    assert {"yes", "no"} & texts
    assert any(read(text, dialects, (NOW,)).calls for text in texts)


RICH = {
    "type": "object",
    "$defs": {"P": {"type": "object", "properties": {"x": {"type": "number"}, "n": {"type": ["string", "null"]}},
                    "required": ["x"], "additionalProperties": False}},
    "properties": {
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"enum": ["a b", 2, None, True]}},
        "points": {"type": "array", "items": {"$ref": "#/$defs/P"}},
        "level": {"type": "integer", "minimum": 1, "maximum": 5},
        "fixed": {"const": "it's"},
    },
    "required": ["maybe", "tags", "points", "level"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["gemma4", "functiongemma", "pythonic"])
def test_values_of_formats_that_are_no_json_nest(name: str, strict: bool) -> None:
    dialects, known = dialects_of(name, "", special=name != "pythonic")
    tool = Tool("rich", RICH, strict=strict)
    spec = grammar_of(AnswerForm(None, (tool,), True, 1), dialects)
    for seed in range(4):
        text = Walk(spec, known, dialects).to_the_end(seed)
        found = read(text, dialects, (tool,))
        ((called, arguments),) = found.arguments
        assert (called, found.content) == ("rich", ""), text
        jsonschema.validate(arguments, RICH)
        assert set(arguments["points"][0] if arguments["points"] else ()) <= {"x", "n"}


@pytest.mark.parametrize("tools", ["", "hermes"])
def test_a_structural_tag_stands_beside_reasoning_and_calls(tools: str) -> None:
    choice = {"type": "grammar", "grammar": 'start: "x" | "y"'}
    tag = {"format": {"type": "tag", "begin": "<a>", "content": choice, "end": "</a>"}}
    asked = GrammarSpec(GrammarKind.STRUCTURAL_TAG, json.dumps({"type": "structural_tag", **tag}))
    dialects, known = dialects_of(tools, "qwen3", special=True)
    offered = (Tool("rich", RICH),) if tools else ()
    spec = grammar_of(AnswerForm(asked, offered), dialects)
    contents = {
        read(Walk(spec, known, dialects).to_the_end(seed, 2000), dialects, offered).content for seed in range(8)
    }
    assert contents & {"<a>x</a>", "<a>y</a>"}
    assert contents <= {"", "<a>x</a>", "<a>y</a>"}


def test_without_strict_what_a_format_cannot_follow_is_any_value() -> None:
    endless = {"$defs": {"N": {"properties": {"n": {"$ref": "#/$defs/N"}}}}, "properties": {
        "any": {}, "node": {"$ref": "#/$defs/N"}, "not": {"not": {}}, "text": {"type": "string", "pattern": "a+"},
        "open": {"type": "object", "additionalProperties": {"type": "integer"}}, "odd": {"type": "date"},
        "list": {"type": "array"}, "far": {"$ref": "https://example.com"}}, "required": ["any", "list"]}  # fmt: skip
    for name in ("gemma4", "pythonic"):
        dialects, known = dialects_of(name, "", special=name != "pythonic")
        spec = grammar_of(AnswerForm(None, (Tool("f", endless),), True, 1), dialects)
        for seed in range(3):
            found = read(Walk(spec, known, dialects).to_the_end(seed, 2000), dialects, (Tool("f", endless),))
            ((_, arguments),) = found.arguments
            assert {"any", "list"} <= arguments.keys() <= endless["properties"].keys()
        for required in (None, True, [1], "x"):
            odd = {"properties": {"p": {"type": "object", "properties": {"x": {}}, "required": required}}}
            grammar_of(AnswerForm(None, (Tool("f", odd),), True, 1), dialects)
            with pytest.raises(GrammarError, match="no list of names"):
                grammar_of(AnswerForm(None, (Tool("f", odd, strict=True),), True, 1), dialects)
        for key in endless["properties"]:
            only = {**endless, "properties": {key: endless["properties"][key]}, "required": []}
            if key in ("node", "not", "text", "far"):
                with pytest.raises(GrammarError):
                    grammar_of(AnswerForm(None, (Tool("f", only, strict=True),), True, 1), dialects)


NAMED = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("parameters", "allowed", "refused"),
    [
        (NAMED, '{"a": 1}', '{"a": 1, "b": 2}'),
        ({"type": "object", "properties": {}}, "{}", '{"b": 2}'),
        ({**NAMED, "additionalProperties": True}, '{"a": 1, "b": 2}', "{}"),
        ({**NAMED, "patternProperties": {"^b": {}}}, '{"a": 1, "b": 2}', "{}"),
        ({**NAMED, "required": ["a", "b"]}, '{"a": 1, "b": 2}', '{"a": 1}'),
        ({}, '{"b": {"c": [2]}}', "[]"),
    ],
)
def test_arguments_are_those_that_the_schema_names(parameters: dict[str, Any], allowed: str, refused: str) -> None:
    dialects, known = dialects_of("hermes", "", special=False)
    compiled = Grammars.of(known, VOCAB_SIZE)
    assert compiled is not None
    grammar = compiled.compile(grammar_of(AnswerForm(None, (Tool("f", parameters),), True), dialects), (EOS,))

    def write(arguments: str) -> None:
        text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        grammar.matcher().accept([*known.encode(text), EOS])

    write(allowed)
    with pytest.raises(GrammarError):
        write(refused)


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "gemma4", "pythonic"])
def test_what_a_format_cannot_hold_is_refused_where_it_must_be_exact(name: str) -> None:
    dialects, _ = dialects_of(name, "", special=False)
    pattern = {"properties": {"a": {"type": "string", "pattern": "a+"}}, "required": ["a"]}
    with pytest.raises(GrammarError, match=r"tool f.*pattern"):
        grammar_of(AnswerForm(None, (Tool("f", pattern, strict=True),), True), dialects)
    grammar_of(AnswerForm(None, (Tool("f", pattern),), True), dialects)
    for named, more in (("minProperties", 1), ("anyOf", []), ("required", ["b"])):
        with pytest.raises(GrammarError, match=rf"tool f.*{named}"):
            grammar_of(AnswerForm(None, (Tool("f", {**NAMED, named: more}, strict=True),), True), dialects)


def repeating(names: Sequence[str], most: int, body: Any) -> dict[str, Any]:
    """A schema whose definitions each refer `most` times to the one before: a tree of millions of subschemas."""
    definitions = {"d0": {"type": "string"}}
    for number in range(1, 6):
        definitions[f"d{number}"] = body([{"$ref": f"#/$defs/d{number - 1}"}] * most)
    return {"$defs": definitions, "properties": {name: {"$ref": "#/$defs/d5"} for name in names}, "required": [*names]}


@pytest.mark.parametrize("name", ["qwen3_coder", "glm47", "gemma4", "pythonic"])
def test_a_grammar_stays_small_whatever_a_schema_repeats(name: str) -> None:
    dialects, _ = dialects_of(name, "", special=False)
    union = repeating("a", 30, lambda inner: {"anyOf": inner})
    wide = repeating("a", 30, lambda inner: {"properties": {f"p{at}": one for at, one in enumerate(inner)}})
    for schema in (union, wide):
        spec = grammar_of(AnswerForm(None, (Tool("f", schema),), True), dialects)
        assert len(spec.text) < 10**7
    if name in ("gemma4", "pythonic"):
        for schema in (union, wide):
            with pytest.raises(GrammarError, match="too often"):
                grammar_of(AnswerForm(None, (Tool("f", schema, strict=True),), True), dialects)
        many = {"properties": {f"p{number}": {"type": "null"} for number in range(300)}}
        with pytest.raises(GrammarError, match="optional"):
            grammar_of(AnswerForm(None, (Tool("f", many),), True), dialects)
        grammar_of(AnswerForm(None, (Tool("f", {**many, "required": ["p0"]}),), True), dialects)


def test_a_grammar_that_is_too_large_is_refused() -> None:
    dialects, _ = dialects_of("pythonic", "", special=False)
    long = {"enum": ["x" * 10**5]}
    schema = {"$defs": {"d": long}, "properties": {f"p{number}": {"$ref": "#/$defs/d"} for number in range(200)}}
    with pytest.raises(GrammarError, match="smaller schemas"):
        grammar_of(AnswerForm(None, (Tool("f", schema),), True), dialects)


@pytest.mark.parametrize("name", ["glm45", "glm47"])
def test_glm_has_line_breaks_until_4_6_only(name: str) -> None:
    dialects, known = dialects_of(name, "", special=False)
    compiled = Grammars.of(known, VOCAB_SIZE)
    assert compiled is not None
    tool = Tool("look", {"properties": {"days": {"type": "integer"}}, "required": ["days"]})
    grammar = compiled.compile(grammar_of(AnswerForm(None, (tool,), True), dialects), (EOS,))
    call = "<tool_call>look\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
    calls = {"glm45": f"{call}\n{call}", "glm47": (call * 2).replace("\n", "")}
    for written, text in calls.items():
        tokens = [*known.encode(text), EOS]
        if written == name:
            grammar.matcher().accept(tokens)
            continue
        with pytest.raises(GrammarError):
            grammar.matcher().accept(tokens)


def test_the_number_of_calls_of_an_answer_is_bounded() -> None:
    dialects, known = dialects_of("hermes", "", special=False)
    compiled = Grammars.of(known, VOCAB_SIZE)
    assert compiled is not None
    grammar = compiled.compile(grammar_of(AnswerForm(None, (NOW,), True), dialects), (EOS,))
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    grammar.matcher().accept([*known.encode("\n".join([call] * MOST_CALLS)), EOS])
    with pytest.raises(GrammarError):
        grammar.matcher().accept(known.encode("\n".join([call] * (MOST_CALLS + 1))))


def allows(spec: GrammarSpec, known: Tokenizer, text: str) -> bool:
    """Whether an answer may be just this text."""
    grammars = Grammars.of(known, VOCAB_SIZE)
    assert grammars is not None
    row = grammars.row(SamplingParams(grammar=spec, eos_token_ids=(EOS,), max_tokens=10**6))
    assert row is not None
    before: list[int] = []
    for token in [*known.encode(text, special_tokens=False), EOS]:
        (bits,) = fill_rows([row], [before], VOCAB_SIZE)
        if not np.unpackbits(bits.view(np.uint8), bitorder="little")[token]:
            return False
        before.append(token)
    return True


@pytest.mark.parametrize(("name", "special"), both(("llama3_json", "pythonic")))
def test_text_beside_a_strict_tool_may_begin_with_all_that_begins_no_call(name: str, special: bool) -> None:
    dialects, known = dialects_of(name, "", special=special)
    spec = grammar_of(AnswerForm(tools=[LOOK]), dialects)
    opener, other = {"llama3_json": "{[", "pythonic": "[{"}[name]
    for text in ("", "Hello.", "\n\nNo.", f"{other}1, 2", ";", *(["<b>"] if special else [])):
        assert allows(spec, known, text), text
    for text in (f"{opener}1, 2", f" \n{opener}x"):
        assert not allows(spec, known, text), text
