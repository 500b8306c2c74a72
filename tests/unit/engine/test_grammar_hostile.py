"""Specs that would end a process, go round the check of schemas, or be followed inexactly; and other tokenizers."""

from __future__ import annotations

import contextlib
import json
import random
import re
import time
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from alignedserve.errors import GrammarError
from alignedserve.grammar.client_grammars import lark_of
from alignedserve.grammar.compiled import Grammars, grammar_library
from alignedserve.grammar.llguidance_schema import json_text
from alignedserve.request import GrammarKind, GrammarSpec
from alignedserve.text import IncrementalDetokenizer, Tokenizer
from support.grammars import LIBRARIES, allows, tiny_grammars

JSON, REGEX, GRAMMAR, TAG = GrammarKind.JSON, GrammarKind.REGEX, GrammarKind.GRAMMAR, GrammarKind.STRUCTURAL_TAG
TWO = {"type": "object", "minProperties": 2}  # followed by llguidance, but a key may be written twice
TWICE = '{"a":1,"a":1}'


def found(kind: GrammarKind, text: Any, answer: str, library: str = "llguidance") -> bool | str:
    """Whether the answer is allowed, or why the spec is refused."""
    spec = GrammarSpec(kind, text if isinstance(text, str) else json.dumps(text))
    try:
        return allows(tiny_grammars(library), spec, answer)
    except GrammarError as error:
        return error.message


def refused(result: bool | str, says: str) -> bool:
    return isinstance(result, str) and says in result


# ---- what ended the process: stacks that overflow


def test_a_long_chain_of_references_does_not_end_the_process() -> None:
    count = 12_000
    chain: dict[str, Any] = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(count)}
    chain[f"d{count}"] = {"type": "integer"}
    assert found(JSON, {"$ref": "#/$defs/d0", "$defs": chain}, "12") is True


@pytest.mark.parametrize("text", [
    "root ::= r0\n" + "\n".join(f'r{n} ::= "a" r{n + 1} | "b"' for n in range(600)) + '\nr600 ::= "c"',
    "start: R0\n" + "\n".join(f'R{n}: "a" R{n + 1} | "b"' for n in range(600)) + '\nR600: "c"',
])  # fmt: skip
def test_long_chains_of_rules_are_refused(text: str) -> None:
    assert refused(found(GRAMMAR, text, "b"), "rules refer to rules more than 500 deep")


@pytest.mark.parametrize("text", [
    "root ::= a" + "\n" * 200_000, "root ::= " + "[" * 200_000, "start: " + "a[" * 100_000, "start: " + "<a" * 100_000,
    "start: " + '"a" ' * 50_000 + "//",
])  # fmt: skip
def test_long_texts_are_read_in_time_that_grows_with_their_length(text: str) -> None:
    began_s = time.thread_time()
    with contextlib.suppress(GrammarError):
        lark_of(text, None, json_text)
    assert time.thread_time() - began_s < 5


def test_values_that_are_nested_deeply_are_refused() -> None:
    deep: Any = 1
    for _ in range(3000):
        deep = [deep]
    with pytest.raises(GrammarError, match="nested too deeply"):
        json_text({"const": deep})


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("schema", [
    {"const": -(2**63)}, {"const": -(2**63) + 1}, {"enum": [1, [2**53]]}, {"const": {"a": 1e22}},
    {"type": "integer", "minimum": 2**53}, {"type": "integer", "exclusiveMaximum": -(2**60)},
])  # fmt: skip
def test_numbers_that_are_not_exact_are_refused(library: str, schema: dict[str, Any]) -> None:
    assert refused(found(JSON, schema, "1", library), "numbers beyond ±9007199254740991")


@pytest.mark.parametrize("library", LIBRARIES)
def test_bounds_that_are_wider_than_exact_numbers_are_cut_to_them(library: str) -> None:
    schema = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    for answer, right in (("9007199254740991", True), ("9007199254740992", False), ("-9007199254740992", False)):
        assert found(JSON, schema, answer, library) is right


# ---- what went round the check of schemas


@pytest.mark.parametrize(("schema", "says"), [
    ({"$ref": "#two", "$defs": {"a": {"$anchor": "two", **TWO}}}, "$ref at /: '#two' is not a place in this schema"),
    ({"$ref": "two", "$id": "http://x/y/", "$defs": {"a": {"$id": "two", **TWO}}}, "$ref at /: 'two' is not a place"),
    ({"$ref": "http://x/y#/$defs/a", "$id": "http://x/y", "$defs": {"a": TWO}}, "minProperties at /$defs/a"),
    ({"$ref": "#/$defs/a%20b", "$defs": {"a b": TWO}}, "minProperties at /$defs/a%20b"),
    ({"$ref": "#/$defs/q", "$defs": {"q": {"$id": "http://x/q", "$ref": "#/$defs/b", "$defs": {"b": TWO}}, "b": {}}},
     "$id at /$defs/q"),
])  # fmt: skip
def test_what_references_lead_to_is_checked(schema: dict[str, Any], says: str) -> None:
    assert refused(found(JSON, schema, TWICE), says)


