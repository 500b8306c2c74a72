"""JSON schemas to try grammars with: drawn ones, small ones in the shapes of real files, and what judges answers."""

from __future__ import annotations

import datetime
import json
import random
import re
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation, localcontext
from typing import Any

from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.validators import validator_for

Schema = dict[str, Any]

# ---- drawn: hypothesis-jsonschema 0.23 does not run with hypothesis 6.170

_KEYS = ["a", "b", "id", "x-y", 'q"']
_FORMATS = ["date", "date-time", "time", "email", "ipv4", "ipv6", "uuid", "uri", "hostname", "duration", "regex"]
_PATTERNS = ["^[a-z]{1,4}$", "^\\d+$", "a+b", "^(x|yz)*$", "^[^a-y]{2,}", "^\\w+@\\w+\\.com$"]
_VALUES = [None, True, False, 0, 7, -1.5, "a", "é\n", [1], {"a": 1}, "long text with spaces"]
_Schemas = st.SearchStrategy[Schema]


def _node(kind: Any, **keys: st.SearchStrategy[Any]) -> _Schemas:
    """Schemas of one type, with some of these keywords."""
    return st.fixed_dictionaries({"type": st.just(kind)}, optional=keys)


def _leaves() -> _Schemas:
    number, value = st.integers(-30, 30), st.sampled_from(_VALUES)
    bounds = dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), number)
    mixed = st.sampled_from([["string", "null"], ["integer", "string"], ["boolean", "number", "null"]])
    return st.one_of(
        _node("string", minLength=st.integers(0, 3), maxLength=st.integers(2, 20)),
        _node("string", pattern=st.sampled_from(_PATTERNS), maxLength=st.integers(3, 9)),
        _node("string", format=st.sampled_from(_FORMATS)),
        _node("integer", multipleOf=st.sampled_from([1, 2, 3, 10]), **bounds),
        _node("number", multipleOf=st.sampled_from([0.5, 0.01, 3]), **bounds),
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {}]),
        st.builds(lambda found: {"const": found}, value),
        st.builds(lambda found: {"enum": found}, st.lists(value, min_size=1, max_size=4)),
        mixed.flatmap(lambda kinds: _node(kinds, maxLength=st.just(9), minimum=st.just(3))),
    )


def _schemas(depth: int) -> _Schemas:
    if depth == 0:
        return _leaves()
    inner = _schemas(depth - 1)
    several = st.lists(inner, min_size=1, max_size=3)
    properties = st.dictionaries(st.sampled_from(_KEYS), inner, max_size=3)
    required = st.lists(st.sampled_from(_KEYS), unique=True, max_size=3)
    patterns = st.dictionaries(st.sampled_from(_PATTERNS[:3]), inner, min_size=1, max_size=2)
    extra = st.booleans() | inner
    named = {"properties": properties, "required": required}
    several_of = [st.fixed_dictionaries({name: several}) for name in ("anyOf", "oneOf", "allOf")]
    return st.one_of(
        _leaves(),
        _node("object", additionalProperties=extra, **named),
        _node("object", additionalProperties=st.just(False), minProperties=st.integers(0, 2),
              maxProperties=st.integers(0, 4), **named),
        _node("object", patternProperties=patterns, additionalProperties=extra),
        _node("array", items=inner, minItems=st.integers(0, 2), maxItems=st.integers(2, 4), uniqueItems=st.booleans()),
        _node("array", prefixItems=several, items=st.booleans(), minItems=st.integers(0, 2)),
        *several_of,
        st.fixed_dictionaries({"type": st.just("object"), "anyOf": several, "required": required}),
        st.fixed_dictionaries({"not": inner}),
    )  # fmt: skip


def drawn_schemas() -> _Schemas:
    return _schemas(2)


# ---- in the shapes of real files


def _object(required: str = "", /, **properties: Any) -> Schema:
    """`required`: names, separated by spaces."""
    found = {"type": "object", "properties": {name.replace("__", "-"): value for name, value in properties.items()}}
    return {**found, **({"required": required.split()} if required else {})}


def _list(items: Schema, **keys: Any) -> Schema:
    return {"type": "array", "items": items, **keys}


TEXT: Schema = {"type": "string"}
WORD: Schema = {"type": "string", "pattern": "^[a-z][a-z0-9-]*$"}
FLAG: Schema = {"type": "boolean"}
WHOLE: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
URI: Schema = {"type": "string", "format": "uri"}
MAP: Schema = {"type": "object", "additionalProperties": TEXT}
VERSION: Schema = {"type": "string", "pattern": "^\\d+\\.\\d+\\.\\d+(-[0-9A-Za-z.-]+)?$"}
PERSON = {"anyOf": [TEXT, _object("name", name=TEXT, email={"type": "string", "format": "email"}, url=URI)]}


