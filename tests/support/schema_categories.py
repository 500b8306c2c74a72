"""Small schemas in the manner of JSONSchemaBench's ten categories, and what becomes of the schemas of a category.

The dataset itself is on a hub. Its folder, if there is one, can be read in their place: one folder for each category,
one schema in each file (`benchmarks/schema_categories.py --data`).
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alignedserve.errors import GrammarError
from alignedserve.request import GrammarKind, GrammarSpec
from support.grammars import EOS, tiny_grammars, write
from support.schemas import Schema, keywords_of, problem

DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}


def _object(required: str = "", /, **properties: Any) -> Schema:
    return {"type": "object", "properties": properties, **({"required": required.split()} if required else {})}


def _closed(required: str = "", /, **properties: Any) -> Schema:
    return {**_object(required, **properties), "additionalProperties": False}


def _list(items: Schema, **keys: Any) -> Schema:
    return {"type": "array", "items": items, **keys}


def _enum(*values: Any) -> Schema:
    return {"enum": list(values)}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/definitions/{name}"}


def _maybe(kind: str, **keys: Any) -> Schema:
    """Kubernetes and Snowplow write optional values so."""
    return {"type": [kind, "null"], **keys}


def _said(**properties: Schema) -> dict[str, Schema]:
    """With descriptions, as functions' parameters have them."""
    return {name: {"description": f"The {name} to use", **schema} for name, schema in properties.items()}


_ADDRESS = _object("street city", street=TEXT, city=TEXT, zip={"type": "string", "pattern": "^[0-9]{5}(-[0-9]{4})?$"})
_SELF = {"vendor": "com.acme", "name": "event", "format": "jsonschema", "version": "1-0-0"}
_META = _object("", name=_maybe("string"), labels=_maybe("object", additionalProperties=_maybe("string")),
                creationTimestamp=_maybe("string", format="date-time"))  # fmt: skip
_INT_OR_STRING = {"oneOf": [{"type": ["string", "null"]}, {"type": "integer"}]}
_TRAIT = {"properties": {"_id": TEXT, "type": {"type": "string", "enum": ["text"]}}, "required": ["type"]}
_KEY_VALUE = {"type": "object", "patternProperties": {"^[a-z]+$": TEXT}, "additionalProperties": False}
_TREE = {"type": "object", "properties": {"name": TEXT, "children": _list(_ref("node"), maxItems=2)},
         "required": ["name"], "additionalProperties": False}  # fmt: skip
_COLOURS = [f"colour-{number}" for number in range(300)]
_STEP = {"oneOf": [_closed("run", run=TEXT, name=TEXT), _closed("uses", uses=TEXT, with_={"type": "object"})]}