def test_addresses_that_are_not_used_are_no_reason_to_refuse() -> None:
    own = {"a": {"$id": "#/properties/a", "type": "string"}, "b": {"$ref": "http://x/y#/$defs/b"}}
    named = {"$id": "http://x/y", "properties": own, "additionalProperties": False, "$defs": {"b": {"const": 1}}}
    named["type"] = "object"
    assert found(JSON, named, '{"a":"x","b":1}') is True
    assert found(JSON, named, '{"b":2}') is False
    assert found(JSON, {"type": "object", "propertyNames": {"type": "string"}}, '{"a":1}') is True


def test_listed_property_names_close_an_object() -> None:
    names = {"propertyNames": {"type": "string", "enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}}
    for schema in ({"type": "object", **names}, {"type": "object", **names, "properties": {"b": {"const": 2}}}):
        assert found(JSON, schema, '{"a":1,"b":2}') is True
        assert found(JSON, schema, "{}") is True
        assert found(JSON, schema, '{"a":"x"}') is False
        assert found(JSON, schema, '{"c":1}') is False
    assert found(JSON, {**schema, "additionalProperties": False}, '{"a":1}') is False
    assert refused(found(JSON, {**schema, "properties": {"c": {}}}, "{}"), "propertyNames at /")
    assert refused(found(JSON, {**schema, "propertyNames": {"minLength": 2}}, "{}"), "propertyNames at /")
    deep: dict[str, Any] = {}
    for _ in range(30):
        deep = {"propertyNames": {"enum": list("abcdefghij")}, "additionalProperties": deep}
    assert refused(found(JSON, deep, "{}"), "list them as `properties`")


@pytest.mark.parametrize("text", ["1", "-1.", "+0.5", ".5", "-.25", "007", "", "-", ".", "+.", "1-", "1.2.3"])
def test_pydantics_pattern_of_a_decimal_is_followed_without_looking_ahead(text: str) -> None:
    pattern = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
    assert found(JSON, {"type": "string", "pattern": pattern}, json.dumps(text)) is bool(re.search(pattern, text))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("kind", "text"), [
    (JSON, r'{"properties": {"\ud800": {"not": {}}}}'), (GrammarKind.CHOICE, r'["\udfff"]'),
    (TAG, r'{"format": {"type": "json_schema", "json_schema": {"items": {"$ref": "#/\udc00"}}}}'),
    (GRAMMAR, r'start: %json {"properties": {"\ud800": {"not": {}}}}'),
])  # fmt: skip
def test_half_a_surrogate_pair_is_refused_in_words_that_can_be_sent(kind: GrammarKind, text: str, library: str) -> None:
    reason = found(kind, text, "1", library)
    assert refused(reason, "half of a surrogate pair") or (library == "xgrammar" and refused(reason, "%json: "))
    str(reason).encode()


@pytest.mark.parametrize("library", LIBRARIES)
def test_schemas_within_lark_are_checked(library: str) -> None:
    text = 'start: "x"\n  %json {"type": "object",\n "minProperties": 2}'
    place = "the %json at line 2, column 8: minProperties at /" if library == "llguidance" else "%json: "
    assert refused(found(GRAMMAR, text, "x" + TWICE, library), place)


def test_json_within_lark_is_compact_and_texts_are_left_alone() -> None:
    text = 'start: %json {"type": "array",\n "items": {"type": "integer"}} "%json {}" /a"b%json/ // "%json\n'
    assert found(GRAMMAR, text, '[1, 2]%json {}a"b%json') is True
    assert found(GRAMMAR, text, '[1,  2]%json {}a"b%json') is False
    own = GrammarSpec(GRAMMAR, 'start: %json {"type": "array"}', "")
    assert not allows(tiny_grammars("llguidance"), own, "[1, 2]")
    tag = {"format": {"type": "json_schema", "json_schema": {"type": "array"}}}
    assert not allows(tiny_grammars("llguidance"), GrammarSpec(TAG, json.dumps(tag), ""), "[1, 2]")
    assert allows(tiny_grammars("llguidance"), GrammarSpec(TAG, json.dumps(tag), " *"), "[1,   2]")


def test_a_grammar_in_llguidance_s_own_json_is_not_followed() -> None:
    assert isinstance(found(GRAMMAR, {"grammars": [{"json_schema": TWO}]}, TWICE), str)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    "draft", ["http://json-schema.org/draft-04/schema#", "http://iglucentral.com/schemas/a/1-0-0#"]
)
def test_keywords_are_followed_whatever_the_draft(library: str, draft: str) -> None:
    for answer, right in (('"a"', True), ('"b"', False)):
        assert found(JSON, {"$schema": draft, "const": "a"}, answer, library) is right