def one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
_LEVEL = one_of("off", "warn", "error", 0, 1, 2)
_PROBE = _object("", httpGet=_object("port", path=TEXT, port=_PORT), periodSeconds=COUNT)
_POINT = _list({"type": "number"}, minItems=2, maxItems=3)

SHAPES: dict[str, Schema] = {
    "package": _object("name version", name={"type": "string", "maxLength": 214,
                       "pattern": "^[a-z0-9-~][a-z0-9-._~]*$"}, version=VERSION, scripts=MAP, dependencies=MAP,
                       author=PERSON, private=FLAG, keywords=_list(TEXT), license=one_of("MIT", "UNLICENSED")),
    "tsconfig": _object("", compilerOptions=_object("", target=one_of("es5", "es2022", "esnext"), strict=FLAG,
                        lib=_list(one_of("dom", "es2022"), uniqueItems=True), paths={"type": "object",
                        "additionalProperties": _list(TEXT)}), include=_list(TEXT), files=_list(TEXT)),
    "eslint": _object("", root=FLAG, extends={"anyOf": [TEXT, _list(TEXT)]}, rules={"type": "object",
                      "additionalProperties": {"anyOf": [_LEVEL, _list({"anyOf": [_LEVEL, TEXT]}, minItems=1)]}}),
    "prettier": _object("", tabWidth={"type": "integer", "minimum": 0, "maximum": 16}, semi=FLAG, singleQuote=FLAG,
                        endOfLine={"oneOf": [{"const": "lf"}, {"const": "crlf"}, {"const": "auto"}]},
                        overrides=_list(_object("files", files=TEXT, options={"type": "object"}))),
    "workflow": _object("on jobs", name=TEXT, on={"oneOf": [one_of("push", "pull_request"), _list(TEXT, minItems=1)]},
                        jobs={"type": "object", "patternProperties": {"^[_a-zA-Z][a-zA-Z0-9_-]*$": _object(
                            "runs-on", runs__on=TEXT, steps=_list(_object("", name=TEXT, run=TEXT)))},
                            "additionalProperties": False}),
    "dependabot": _object("version updates", version={"const": 2}, updates=_list(_object(
        "package-ecosystem directory", package__ecosystem=one_of("pip", "npm", "docker"), directory=TEXT,
        schedule=_object("interval", interval=one_of("daily", "weekly", "monthly"))), minItems=1)),
    "compose": _object("services", version=TEXT, services={"type": "object", "additionalProperties": _object(
        "image", image=TEXT, ports=_list({"anyOf": [TEXT, _PORT]}), environment={"anyOf": [MAP, _list(TEXT)]},
        restart=one_of("no", "always", "on-failure"))}),
    "deployment": _object("apiVersion kind metadata spec", apiVersion={"const": "apps/v1"}, kind=one_of("Deployment"),
                          metadata=_object("name", name={**WORD, "maxLength": 63}, labels=MAP),
                          spec=_object("replicas", replicas={"type": "integer", "format": "int32", "minimum": 0},
                                       template=_object("containers", containers=_list(_object(
                                           "name image", name=WORD, image=TEXT, livenessProbe=_PROBE), minItems=1)))),
    "service": _object("kind ports", kind={"const": "Service"}, ports=_list(_object(
        "port", name=TEXT, port=_PORT, protocol=one_of("TCP", "UDP", "SCTP")), minItems=1, maxItems=3)),
    "quantity": _object("limits", limits={"type": "object", "additionalProperties": {"anyOf": [
        {"type": "string", "pattern": "^[0-9]+(m|Mi|Gi)?$"}, {"type": "number"}]}}),
    "geojson": _object("type geometry", type={"const": "Feature"}, geometry={"oneOf": [
        _object("type coordinates", type={"const": "Point"}, coordinates=_POINT),
        _object("type coordinates", type={"const": "LineString"}, coordinates=_list(_POINT, minItems=2))]},
        properties={"type": ["object", "null"]}),
    "openapi": _object("openapi info paths", openapi={"type": "string", "pattern": "^3\\.1\\.\\d+$"},
                       info=_object("title version", title=TEXT, version=TEXT),
                       paths={"type": "object", "patternProperties": {"^/": _object("", get=_object(
                           "operationId", operationId=WORD, tags=_list(TEXT)))}, "additionalProperties": False}),
    "manifest": _object("name icons", name=TEXT, display=one_of("fullscreen", "standalone", "browser"),
                        icons=_list(_object("src sizes", src=TEXT, sizes={"type": "string",
                        "pattern": "^[0-9]+x[0-9]+$"})), background_color={"type": "string",
                        "pattern": "^#[0-9a-fA-F]{6}$"}),
    "renovate": _object("", extends=_list(TEXT), schedule={"oneOf": [TEXT, _list(TEXT)]}, prHourlyLimit=COUNT,
                        packageRules=_list(_object("", matchPackageNames=_list(TEXT), enabled=FLAG))),
    "pyproject": _object("project", project=_object("name", name={"type": "string",
                         "pattern": "^[a-zA-Z0-9]+([._-][a-zA-Z0-9]+)*$"}, version=TEXT, authors=_list(_object(
                             "", name=TEXT, email={"type": "string", "format": "email"})),
                         dynamic=_list(one_of("version", "readme"), uniqueItems=True)), tool={"type": "object"}),
    "launch": _object("configurations", configurations=_list({"allOf": [
        _object("type request", type=TEXT, request=one_of("launch", "attach"), name=TEXT),
        _object("", name=TEXT, port=_PORT)]}, minItems=1)),
    "tasks": _object("tasks", tasks=_list(_object("label", label=TEXT, command=TEXT, args=_list(TEXT),
                     group={"anyOf": [TEXT, _object("kind", kind=TEXT, isDefault=FLAG)]}))),
    "babel": _object("", presets=_list({"anyOf": [TEXT, {"type": "array", "prefixItems": [TEXT, {"type": "object"}],
                     "items": False, "minItems": 1}]}), sourceMaps={"anyOf": [FLAG, one_of("inline", "both")]}),
    "stylelint": _object("rules", rules={"type": "object", "additionalProperties": {"anyOf": [
        {"type": "null"}, FLAG, WHOLE, TEXT, _list({"type": ["string", "integer"]})]}}),
    "host": _object("hostname", hostname={"type": "string", "format": "hostname"}, addresses=_list({"anyOf": [
        {"type": "string", "format": "ipv4"}, {"type": "string", "format": "ipv6"}]}), port=_PORT),
    "event": _object("id time source", id={"type": "string", "format": "uuid"}, time={"type": "string",
                     "format": "date-time"}, source=URI, data={}),
    "invoice": _object("number total lines", number={"type": "string", "pattern": "^INV-\\d{6}$"}, due={
                       "type": "string", "format": "date"}, currency=one_of("EUR"), total={
                       "type": "number", "minimum": 0, "multipleOf": 0.01}, lines=_list(_object(
                           "sku qty", sku=TEXT, qty={"type": "integer", "minimum": 1}), minItems=1)),
    "call": _object("name arguments", name=one_of("get_weather", "search"), arguments=_object(
        "city", city=TEXT, unit={"type": ["string", "null"], "enum": ["C", "F", None]}, days={"type": "integer",
        "minimum": 1, "maximum": 14})),
    "user": _object("login", login={"type": "string", "minLength": 3, "maxLength": 12}, age={
                    "type": ["integer", "null"], "minimum": 0, "maximum": 130}, roles=_list(one_of("a"), minItems=1)),
    "tree": {"$defs": {"node": _object("name", name=WORD, children=_list({"$ref": "#/$defs/node"}, maxItems=2))},
             "$ref": "#/$defs/node"},
    "expression": {"$defs": {"e": {"anyOf": [{"type": "number"}, {"type": "array", "prefixItems": [
        one_of("+", "*"), {"$ref": "#/$defs/e"}, {"$ref": "#/$defs/e"}], "items": False, "minItems": 3}]}},
        "$ref": "#/$defs/e"},
    "theme": _object("name colors", name=TEXT, type=one_of("dark", "light"), colors={"type": "object",
                     "patternProperties": {"^[a-z]+\\.[a-z]+$": {"type": "string", "pattern": "^#[0-9a-f]{3,8}$"}},
                     "additionalProperties": False}),
    "hooks": _object("repos", repos=_list(_object("repo hooks", repo=TEXT, rev=TEXT, hooks=_list(_object(
        "id", id=WORD, stages=_list(one_of("commit", "push"), uniqueItems=True)))))),
    "mkdocs": _object("site_name", site_name=TEXT, nav=_list({"anyOf": [TEXT, {"type": "object",
                      "minProperties": 1, "maxProperties": 1, "additionalProperties": TEXT}]})),
    "cron": _object("cron", cron={"type": "string", "pattern": "^([0-9*]+ ){4}[0-9*]+$"}, timezone=TEXT),
    "metric": _object("name type", name={"type": "string", "pattern": "^[a-z_]+$"}, type=one_of("counter", "gauge"),
                      buckets=_list({"type": "number", "exclusiveMinimum": 0}, minItems=1), unit={"type": "string"}),
    "policy": _object("Version Statement", Version=one_of("2012-10-17"), Statement=_list(_object(
        "Effect Action", Effect=one_of("Allow", "Deny"), Action={"anyOf": [TEXT, _list(TEXT)]}), minItems=1)),
    "schema": _object("type", type=one_of("object", "string"), properties={"type": "object",
                      "propertyNames": {"pattern": "^[a-z]+$"}}, required=_list(TEXT)),
    "license": {"if": _object("", kind={"const": "paid"}), "then": {"required": ["key"]}, **_object(
        "kind", kind=one_of("free", "paid"), key=TEXT)},
    "billing": {**_object("name", name=TEXT, card=WHOLE, address=TEXT), "dependentRequired": {"card": ["address"]}},
    "draft": _object("a", a={"not": {"type": "null"}}),
    "matrix": _list(_list({"type": "number", "minimum": -1, "maximum": 1}, minItems=2, maxItems=2), minItems=1,
                    maxItems=3),
    "flags": {"type": "object", "additionalProperties": FLAG},
    "ranges": _object("low high", low={"type": "number", "minimum": -5.5, "exclusiveMaximum": 0}, high={
        "type": "integer", "exclusiveMinimum": 10, "maximum": 1000, "multipleOf": 5}),
    "review": _object("stars verdict", stars={"type": "integer", "minimum": 1, "maximum": 5}, verdict=one_of(
        "accept", "reject"), reasons=_list({"type": "string", "maxLength": 30}, maxItems=3)),
}  # fmt: skip


