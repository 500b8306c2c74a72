"""What a client reads about a grammar that cannot be followed: where the fault is, and what it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from alignedserve.errors import GrammarError
from alignedserve.request import GrammarKind, GrammarSpec
from support.grammars import LIBRARIES, allows, tiny_grammars

NEVER = {"type": "integer", "minimum": 5, "maximum": 3}
NO_NUMBER = "minimum (5) is greater than maximum (3)"
ODD_FORMAT = {"type": "string", "format": "uri-reference"}
NO_FORMAT = "format: llguidance cannot follow this one (uri-reference)"


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def refusal(kind: GrammarKind, spec: Any, library: str = "llguidance") -> str:
    text = spec if isinstance(spec, str) else json.dumps(spec)
    with pytest.raises(GrammarError) as caught:
        tiny_grammars(library).compile(GrammarSpec(kind, text), (5,))
    return caught.value.message


@pytest.mark.parametrize(
    ("schema", "reason", "place"),
    [
        (NEVER, NO_NUMBER, "/"),
        (of(a=NEVER), NO_NUMBER, "/properties/a"),
        (of(a=of(**{"b/c": NEVER})), NO_NUMBER, "/properties/a/properties/b~1c"),
        ({"type": "array", "items": NEVER, "minItems": 2}, NO_NUMBER, "/items"),
        ({**of(b={"$ref": "#/$defs/n"}), "$defs": {"n": NEVER}}, NO_NUMBER, "/$defs/n"),
        (of(a=of(b=of(a=of(b=NEVER)))), NO_NUMBER, "/properties/a" + "/properties/b/properties/a/properties/b"),
        (
            {
                **of(y=of(id=NEVER)),
                "properties": {"x": of(id={"type": "integer", "minimum": 9, "maximum": 1}), "y": of(id=NEVER)},
            },
            NO_NUMBER,
            "/properties/y/properties/id",
        ),
        (of(a={"enum": []}), "anyOf is empty", "/properties/a"),
        (of(a=False), "required property 'a' is unsatisfiable", "/"),
        ({**of(b=False), "properties": {"a": NEVER, "b": False}}, "required property 'b' is unsatisfiable", "/"),
        (ODD_FORMAT, NO_FORMAT, "/"),
        (of(a=ODD_FORMAT), NO_FORMAT, "/properties/a"),
        (of(a={"type": "string", "pattern": "("}), "unclosed group, at character 1 of '('", "/properties/a"),
    ],
)
def test_the_part_of_a_schema_that_cannot_be_followed_is_named(schema: dict[str, Any], reason: str, place: str) -> None:
    message = refusal(GrammarKind.JSON, schema)
    assert reason in message
    assert message.endswith(f" (at {place})")


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "string", "pattern": "^a{2}{3}$"}, "pattern at /: the pattern '^a{2}{3}$' repeats a repetition"),
        (of(a={"type": "string", "pattern": "^[[a]{2}$"}), "pattern at /properties/a: the pattern '^[[a]{2}$'"),
        ({"type": "object", "propertees": {}}, "propertees at /: JSON schema has no such keyword; did you mean"),
        (of(a={"type": "string", "minlength": 3}), "minlength at /properties/a: JSON schema has no such keyword"),
        (
            of(a={"type": "string", "minlenght": 3}),
            "minlenght at /properties/a: JSON schema has no such keyword; did you mean 'minLength'?",
        ),
        (of(a={"type": "string", "max_lenght": 3}), "did you mean 'maxLength'?"),
    ],
)
def test_patterns_with_braces_and_misspelt_keywords(library: str, schema: dict[str, Any], says: str) -> None:
    assert says in refusal(GrammarKind.JSON, schema, library)


def test_what_only_says_more_about_a_schema_is_no_misspelt_keyword() -> None:
    notes = ("title", "description", "default", "example", "examples", "deprecated", "readonly", "$comment", "nullable",
             "discriminator", "enumNames", "x-order", "contentEncoding", "$anchor", "note", "requiredIf", "container",
             "propertiesOrder", "formatted", "patterns", "Patterns", "readOnly", "writeOnly", "contentMediaType",
             "Title", "markdownDescription", "t" * 100_000)  # fmt: skip
    for note in notes:
        spec = GrammarSpec(GrammarKind.JSON, json.dumps(of(a={"type": "string", note: True})))
        assert tiny_grammars("llguidance").compile(spec, (5,))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (NEVER, "Invalid range: minimum greater than maximum (at /)"),
        (of(a={"type": "integer", "minimum": 1.2, "maximum": 1.8}), "minimum greater than maximum (at /properties/a)"),
        (of(a={"type": "integer", "minimum": "1"}), "minimum at /properties/a: minimum must be a number"),
        (of(a={"type": "array", "minItems": 1.5}), "minItems must be an integer (at /properties/a)"),
        ({**of(b={"$ref": "#/$defs/n"}), "$defs": {"n": {"type": "foo"}}}, 'Unsupported type "foo" (at /$defs/n)'),
    ],
)
def test_xgrammar_s_refusals_have_a_place_too(schema: dict[str, Any], message: str) -> None:
    assert refusal(GrammarKind.JSON, schema, "xgrammar").endswith(message)


BOUNDS = [
    ({"minimum": 1.5}, [2, 3], [0, 1]),
    ({"exclusiveMinimum": 1.5, "maximum": 3.5}, [2, 3], [1, 4]),
    ({"exclusiveMinimum": 1.0, "exclusiveMaximum": 3.5}, [2, 3], [1, 4]),
    ({"minimum": -1.5, "exclusiveMaximum": 0}, [-1], [-2, 0]),
    ({"minimum": 0, "exclusiveMinimum": True, "maximum": 5}, [1, 5], [0, 6]),
    ({"maximum": 5, "exclusiveMaximum": True, "minimum": 2, "exclusiveMinimum": False}, [2, 4], [1, 5]),
    ({"exclusiveMinimum": True, "maximum": 5}, [-3, 5], [6]),
]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("bounds", "right", "wrong"), BOUNDS)
def test_bounds_of_every_draft_and_of_any_number_are_followed(
    library: str, bounds: dict[str, Any], right: list[int], wrong: list[int]
) -> None:
    for kind in ("integer", "number"):
        spec = GrammarSpec(GrammarKind.JSON, json.dumps({"type": kind, **bounds}))
        assert [allows(tiny_grammars(library), spec, str(number)) for number in (*right, *wrong)] == [
            *[True] * len(right),
            *[False] * len(wrong),
        ]


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (GrammarKind.REGEX, "(ab", "regex: invalid regular expression: unclosed group, at character 1 of '(ab'"),
        (GrammarKind.REGEX, "ab[", "regex: invalid regular expression: unclosed character class, at character 3 of "
         "'ab['"),
        (GrammarKind.GRAMMAR, 'start: foo\nbar: "x"', 'grammar: line 1, column 8: unknown name: "foo"'),
        (GrammarKind.GRAMMAR, "start: /(ab/", "grammar: line 1, column 8: invalid regular expression: unclosed group, "
         "at character 1 of '(ab'"),
    ],
)  # fmt: skip
def test_a_place_is_told_in_words(kind: GrammarKind, text: str, message: str) -> None:
    assert refusal(kind, text) == message