# ---- what was inexact


@pytest.mark.parametrize(("pattern", "text", "right"), [
    ("a*+a", "aa", "repeats a repetition"), ("a{2}{3}", "aaaaaa", "repeats a repetition"),
    ("(?:a{2}){3}", "a" * 6, True),
    ("a+?b", "aab", True), ("a{2,3}?", "aa", True), ("\\W", "²", False), ("\\W", "é", False), ("\\W", "-", True),
    ("\\S", "\x1c", False), ("[^\\s]", "\x1c", False), ("[^\\d]", "٣", False), ("[\\s\\S]", "\x1c", False),
    ("[\\s\\S]", "\n", True), ("[\\W_]", "-", True), ("[\\W_]", "é", False), ("a(?=b)", "a", "look-around"),
])  # fmt: skip
def test_patterns_mean_what_they_mean_to_all_engines(pattern: str, text: str, right: bool | str) -> None:
    result = found(REGEX, pattern, text)
    assert refused(result, right) if isinstance(right, str) else result is right
    if right is True:
        assert re.fullmatch(pattern, text)
        schema = {"type": "string", "pattern": f"^{pattern}$"}
        assert found(JSON, schema, json.dumps(text, ensure_ascii=False)) is True


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("pattern", "right", "wrong"), [
    ("^[A-Z]{2}(-[0-9]+)?$", "AB-12", "AB1"), ("^(x(-8*)?)??y$", "x-8y", "x8y"), ("^(?:a|b{1,2})?[)?]$", "bb)", "b"),
])  # fmt: skip
def test_a_group_that_may_be_left_out_is_left_out_whole(library: str, pattern: str, right: str, wrong: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert found(JSON, schema, f'"{right}"', library) is True
    assert found(JSON, schema, f'"{wrong}"', library) is False


def test_keys_that_a_pattern_may_or_may_not_mean_are_not_free() -> None:
    numbers = {"type": "object", "patternProperties": {"^\\d+$": {"type": "integer"}}}
    assert refused(found(JSON, numbers, '{"٣":"x"}'), "patternProperties at /: the pattern '^\\\\d+$'")
    assert found(JSON, {**numbers, "additionalProperties": False}, '{"3":1}') is True
    assert found(JSON, {**numbers, "additionalProperties": False}, '{"٣":1}') is False


@pytest.mark.parametrize(("kind", "text", "right"), [
    ("date", "2024-02-29", True), ("date", "2021-02-29", False), ("date", "1900-02-29", False),
    ("date", "2000-02-29", True),
    ("date", "2021-04-31", False), ("date", "0000-01-01", False), ("time", "23:59:60Z", False),
    ("time", "12:30:59.25-08:00", True), ("time", "24:00:00Z", False), ("date-time", "2021-02-28T10:00:00Z", True),
    ("date-time", "2021-02-29T10:00:00Z", False), ("date-time", "2021-02-28 10:00:00Z", False),
])  # fmt: skip
def test_dates_and_times_exist(kind: str, text: str, right: bool) -> None:
    assert found(JSON, {"type": "string", "format": kind}, json.dumps(text)) is right
    beside = {"type": "string", "format": kind, "pattern": "^2"}
    assert found(JSON, beside, json.dumps(text)) is (right and text.startswith("2"))


@pytest.mark.parametrize(
    "schema", [{"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}]
)
def test_what_nothing_satisfies_is_refused_before_an_answer_begins(schema: dict[str, Any]) -> None:
    assert refused(found(JSON, schema, "1"), "json: no answer can begin: nothing satisfies it")


def test_an_error_in_the_pattern_between_tokens_names_it() -> None:
    for schema in ({"type": "object"}, {"type": "array", "items": {"type": "string"}}):
        with pytest.raises(GrammarError, match=r"unclosed character class, .* \(in whitespace_pattern\)"):
            tiny_grammars("llguidance").compile(GrammarSpec(JSON, json.dumps(schema), "["), (0,))


# ---- GBNF


@pytest.mark.parametrize(("text", "answers", "others"), [
    ('root ::= "\\u00e9" [\\u00e0-\\u00ff] "\\x41"', ["éàA"], ["e"]),
    ('root ::= "a" # one\n  | "b" # two\n', ["a", "b"], ["c"]),
    ('root ::= start other-start\nstart ::= "a"\nother-start ::= start', ["aa"], ["a"]),
    ('root ::= [+--]', ["+", ",", "-"], ["*", "."]),
    ('root ::= [a\\-z] [^\\]\\\\] [&][~]', ["-b&~", "a-&~"], ["b", "a]&~"]),
    ('root ::= . "\\["', ["\n[", "é["], ["["]),
    ('root ::= "a\\x1bb"{2}', ["a\x1bb" * 2], ["a\x1bb"]),
])  # fmt: skip
def test_gbnf_as_llama_cpp_reads_it(text: str, answers: list[str], others: list[str]) -> None:
    assert [found(GRAMMAR, text, answer) for answer in answers] == [True] * len(answers)
    assert [found(GRAMMAR, text, answer) for answer in others] == [False] * len(others)


@pytest.mark.parametrize(("text", "says"), [
    ('root ::= "a"\nx ::= nothing', "Rule 'nothing' not found (at line 2, column 7)"),
    ('root ::= "a"\nx ::= "b', "line 2, column 7: a text or a class that does not end"),
    ('root ::= "a"\nx ::= "\\ud800"', "line 2, column 7: \\ud800 is not a character"),
    ('root ::= "\\q"', "line 1, column 10: '\\\\q' is not an escape"),
    ('root ::= "a\\', "line 1, column 10: a text or a class that does not end"),
    ('start: "a"\nx: "b', "line 2, column 4: a text or a pattern that does not end"),
    ('start: "a"\n  %json {', "line 2, column 9: no JSON"),
    ('start: "x ::= y" z', 'unknown name: "z"'),
])  # fmt: skip
def test_errors_of_grammars_have_a_place(text: str, says: str) -> None:
    assert refused(found(GRAMMAR, text, "a"), says), found(GRAMMAR, text, "a")


# ---- other tokenizers

CORPUS = ['The fox {"a": 1, "b": [true, false]} jumps over 0123456789 "hello world"', "def f(x): return x+1"] * 20
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
THING = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 5}, "b": {"enum": [1, " é", None]}},
         "required": ["a", "b"], "additionalProperties": False}  # fmt: skip