def _closed(schema: Any) -> Any:
    """Without further properties wherever there are named ones, all required: what OpenAI's `strict` asks for."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _closed(value) for name, value in schema.items()}
    if found.get("type") == "object" and isinstance(found.get("properties"), dict):
        found |= {"additionalProperties": False, "required": list(found["properties"])}
    return found


def real_shapes() -> Iterator[tuple[str, Schema]]:
    """200: each shape as it is, closed, as a list, behind a reference, and as an alternative to null."""
    for name, schema in SHAPES.items():
        inner = {key: value for key, value in schema.items() if key != "$defs"}
        shared = {"$defs": {**schema.get("$defs", {}), "own": inner}}
        yield name, schema
        yield f"{name} closed", _closed(schema)
        yield (
            f"{name} listed",
            {**shared, "type": "array", "items": {"$ref": "#/$defs/own"}, "minItems": 1, "maxItems": 2},
        )
        yield f"{name} referred to", {**shared, "type": "object", "properties": {"it": {"$ref": "#/$defs/own"}},
                                      "required": ["it"], "additionalProperties": False}  # fmt: skip
        yield f"{name} or null", {**shared, "anyOf": [{"$ref": "#/$defs/own"}, {"type": "null"}]}


# ---- what judges answers

_CHECKER = FormatChecker()
_CHECKER.checkers = dict(Draft202012Validator.FORMAT_CHECKER.checkers)


@_CHECKER.checks("date", raises=ValueError)  # type: ignore[untyped-decorator]
def _is_date(value: object) -> bool:
    """RFC 3339's, which has a year 0000, unlike Python."""
    if not isinstance(value, str):
        return True
    if re.fullmatch(r"\d{4}-\d\d-\d\d", value) is None:
        return False
    return datetime.date.fromisoformat(value if value[:4] != "0000" else "2000" + value[4:]) is not None


