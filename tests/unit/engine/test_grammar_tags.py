"""Structural tags, in both forms and with both libraries."""

from __future__ import annotations

import json
from typing import Any

import pytest

from alignedserve.errors import GrammarError
from alignedserve.request import GrammarKind, GrammarSpec
from support.grammars import LIBRARIES, allows, tiny_grammars, write

ONE = {"type": "json_schema", "json_schema": {"const": 1}}
TAG = {"type": "tag", "begin": "<f=a>", "content": ONE, "end": "</f>"}
OTHER = {"type": "tag", "begin": "<f=b>", "content": {"type": "regex", "pattern": "[xy]+"}, "end": "</f>"}
ANY = {"type": "any_text"}


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def triggered(**options: bool) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<f="], "tags": [TAG, OTHER], **options}


def separated(**options: bool) -> dict[str, Any]:
    return {"type": "tags_with_separator", "tags": [TAG, OTHER], "separator": ",", **options}


def spec(form: Any) -> GrammarSpec:
    return GrammarSpec(GrammarKind.STRUCTURAL_TAG, json.dumps({"type": "structural_tag", "format": form}))


A, B = "<f=a>1</f>", "<f=b>xy</f>"
CASES = [
    (triggered(), ["", "hi", A, f"x{A}", f"x{A}y{B}z", A + B], ["<f=c>", "x<f=a>2</f>", "<f=b></f>", "x<f="]),
    (triggered(at_least_one=True), [A, A + B, f"{A}x{B}y"], ["", "x", f"x{A}"]),
    (triggered(stop_after_first=True), ["", "x", A, f"x{B}"], [A + B, f"{A}x"]),
    (triggered(at_least_one=True, stop_after_first=True), [A, B], ["", f"x{A}", A + B]),
    (separated(), ["", A, f"{A},{B}", f"{B},{B},{A}"], ["x", A + B, f"{A},"]),
    (separated(at_least_one=True), [A, f"{A},{B}"], ["", f"{A},"]),
    (separated(stop_after_first=True), ["", A], [f"{A},{B}"]),
    ({"type": "sequence", "elements": [text("a"), {"type": "regex", "pattern": "b*"}, text("bc")]}, ["abc", "abbbc"],
     ["ac", "ab", "abcc"]),
    ({"type": "sequence", "elements": [ANY, text("END")]}, ["END", "xEND", "ENDEND"], ["", "xENDx", "EN"]),
    ({"type": "tag", "begin": "<a>", "content": ANY, "end": ["</a>", "</b>"]}, ["<a></a>", "<a>x<y</b>"],
     ["<a>x", "<a>x</a>y", "<a>x</a>y</b>"]),
    ({"type": "sequence", "elements": [{"type": "tag", "begin": "<t>", "content": ANY, "end": "</t>"}, ONE]},
     ["<t>x</t>1"], ["<t>x</t>", "1", "<t>x</t>2"]),
    ({"type": "or", "elements": [ONE, text("no"), TAG]}, ["1", "no", A], ["", "n", "2"]),
    ({"type": "optional", "content": TAG}, ["", A], [A + A]),
    ({"type": "plus", "content": TAG}, [A, A + A], [""]),
    ({"type": "star", "content": text("ab")}, ["", "ab", "abab"], ["a"]),
    ({"type": "repeat", "min": 2, "max": 3, "content": TAG}, [A * 2, A * 3], [A, A * 4]),
    ({"type": "repeat", "min": 1, "max": -1, "content": text("ab")}, ["ab", "abab"], ["", "a"]),
    ({"type": "grammar", "grammar": 'root ::= "x" y\ny ::= [0-9] | [0-9] y'}, ["x1", "x12"], ["x", "1"]),
    (ANY, ["", "anything <f= at\nall"], []),
    (text('a "b" \\ é\n'), ['a "b" \\ é\n'], ["a"]),
]  # fmt: skip


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("form", "right", "wrong"), CASES)
def test_every_format_has_the_same_answers_in_both_libraries(
    library: str, form: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    grammars = tiny_grammars(library)
    assert [answer for answer in right if not allows(grammars, spec(form), answer)] == []
    assert [answer for answer in wrong if allows(grammars, spec(form), answer)] == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_tag_within_tags_needs_no_type(library: str) -> None:
    bare = [{key: value for key, value in tag.items() if key != "type"} for tag in (TAG, OTHER)]
    for form in (triggered(at_least_one=True), separated(at_least_one=True)):
        for answer, right in ((A, True), (B, True), ("", False), ("<f=a>2</f>", False)):
            assert allows(tiny_grammars(library), spec({**form, "tags": bare}), answer) is right, answer


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", ["any_text", None, 3])
def test_what_is_no_tag_within_tags_is_refused(library: str, kind: Any) -> None:
    with pytest.raises(GrammarError, match="structural_tag: "):
        tiny_grammars(library).compile(spec({**separated(), "tags": [{**TAG, "type": kind}]}), (0,))


@pytest.mark.parametrize("library", LIBRARIES)
def test_both_forms_are_the_same(library: str) -> None:
    grammars = tiny_grammars(library)
    older = {"structures": [{"begin": "<f=a>", "schema": {"const": 1}, "end": "</f>"}], "triggers": ["<f="]}
    found = GrammarSpec(GrammarKind.STRUCTURAL_TAG, json.dumps(older))
    for answer, right in (("x", True), (f"x{A}y", True), (f"x{B}", False), ("<f=a>2</f>", False)):
        assert allows(grammars, found, answer) is right, answer


@pytest.mark.parametrize("library", LIBRARIES)
def test_random_answers_have_whole_tags(library: str) -> None:
    for seed in range(4):
        answer = write(tiny_grammars(library), spec(triggered(at_least_one=True, stop_after_first=True)), seed)
        assert answer is not None
        assert answer in (A, "<f=a> 1</f>") or answer.startswith("<f=b>")


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"type": "foo"}, "foo"),
        ({}, "type"),
        ({**triggered(), "triggers": ["<f=", "<f=a"]}, "/format/triggers"),
        ({**triggered(), "triggers": ["<g="]}, "/format/tags/0/begin must begin with exactly one"),
        ({"type": "json_schema", "json_schema": {"properties": {"a": {"not": {}}}, "type": "object"}},
         "not at /format/json_schema/properties/a"),
        ({"type": "json_schema", "json_schema": {"const": 1}, "any_order": True}, "any_order"),
        ({"type": "regex", "pattern": "["}, ""),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_by_name(library: str, form: dict[str, Any], says: str) -> None:
    with pytest.raises(GrammarError) as caught:
        tiny_grammars(library).compile(spec(form), (0,))
    assert caught.value.message.startswith("structural_tag: ")
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"type": "token", "token": 5}, "/format: llguidance cannot follow the type 'token'"),
        ({**ANY, "excludes": ["a"]}, "llguidance cannot follow 'excludes' of any_text"),
        ({"type": "sequence", "elements": [ANY, ONE]}, "/format/elements/0"),
        ({"type": "sequence", "elements": [triggered(), ONE]}, "/format/elements/0"),
        ({"type": "repeat", "min": 3, "max": 2, "content": ONE}, "min and max"),
    ],
)
def test_llguidance_s_translation_is_exact_or_refused(form: dict[str, Any], says: str) -> None:
    with pytest.raises(GrammarError) as caught:
        tiny_grammars("llguidance").compile(spec(form), (0,))
    assert says in caught.value.message


def test_a_special_token_in_a_tag_is_written_as_a_token() -> None:
    grammars = tiny_grammars("llguidance")
    form = {"type": "tag", "begin": "<|user|>a", "content": ONE, "end": "b<|user|>"}
    assert allows(grammars, spec(form), "<|user|>a1b<|user|>")