def sentencepiece() -> Backend:
    """BPE with byte fallback, as Llama 2's."""
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *BYTES]
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    )
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in BYTES]
    return Backend.from_str(json.dumps(state))


def byte_level() -> Backend:
    """As GPT-2's, with tokens added later, of which one is special."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think>", special=True), AddedToken(' "', special=False), AddedToken("→ x")])
    return backend


def unigram() -> Backend:
    backend = Backend(models.Unigram())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<unk>", "</s>"]
    backend.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False)
    )
    return backend


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("make", [sentencepiece, byte_level])
@pytest.mark.parametrize("more", [0, 37])
def test_answers_in_other_vocabularies_are_right(library: str, make: Any, more: int) -> None:
    """`more`: columns of the logits beyond the tokenizer's tokens, which are never allowed."""
    backend = make()
    known, end = Tokenizer(backend, {"eos_token": "</s>"}), backend.token_to_id("</s>")
    tokens = backend.get_vocab_size()
    grammars = Grammars(grammar_library(library, known, tokens + more), limit_s=60.0)
    compiled = grammars.compile(GrammarSpec(JSON, json.dumps(THING)), (end,))
    for seed in range(3):
        draw, matcher, answer = random.Random(seed), compiled.matcher(), list[int]()
        detokenizer, written = IncrementalDetokenizer(known, [5]), ""
        for _ in range(300):
            bits = np.zeros((1, -(-(tokens + more) // 32)), dtype=np.int32)
            grammars.library.fill([matcher], bits)
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
            assert max(allowed) < tokens
            if end in allowed:
                break
            answer.append(draw.choice(allowed))
            matcher.accept(answer[-1:])
            written += detokenizer.push(answer[-1])
        thing = json.loads(written)
        assert set(thing) == {"a", "b"}
        assert thing["b"] in (1, " é", None)
        assert len(thing["a"]) <= 5


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_tokenizer_without_text_for_single_tokens_is_refused(library: str) -> None:
    known = Tokenizer(unigram(), {"eos_token": "</s>"})
    grammars = Grammars(grammar_library(library, known, known.vocab_size))
    with pytest.raises(GrammarError, match="tokenizer has no text for single tokens"):
        grammars.compile(GrammarSpec(REGEX, "a"), (1,))