CATEGORIES: dict[str, list[Schema]] = {
    "Glaiveai2K": [
        _object("a b", **_said(a=NUMBER, b=NUMBER)),
        _object("query", **_said(query=TEXT, limit=WHOLE, genre=TEXT)),
        _object("location date", **_said(location=TEXT, date={"type": "string", "format": "date"}, guests=WHOLE)),
        _object("amount from to", **_said(amount=NUMBER, from_=TEXT, to={"type": "string", "enum": ["USD", "EUR"]})),
        _object("numbers", **_said(numbers=_list(NUMBER))),
        _object("items", **_said(items=_list(_object("name price", name=TEXT, price=NUMBER)))),
        _object("height unit", **_said(height=NUMBER, unit={"type": "string", "enum": ["cm", "in"]})),
        _object("user", **_said(user=_object("name email", name=TEXT, email={"type": "string", "format": "email"}))),
        {"type": "object", "properties": {}},
        _object("min max", **_said(min={"type": "integer", "minimum": 0}, max={"type": "integer", "maximum": 100})),
    ],
    "Github_trivial": [
        {}, {"type": "object"}, {"$schema": DRAFT_4, "title": "Empty", "description": "Nothing is asked for."},
        {"type": "object", "additionalProperties": True}, {"$schema": DRAFT_7, "type": "array"}, {"type": "string"},
        {"properties": {"name": {}}}, {"type": "object", "additionalProperties": TEXT}, {"enum": ["a", "b"]},
        {"type": ["object", "null"], "properties": {}}, {"$schema": DRAFT_4, "type": "object", "id": "http://a/b.json"},
    ],
    "Github_easy": [
        {"$schema": DRAFT_4, **_object("firstName", firstName=TEXT, age={"type": "integer", "minimum": 0})},
        _closed("id", id={"type": "string", "format": "uuid"}, tags=_list(TEXT, minItems=1, uniqueItems=True)),
        _closed("id", id={"type": "string", "format": "uuid"}, tags=_list(TEXT, minItems=1, maxItems=3)),
        _object("version", version={"type": "string", "pattern": "^\\d+\\.\\d+\\.\\d+$"}, homepage={"type": "string",
                "format": "uri"}),
        _list(_object("name", name=TEXT, done=FLAG)), {"$schema": DRAFT_4, **_object("", ratio={"type": "number",
                "minimum": 0, "exclusiveMinimum": True, "maximum": 1})},
        _object("kind", kind=_enum("a", "b", 3, None), at={"type": "string", "format": "date-time"}),
        _closed("host", host={"type": "string", "format": "hostname"}, port={"type": "integer", "minimum": 1,
                "maximum": 65535}, ip={"type": "string", "format": "ipv4"}),
        _object("name", name={"type": "string", "minLength": 1, "maxLength": 20}, address=_ADDRESS),
        {"type": "object", "properties": {"a": TEXT}, "minProperties": 1},
        {"type": "object", "patternProperties": {"^S_": TEXT, "^I_": WHOLE}, "additionalProperties": False},
    ],
    "Github_medium": [
        {"definitions": {"name": {"id": "#name", "type": "string", "pattern": "^(?:[A-Za-z0-9]+[-]?)+[A-Za-z0-9]$"}},
         **_object("a", a=_ref("name"), b=_ref("name"))},
        {"definitions": {"name": {"type": "string", "not": {"pattern": "plugin"}}}, **_object("a", a=_ref("name"))},
        {"$schema": DRAFT_4, "definitions": {"address": _ADDRESS}, **_object("bill", bill=_ref("address"),
                                                                            ship=_ref("address"))},
        _object("steps", steps=_list(_STEP, minItems=1, maxItems=2)),
        _object("config inputs", config=_object("zip", zip={"type": "boolean", "default": False}),
                inputs=_object("file", file=_object("", type=_enum("dicom", "nifti")))),
        _object("rules", rules={"type": "object", "additionalProperties": {"oneOf": [_enum(0, 1, 2), _list(TEXT)]}}),
        {"anyOf": [_object("a", a=TEXT), _object("b", b=WHOLE)], "type": "object"},
        {"type": "object", "properties": {"a": TEXT, "b": TEXT}, "dependencies": {"a": ["b"]}},
        {"$schema": DRAFT_7, **_object("", data=_list(_list({"type": "number"}, minItems=2, maxItems=2), maxItems=2))},
        _object("env", env=_KEY_VALUE, args=_list({"type": ["string", "number"]})),
    ],
    "Github_hard": [
        {"definitions": {"base": _object("id", id=TEXT), "pet": {"allOf": [_ref("base"), _object("kind", kind=_enum(
            "cat", "dog"))]}}, **_object("pets", pets=_list(_ref("pet"), maxItems=2))},
        {"definitions": {name: _object("next", next=TEXT if name == "e" else _ref(chr(ord(name) + 1)))
                         for name in "abcde"}, **_object("a", a=_ref("a"))},
        {"$schema": DRAFT_7, **_object("type", type=_enum("a", "b"), value=TEXT), "if": {"properties": {"type": {
            "const": "a"}}}, "then": {"required": ["value"]}},
        {"oneOf": [_closed("type radius", type={"const": "circle"}, radius=NUMBER),
                   _closed("type side", type={"const": "square"}, side=NUMBER)]},
        {"type": "object", "allOf": [{"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}], "properties": {
            "a": TEXT, "b": TEXT}, "additionalProperties": False},
        _object("paths", paths={"type": "object", "patternProperties": {"^/": _object("get", get=_object(
            "responses", responses={"type": "object", "patternProperties": {"^[1-5][0-9]{2}$": _object("description",
                description=TEXT)}, "additionalProperties": False}))}, "additionalProperties": False}),
        {"type": "array", "items": [TEXT, WHOLE], "additionalItems": False, "$schema": DRAFT_7, "minItems": 2},
        {"type": "array", "contains": {"const": 1}}, {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}},
        _object("geo", geo={"oneOf": [_list(NUMBER, minItems=2, maxItems=2), _list(_list(NUMBER), minItems=3)]}),
    ],
    "Github_ultra": [
        {"definitions": {"node": _TREE}, **_ref("node")},
        {"definitions": {"expr": {"anyOf": [NUMBER, _closed("op args", op=_enum("+", "*"), args=_list(_ref("expr"),
            minItems=2, maxItems=2))]}}, **_ref("expr")},
        _object("fill", fill=_enum(*_COLOURS), stroke=_list(_enum(*_COLOURS), maxItems=2)),
        {"anyOf": [_closed("t", t={"const": f"type-{number}"}, v=WHOLE) for number in range(60)]},
        {"type": "object", "properties": {f"field{number}": {"type": ["string", "number", "boolean", "null"]}
                                          for number in range(80)}, "required": ["field0"]},
        {"definitions": {"s": {"type": "object", "properties": {"type": _enum("object", "string"), "properties": {
            "type": "object", "additionalProperties": _ref("s")}, "not": _ref("s")}}}, **_ref("s")},
        {"$dynamicRef": "#node", "$defs": {"n": {"$dynamicAnchor": "node", "type": "object"}}},
    ],
    "Kubernetes": [
        _object("", apiVersion=_maybe("string", enum=["v1"]), kind=_maybe("string", enum=["Pod"]), metadata=_META),
        _object("spec", spec=_object("replicas", replicas=_maybe("integer", format="int32"), minReadySeconds=_maybe(
            "integer", format="int32"), paused=_maybe("boolean"))),
        _object("ports", ports=_maybe("array", items=_object("port", name=_maybe("string"), port=_maybe("integer",
            format="int32"), targetPort=_INT_OR_STRING, protocol=_maybe("string")))),
        _object("", resources=_object("", limits={"type": "object", "additionalProperties": {"oneOf": [
            {"type": ["string", "null"]}, {"type": "number"}]}})),
        {"description": "A list", **_object("items", items=_list(_object("", status=_maybe("object")), maxItems=2)),
         "x-kubernetes-group-version-kind": [{"group": "", "kind": "List", "version": "v1"}]},
        _object("", selector=_object("", matchExpressions=_list(_object("key operator", key=TEXT, operator=TEXT,
            values=_maybe("array", items=_maybe("string"))), **{"x-kubernetes-list-type": "atomic"}))),
        {"definitions": {"io.k8s.api.core.v1.Probe": _object("", httpGet=_object("port", port=_INT_OR_STRING),
            periodSeconds={"type": "integer", "format": "int32"})}, **_object("", livenessProbe={
                "$ref": "#/definitions/io.k8s.api.core.v1.Probe"})},
        _object("", lastTransitionTime={"format": "date-time", "type": ["string", "null"]}, data={"type": "object",
            "additionalProperties": {"type": "string", "format": "byte"}}),
    ],
    "Snowplow": [
        {"self": _SELF, **_closed("id", id={"type": "string", "maxLength": 36}, label=_maybe("string", maxLength=255))},
        {"self": _SELF, **_closed("value", value={"type": "number", "minimum": 0, "maximum": 2147483647})},
        {"self": _SELF, **_closed("", width=_maybe("integer", minimum=0, maximum=32767), type=_enum("click", "view"))},
        {"self": _SELF, **_closed("", at=_maybe("string", format="date-time"), ip=_maybe("string", format="ipv4"))},
        {"self": _SELF, "definitions": {"http:__iglu_1-0-0": _closed("schema data", schema={"type": "string",
            "pattern": "^iglu:[a-zA-Z0-9-_.]+/[0-9]+-[0-9]+-[0-9]+$"}, data={})}, **_closed("command", command={
                "$ref": "#/definitions/http:__iglu_1-0-0"})},
        {"self": _SELF, **_closed("id", id={"type": "string", "minLength": 1, "format": "uuid"}, minProperties=TEXT)},
        {"self": _SELF, **_closed("", items=_maybe("array", items=_closed("sku", sku=TEXT, price=NUMBER), maxItems=2))},
        {"self": _SELF, "anyOf": [{"required": ["a"]}, {"required": ["b"]}], **_closed("", a=TEXT, b=TEXT)},
    ],
    "WashingtonPost": [
        {"$schema": DRAFT_4, "type": "object", "allOf": [{"properties": {"operation": {"type": "string", "enum": [
            "update"]}, "date": {"_format": "date-time", "type": "string"}, "note": TEXT}, "required": ["operation"]}]},
        {"$schema": DRAFT_4, "type": "object", "allOf": [_TRAIT, {"properties": {"content": TEXT}}], "title": "Text"},
        {"$schema": DRAFT_4, "definitions": {"http:__ans_v1_trait_json": {"type": "string", "pattern":
            "^([A-Z]{2,3})(-[0-9]+)?$"}}, **_closed("id", id={"$ref": "#/definitions/http:__ans_v1_trait_json"})},
        _closed("type", type={"type": "string", "enum": ["gallery"]}, elements=_list({"oneOf": [_closed("image",
            image=TEXT), _closed("video", video=TEXT)]}, maxItems=2)),
        _object("", owner={"type": "object", "not": {"required": ["id"]}, "properties": {"id": TEXT}}),
        _object("", taxonomy={"type": "object", "additionalProperties": True, "properties": {"tags": _list(_object(
            "text", text=TEXT), maxItems=2)}}),
        _object("", display_date={"type": "string", "format": "date-time"}, geo={"type": "object", "properties": {
            "latitude": NUMBER}, "dependencies": {"latitude": ["longitude"]}}),
        _object("", additional_properties={"type": "object"}, width={"type": "integer", "minimum": 0}),
    ],
    "JsonSchemaStore": [
        {"$schema": DRAFT_7, "$id": "https://json.schemastore.org/a.json", **_object("name", name=TEXT)},
        {"$schema": DRAFT_7, "$ref": "#/definitions/root", "definitions": {"root": _closed("level", level=_enum(
            "OFF", 0, "ON", 1))}},
        {"$schema": DRAFT_7, "definitions": {"e": {"oneOf": [TEXT, {"type": "null"}], "default": ""}}, **_object(
            "", tag=_ref("e")), "patternProperties": {"^tag_id$": _ref("e")}, "additionalProperties": {"title": "?"}},
        {"$schema": DRAFT_7, **_object("", scripts={"oneOf": [{"type": "object", "additionalProperties": TEXT,
            "propertyNames": TEXT}]}, options=_object("", lib=_list(_enum("dom", "es2022"), uniqueItems=True)))},
        {"$schema": DRAFT_7, "allowTrailingCommas": True, **_object("jobs", jobs={"type": "object",
            "patternProperties": {"^[_a-zA-Z][a-zA-Z0-9_-]*$": _object("steps", steps=_list(TEXT, maxItems=2))},
            "minProperties": 1, "additionalProperties": False})},
        {"$schema": DRAFT_7, **_object("on", on={"anyOf": [_enum("push", "pull_request"), _list(TEXT, maxItems=2)]})},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "array", "prefixItems": [TEXT, WHOLE],
         "items": False, "minItems": 2},
        {"$schema": DRAFT_7, **_object("version", version={"type": "integer", "const": 2}, extends={"type": "string",
            "markdownDescription": "Where from", "format": "uri-reference"})},
        {"$schema": DRAFT_7, "type": "object", "properties": {"a": TEXT}, "allOf": [{"if": {"required": ["a"]},
            "then": {"required": ["b"]}}]},
        {"type": "object", "unevaluatedProperties": False, "properties": {"a": TEXT}},
    ],
}  # fmt: skip