def exact(text: str) -> Any:
    """A JSON text with exact numbers: 0.07 is a multiple of 0.01. Integers stay integers."""
    return json.loads(text, parse_float=_number)


def _number(text: str) -> Decimal | float:
    try:
        return Decimal(text)
    except InvalidOperation:  # an exponent of many digits
        return float(text)


def problem(schema: Schema, answer: str) -> str | None:
    """Why the answer is wrong; None if it satisfies the schema, formats included."""
    try:
        value = exact(answer)
    except ValueError as error:
        return f"not JSON: {error}"
    known = validator_for(schema, default=Draft202012Validator)
    with localcontext(prec=1000):  # a remainder has as many digits as the number
        errors = known(exact(json.dumps(schema)), format_checker=_CHECKER).iter_errors(value)
        return next((error.message for error in errors), None)


def keywords_of(schema: Any) -> set[str]:
    """The keywords of a schema that assert something."""
    known = set(Draft202012Validator.VALIDATORS)
    if isinstance(schema, list):
        return set().union(*map(keywords_of, schema)) if schema else set()
    if not isinstance(schema, dict):
        return set()
    return {key for key in schema if key in known}.union(*map(keywords_of, schema.values()))


# ---- regular expressions and context-free grammars

REGEXES = [
    r"[A-Z]{2}\d{2}( ?\d{4}){4}", r"\d{3}-\d{4}", r"(\+\d{1,3} )?\d{3,12}", r"[a-z0-9._-]+@[a-z0-9-]+\.(com|org)",
    r"#[0-9a-f]{6}", r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)", r"https?://[a-z.]{3,20}(/[a-z]*)*", r"yes|no|maybe",
    r"([01]\d|2[0-3]):[0-5]\d", r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])", r"-?\d+(\.\d+)?([eE][-+]?\d+)?",
    r"\((\w+)(, \w+)*\)", r"[^\s,]+(,[^\s,]+)*", r"(?:ab|cd)+?e", r"[\w-]{1,20}", r"\$\d{1,3}(,\d{3})*\.\d\d",
    r"[ab]*a[ab]{3}", r"((a|b)(c|d)?)*", r"x{2,}y?z*", r"[.*+?^${}()|\\]{3}", r"é[à-ü]*", r"a\\b\"c", r"(😀|😎){1,3}",
    r"[A-F0-9]{8}-([A-F0-9]{4}-){3}[A-F0-9]{12}", r"[^a]b[^c-e]", r"\t\n \x41\u0042", r"(Mon|Tue|Wed) \d\d?",
    r"SELECT \w+( WHERE \w+ = \d+)?;", r"<b>[^<]*</b>", r"(?P<year>\d{4})/(?P<day>\d{1,3})",
]  # fmt: skip


