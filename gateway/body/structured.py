"""Structured output: OpenAI's `response_format`, vLLM's `structured_outputs`, and older spellings, as a GrammarSpec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import orjson
from pydantic import ConfigDict, Field, model_validator

from alignedserve.errors import InvalidRequestError
from alignedserve.gateway.body.refused import Refusal
from alignedserve.gateway.body.validation_errors import shown, wrong_type
from alignedserve.gateway.body.values import STRICT, Body
from alignedserve.request import GrammarKind, GrammarSpec

_OLDER = "Older spelling of structured_outputs.{}."
_JSON_OBJECT = {"type": "object"}
_HOLD_JSON = (GrammarKind.JSON, GrammarKind.GRAMMAR, GrammarKind.STRUCTURAL_TAG)
_JSON_IN_TAGS = ("json_schema", "structures")
_KINDS = {"json_object": GrammarKind.JSON, "json_schema": GrammarKind.JSON,
          "structural_tag": GrammarKind.STRUCTURAL_TAG}  # fmt: skip
_OUTPUTS = "structured_outputs"
_OF_A_FORMAT = {"text": ("type",), "json_object": ("type", "schema"), "json_schema": ("type", "json_schema")}
_OF_A_SCHEMA = ("name", "description", "schema", "strict")
_REFUSED = (
    Refusal("disable_additional_properties", "a schema says itself whether it has additionalProperties", (False,)),
    Refusal("disable_fallback", "", (False, True)),  # there is one library
)


class StructuredOutputs(Body):
    model_config = ConfigDict(**STRICT, json_schema_extra={"additionalProperties": False})
    refused: ClassVar[Mapping[str, Refusal]] = {entry.field: entry for entry in _REFUSED}

    json_: Any = Field(None, alias="json", description="A JSON schema, as an object or as its text.")
    regex: str | None = Field(None, description="A regular expression that the whole answer matches.")
    choice: list[str] | None = Field(None, description="The answer is one of these strings.")
    grammar: str | None = Field(None, description="A context-free grammar, in Lark or GBNF.")
    structural_tag: Any = Field(
        None, description="Structures (begin, schema, end) and their triggers; or a format, as xgrammar has."
    )
    json_object: bool = Field(False, description="The answer is a JSON object of any kind.")
    whitespace_pattern: str | None = Field(
        None, description="Pattern between the tokens of JSON; by default at most one space."
    )
    disable_any_whitespace: bool = Field(False, description="No whitespace between the tokens of JSON.")

    @model_validator(mode="after")
    def _known(self) -> Self:
        for name in self.model_extra or {}:
            raise InvalidRequestError(f"{_OUTPUTS} has no field {name[:60]!r}", param=f"{_OUTPUTS}.{name[:60]}")
        if self.disable_any_whitespace and self.whitespace_pattern:
            message = "whitespace_pattern and disable_any_whitespace differ; set only one of them"
            raise InvalidRequestError(message, param=f"{_OUTPUTS}.whitespace_pattern")
        return self

    @property
    def space(self) -> str | None:
        """The pattern between the tokens of JSON; None: the default."""
        return "" if self.disable_any_whitespace else self.whitespace_pattern

    @property
    def given_space(self) -> list[str]:
        """Places of the fields that set it."""
        set_here = {"whitespace_pattern": self.whitespace_pattern is not None,
                    "disable_any_whitespace": self.disable_any_whitespace}  # fmt: skip
        return [f"{_OUTPUTS}.{name}" for name, given in set_here.items() if given]


class StructuredFields(Body):
    """The fields of a request for structured output. At most one of them asks for a grammar."""

    response_format: dict[str, Any] | None = Field(
        None, description="type: text, json_object, json_schema (with json_schema.schema) or structural_tag."
    )
    structured_outputs: StructuredOutputs | None = Field(None, description="What the answer must follow.")
    guided_json: Any = Field(None, description=_OLDER.format("json"))
    guided_regex: str | None = Field(None, description=_OLDER.format("regex"))
    guided_choice: list[str] | None = Field(None, description=_OLDER.format("choice"))
    guided_grammar: str | None = Field(None, description=_OLDER.format("grammar"))
    guided_whitespace_pattern: str | None = Field(None, description=_OLDER.format("whitespace_pattern"))
    json_schema: Any = Field(None, description=_OLDER.format("json"))
    regex: str | None = Field(None, description=_OLDER.format("regex"))
    ebnf: str | None = Field(None, description=_OLDER.format("grammar"))
    grammar: str | None = Field(None, description=_OLDER.format("grammar"))
    choice: list[str] | None = Field(None, description=_OLDER.format("choice"))
    structural_tag: Any = Field(None, description=_OLDER.format("structural_tag"))

    @property
    def unread_formats(self) -> list[str]:
        """Places of fields of response_format that have no meaning here."""
        wanted = self.response_format or {}
        known = _OF_A_FORMAT.get(str(wanted.get("type")))
        found = [] if known is None else [f"response_format.{name[:60]}" for name in wanted if name not in known]
        inner = wanted.get("json_schema")
        if wanted.get("type") == "json_schema" and isinstance(inner, dict):
            found += [f"response_format.json_schema.{name[:60]}" for name in inner if name not in _OF_A_SCHEMA]
        return found

    @property
    def unread_whitespace(self) -> list[str]:
        """Fields about the whitespace of JSON without effect: no JSON is asked for, or another one of them holds."""
        own = self.structured_outputs
        given = [] if own is None else own.given_space
        older = [] if self.guided_whitespace_pattern is None else ["guided_whitespace_pattern"]
        if not given and not older:
            return []
        kind = _KINDS.get(str((self.response_format or {}).get("type")))
        asked = [*self._wanted(), *([] if kind is None else [("response_format", kind, self.response_format)])]
        if any(value is not None and _holds_json(kind, value) for _, kind, value in asked):
            return older if given else []
        return [*given, *older]

    def grammar_spec(self) -> tuple[GrammarSpec, str] | None:
        """The grammar and the field that asks for it. Raises InvalidRequestError, which names the field."""
        found = [(name, spec) for name, spec in self._asked() if spec is not None]
        if len(found) > 1:
            names = " and ".join(name for name, _ in found)
            raise InvalidRequestError(f"{names} each ask for structured output; set only one", param=found[1][0])
        if self.structured_outputs is not None and not found:
            kinds = "json, json_object, regex, choice, grammar or structural_tag"
            raise InvalidRequestError(f"{_OUTPUTS} asks for nothing: it needs one of {kinds}", param=_OUTPUTS)
        return (found[0][1], found[0][0]) if found else None

    def _asked(self) -> list[tuple[str, GrammarSpec | None]]:
        own = self.structured_outputs
        space = self.guided_whitespace_pattern
        within = None if own is None else own.space
        space = space if within is None else within
        wanted = self._wanted()
        specs = [(name, None if value is None else _spec(kind, value, space, name)) for name, kind, value in wanted]
        return [("response_format", _of_format(self.response_format, space)), *specs]

    def _wanted(self) -> list[tuple[str, GrammarKind, Any]]:
        """The fields that can ask for a grammar, except response_format, with its kind and text."""
        own = self.structured_outputs
        fields: list[tuple[str, GrammarKind, Any]] = [
            ("guided_json", GrammarKind.JSON, self.guided_json),
            ("json_schema", GrammarKind.JSON, self.json_schema),
            ("guided_regex", GrammarKind.REGEX, self.guided_regex),
            ("regex", GrammarKind.REGEX, self.regex),
            ("guided_choice", GrammarKind.CHOICE, self.guided_choice),
            ("choice", GrammarKind.CHOICE, self.choice),
            ("guided_grammar", GrammarKind.GRAMMAR, self.guided_grammar),
            ("ebnf", GrammarKind.GRAMMAR, self.ebnf),
            ("grammar", GrammarKind.GRAMMAR, self.grammar),
            ("structural_tag", GrammarKind.STRUCTURAL_TAG, self.structural_tag),
        ]
        if own is not None:
            outputs = f"{_OUTPUTS}."
            fields += [
                (outputs + "json", GrammarKind.JSON, own.json_),
                (outputs + "json_object", GrammarKind.JSON, _JSON_OBJECT if own.json_object else None),
                (outputs + "regex", GrammarKind.REGEX, own.regex),
                (outputs + "choice", GrammarKind.CHOICE, own.choice),
                (outputs + "grammar", GrammarKind.GRAMMAR, own.grammar),
                (outputs + "structural_tag", GrammarKind.STRUCTURAL_TAG, own.structural_tag),
            ]
        return fields


def _holds_json(kind: GrammarKind, value: Any) -> bool:
    """Whether there may be JSON, with its whitespace, in what the grammar allows."""
    if kind not in _HOLD_JSON or kind is GrammarKind.JSON:
        return kind is GrammarKind.JSON
    try:
        text = value if isinstance(value, str) else orjson.dumps(value).decode()
    except TypeError:  # it is nested too deeply, and refused
        return True
    return "%json" in text or (kind is GrammarKind.STRUCTURAL_TAG and any(name in text for name in _JSON_IN_TAGS))


def _of_format(wanted: dict[str, Any] | None, whitespace: str | None) -> GrammarSpec | None:
    kind = None if wanted is None else wanted.get("type")
    if wanted is None or kind == "text":
        return None
    param = "response_format"
    if kind == "json_object":
        return _spec(GrammarKind.JSON, wanted.get("schema", _JSON_OBJECT), whitespace, param)
    if kind == "json_schema":
        inner = wanted.get("json_schema")
        if inner is None:
            hint = ": schema belongs into it" if "schema" in wanted else ""
            raise InvalidRequestError(f"{param}.json_schema is required{hint}", param=param)
        if not isinstance(inner, dict):
            raise wrong_type(f"{param}.json_schema", "an object with a schema", inner, param)
        if (schema := inner.get("schema")) is None:
            raise InvalidRequestError(f"{param}.json_schema.schema is required", param=param)
        if not isinstance(schema, dict):
            raise wrong_type(f"{param}.json_schema.schema", "a JSON schema as an object", schema, param)
        if not isinstance(strict := inner.get("strict"), bool | None):
            raise wrong_type(f"{param}.json_schema.strict", "a boolean", strict, param)
        return _spec(GrammarKind.JSON, schema, whitespace, param)
    if kind == "structural_tag":
        return _spec(GrammarKind.STRUCTURAL_TAG, wanted, whitespace, param)
    names = "text, json_object, json_schema or structural_tag"
    raise InvalidRequestError(f"response_format.type must be {names}, got {shown(kind)}", param=param)


def _spec(kind: GrammarKind, value: Any, whitespace: str | None, param: str) -> GrammarSpec:
    """Raises InvalidRequestError for an empty value. As a schema, {} is JSON of any kind."""
    if value in ("", []) or (value == {} and kind is not GrammarKind.JSON):
        raise InvalidRequestError(
            f"{param} is empty, so no answer can follow it; leave it out for any text", param=param
        )
    try:
        text = value if isinstance(value, str) and kind is not GrammarKind.CHOICE else orjson.dumps(value).decode()
    except TypeError as error:  # nested too deeply
        raise InvalidRequestError(f"{kind}: it cannot be read: {error}", param=param) from None
    return GrammarSpec(kind, text, whitespace if kind in _HOLD_JSON else None)