def of_folder(folder: Path, most: int) -> Iterator[tuple[str, list[Schema]]]:
    """The dataset's categories, `most` schemas of each, evenly spread. A file has a schema, or `json_schema`."""
    for category in sorted(path for path in folder.iterdir() if path.is_dir()):
        files = sorted(category.glob("*.json"))
        step = max(1, -(-len(files) // most))
        schemas = [json.loads(file.read_text(encoding="utf-8")) for file in files[::step]]
        found = [schema.get("json_schema", schema) if isinstance(schema, dict) else schema for schema in schemas]
        yield category.name, [json.loads(schema) if isinstance(schema, str) else schema for schema in found]


@dataclass(slots=True)
class Outcome:
    """What became of a category's schemas. `finished`: answers that came to their end, all of which were judged."""

    supported: int = 0
    finished: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by the message's first word, a keyword as a rule
    wrong: list[str] = field(default_factory=list)
    keywords: set[str] = field(default_factory=set)


def outcome(library: str, schemas: Iterable[Schema], seeds: int = 2) -> Outcome:
    """Writes answers from random logits to each schema, at temperature 0 and 1, and validates those that end."""
    found, grammars = Outcome(), tiny_grammars(library)
    for schema in schemas:
        found.keywords |= keywords_of(schema)
        spec = GrammarSpec(GrammarKind.JSON, json.dumps(schema))
        try:
            asyncio.run(grammars.ready(spec, (EOS,)))
        except GrammarError as error:
            found.refused[error.message.removeprefix("json: ").split(" at ")[0].split(":")[0][:40]] += 1
            continue
        answers = [
            write(grammars, spec, seed, temperature=temperature) for seed in range(seeds) for temperature in (0.0, 1.0)
        ]
        finished = [answer for answer in answers if answer is not None]
        found.finished += len(finished)
        bad = [f"{json.dumps(schema)}\n  {answer}\n  {why}" for answer in finished if (why := problem(schema, answer))]
        found.wrong += bad[:1]
        found.supported += not bad
    return found


def table(outcomes: dict[str, Outcome]) -> str:
    """In Markdown."""
    rows = [
        "| category | supported | refused | wrong | answers judged | refused for |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for name, one in outcomes.items():
        reasons = ", ".join(f"{reason} {count}" for reason, count in one.refused.most_common(6))
        counts = (one.supported, sum(one.refused.values()), len(one.wrong), one.finished)
        rows.append(f"| {name} | {' | '.join(map(str, counts))} | {reasons} |")
    return "\n".join(rows)
