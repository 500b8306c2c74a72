"""Which objects of a schema get no keys beside those that it names."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from alignedserve.errors import GrammarError
from alignedserve.grammar.closing import close_objects
from alignedserve.grammar.schema import reachable
from alignedserve.request import GrammarKind, GrammarSpec
from support.grammars import allows, tiny_grammars

Schema = dict[str, Any]
OPEN: Schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
REF: Schema = {"$ref": "#/$defs/open"}
DEFS: Schema = {"$defs": {"open": OPEN}}


def closed(schema: Any) -> list[str]:
    """The places that are closed, and were not."""
    found, same = json.loads(json.dumps(schema)), json.loads(json.dumps(schema))
    close_objects(found)
    before = {place for place, node in reachable(same) if "additionalProperties" in node}
    return sorted(
        place or "/" for place, node in reachable(found) if "additionalProperties" in node and place not in before
    )


@pytest.mark.parametrize(
    ("schema", "places"),
    [
        (OPEN, ["/"]),
        ({"properties": {}}, ["/"]),
        ({"type": "object"}, []),
        ({**OPEN, "additionalProperties": True}, []),
        ({**OPEN, "patternProperties": {"^b": {}}}, []),
        ({**OPEN, "required": ["b"]}, []),
        ({**OPEN, "minProperties": 2}, []),
        ({"properties": {"x": OPEN, "y": {"items": OPEN}, "z": {"prefixItems": [OPEN]}}},
         ["/", "/properties/x", "/properties/y/items", "/properties/z/prefixItems/0"]),
        ({"additionalProperties": OPEN}, ["/additionalProperties"]),
        ({"items": {"anyOf": [OPEN, {"type": "null"}]}}, ["/items/anyOf/0"]),
        ({"items": {"anyOf": [REF, {"type": "null"}], "title": "x"}, **DEFS}, ["/$defs/open"]),
        ({"anyOf": [OPEN, OPEN], "properties": {"b": {}}}, []),
        ({"items": [REF, {**REF, "required": ["b"]}], **DEFS}, []),
        ({"oneOf": [OPEN, {"properties": {"b": OPEN}}]}, []),
        ({"allOf": [OPEN, {"properties": {"b": {}}}]}, []),
        ({"properties": {"a": OPEN}, "anyOf": [{"properties": {"a": {"required": ["c"]}}}]}, []),
        ({"properties": {"next": {"$ref": "#"}}}, ["/"]),
        ({"$ref": "#/$defs/open", **DEFS}, ["/$defs/open"]),
        ({"$ref": "#/$defs/a%20b", "$defs": {"a b": OPEN}}, ["/$defs/a%20b"]),
        ({"$ref": "#/nowhere"}, []),
    ],
)  # fmt: skip
def test_objects_that_name_their_properties_are_closed_where_nothing_else_applies(
    schema: Schema, places: list[str]
) -> None:
    try:
        found = closed(schema)
    except GrammarError:
        assert schema == {"$ref": "#/nowhere"}
    else:
        assert found == places


def objects(children: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    named = st.dictionaries(st.sampled_from("abc"), children, max_size=3)
    lists = st.lists(children, min_size=1, max_size=2)
    return st.fixed_dictionaries(
        {},
        optional={
            "properties": named,
            "required": st.lists(st.sampled_from("abc"), max_size=2),
            "additionalProperties": children,
            "anyOf": lists,
            "allOf": lists,
            "oneOf": lists,
            "items": children,
            "not": children,
            "$ref": st.sampled_from(["#", "#/$defs/d"]),
        },
    )


def applies_itself(schema: Schema) -> bool:
    """Whether what a schema asks of a value is, in place, the root of the document again."""
    parts = [part for key in ("anyOf", "allOf", "oneOf") for part in schema.get(key, [])]
    parts += [schema["not"]] if "not" in schema else []
    return schema.get("$ref") == "#" or any(applies_itself(part) for part in parts)


VALUES = st.recursive(
    st.integers(0, 2),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=3) | st.lists(inner, max_size=2),
)


@settings(max_examples=60)
@given(schema=st.recursive(st.sampled_from([{}, {"type": "integer"}]), objects, max_leaves=8), values=st.lists(VALUES))
def test_what_satisfies_the_closed_schema_satisfies_the_schema(schema: Schema, values: list[Any]) -> None:
    whole = {**schema, "$defs": {"d": {"properties": {"a": {}}}}}
    narrow = json.loads(json.dumps(whole))
    close_objects(narrow)
    assume(not applies_itself(whole))  # jsonschema follows it until the stack is full
    for value in values:
        if jsonschema.Draft202012Validator(narrow).is_valid(value):
            assert jsonschema.Draft202012Validator(whole).is_valid(value), (narrow, value)


def test_an_answer_has_the_keys_that_its_schema_names() -> None:
    spec = GrammarSpec(GrammarKind.JSON, json.dumps(OPEN))
    answers = ('{"a":1}', "{}", '{"a":1,"b":2}')
    assert [allows(tiny_grammars("llguidance"), spec, answer) for answer in answers] == [True, True, False]
    free = GrammarSpec(GrammarKind.JSON, json.dumps({**OPEN, "additionalProperties": True}))
    assert [allows(tiny_grammars("llguidance"), free, answer) for answer in answers] == [True, True, True]