def drawn_regex(draw: random.Random, depth: int = 3) -> str:
    kind = draw.randrange(7 if depth else 3)
    if kind == 0:
        return draw.choice(["a", "bc", "\\.", "\\d", "\\w", " ", "é", "\\+", "x-y"])
    if kind == 1:
        return draw.choice(["[a-f]", "[^a-z]", "[0-9_]", "[\\w.]", "[+\\-*]"])
    if kind == 2:
        return draw.choice(["true", "null", "\\d{2}", "[A-Z]{1,3}"])
    parts = [drawn_regex(draw, depth - 1) for _ in range(draw.randint(2, 3))]
    if kind in (3, 4):
        return "".join(parts)
    if kind == 5:
        return f"({'|'.join(parts)})"
    return f"({parts[0]}){draw.choice(['?', '*', '+', '{2}', '{1,3}', '{0,2}', '{2,}'])}"


def regexes(count: int) -> list[str]:
    draw = random.Random(20)
    return [*REGEXES, *(drawn_regex(draw) for _ in range(count - len(REGEXES)))][:count]


def drawn_grammar(draw: random.Random) -> tuple[str, str]:
    """A grammar in GBNF without recursion, and a regular expression of the same texts."""
    rules: list[str] = []
    meanings: list[str] = []
    for number in range(draw.randint(2, 5)):
        pieces, meaning = [], []
        for _ in range(draw.randint(1, 3)):
            literal = draw.choice(["a", "bb", "-", "x y", "é", "1.0", '"'])
            kind = draw.randrange(5)
            sign = draw.choice(["", "?", "*", "+"])
            if kind == 0 and meanings:
                other = draw.randrange(len(meanings))
                pieces.append(f"r{other}{sign}")
                meaning.append(f"(?:{meanings[other]}){sign}")
            elif kind == 1:
                pieces.append(f"[a-f0-9]{sign}")
                meaning.append(f"[a-f0-9]{sign}")
            elif kind == 2:
                pieces.append(f'({json.dumps(literal, ensure_ascii=False)} | "k"){sign}')
                meaning.append(f"(?:{re.escape(literal)}|k){sign}")
            else:
                pieces.append(json.dumps(literal, ensure_ascii=False))
                meaning.append(re.escape(literal))
        rules.append(f"r{number} ::= {' '.join(pieces)}")
        meanings.append("".join(meaning))
    return f'root ::= "<" r{len(rules) - 1} ">"\n' + "\n".join(rules), f"<{meanings[-1]}>"


def grammars(count: int) -> list[tuple[str, str]]:
    draw = random.Random(21)
    return [drawn_grammar(draw) for _ in range(count)]
