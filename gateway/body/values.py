"""Base class and field types of request bodies. Types are strict: booleans are not integers, "2" is not a number."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError, core_schema

from alignedserve.gateway.body.refused import Refusal
from alignedserve.gateway.body.validation_errors import BETWEEN, EMPTY, ONE_OF, TOKEN_LIMIT, UNSUPPORTED

INT64 = (-(1 << 63), (1 << 63) - 1)
MAX_STOPS = 16
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 4096

STRICT = ConfigDict(strict=True, extra="allow")


class Body(BaseModel):
    """A JSON object in a request. A field that is null counts as absent.

    Unknown fields are kept in `model_extra`. Fields in `refused` are accepted only with values that have no effect.
    """

    model_config = STRICT
    refused: ClassVar[Mapping[str, Refusal]] = {}

    @model_validator(mode="before")
    @classmethod
    def _given(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        given = {}
        for name, entry in value.items():
            if entry is None:
                continue
            refusal = cls.refused.get(name)
            if refusal is None:
                given[name] = entry
            else:
                refusal.check(entry, name)
        return given


def unknown_fields(body: BaseModel, prefix: str = "", known: Container[str] = ()) -> list[str]:
    """Names of the fields that the client sent and the model does not have, without those that are `known`."""
    extra = body.model_extra or {}
    return [f"{prefix}{name}" for name, value in extra.items() if value is not None and name not in known]


@dataclass(frozen=True, slots=True)
class Between:
    """Limits of an integer, a number, or a string's length; the error names both limits. `above`: `low` is excluded."""

    low: float
    high: float
    above: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if source is str:
            limits: dict[str, Any] = {"min_length": self.low, "max_length": self.high}
        else:
            limits = {"gt" if self.above else "ge": self.low, "le": self.high}
        if source is float:
            limits["allow_inf_nan"] = False
        return core_schema.custom_error_schema(
            {**handler(source), **limits},
            custom_error_type=BETWEEN,
            custom_error_message="out of range",
            custom_error_context={"type": source.__name__, "low": self.low, "high": self.high, "above": self.above},
        )


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Values outside the type are refused as unsupported. `message`: the error's text, with {} for the value."""

    message: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.custom_error_schema(handler(source), UNSUPPORTED, custom_error_message=self.message)


@dataclass(frozen=True, slots=True)
class Sent:
    """The client sends a value of type `kind`; the field holds the result of `make(value)`."""

    kind: Any
    make: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.make, handler.generate_schema(self.kind))


def _shape(value: Any) -> str | None:
    return "<text>" if isinstance(value, str) else "<list>" if isinstance(value, list) else None


def text_or_list(expected: str) -> Discriminator:
    """Selects the member, tagged TEXT or LIST, of a union. `expected` describes the valid types in the error."""
    return Discriminator(_shape, custom_error_type=ONE_OF, custom_error_message=expected)


TEXT, LIST = Tag("<text>"), Tag("<list>")  # brackets, as in no field's name, mark tags in an error's location


def _not_empty(text: str) -> str:
    if not text:
        raise PydanticCustomError(EMPTY, "empty")
    return text


def _distinct(value: str | list[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(dict.fromkeys(value))


def _few(value: Any) -> Any:
    """Checks the size before the entries: objects have no `fail_fast`, so each wrong entry would add an error."""
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIASES:
        context = {"field_type": "Dictionary", "max_length": MAX_LOGIT_BIASES, "actual_length": len(value)}
        raise PydanticKnownError("too_long", context)
    return value


def _by_token(value: dict[str, float]) -> tuple[tuple[int, float], ...]:
    return tuple({int(key): bias for key, bias in value.items()}.items())


# A validator, since `min_length` would count all characters of a long text.
NonEmptyText = Annotated[str, AfterValidator(_not_empty), Field(json_schema_extra={"minLength": 1})]
# Token ids of a prompt are compared with the vocabulary later (planning.py). Limits here would triple the parsing time.
PromptToken = Annotated[int, Field(json_schema_extra={"minimum": 0, "maximum": TOKEN_LIMIT})]
_Stop = Annotated[str, Between(1, 1024)]
_Stops = Annotated[
    Annotated[_Stop, TEXT] | Annotated[list[_Stop], Field(max_length=MAX_STOPS, fail_fast=True), LIST],
    text_or_list("a string or an array of strings"),
]
StopStrings = Annotated[tuple[str, ...], Sent(_Stops, _distinct)]
_StopToken = Annotated[int, Between(0, TOKEN_LIMIT)]
StopTokens = Annotated[
    tuple[int, ...], Sent(Annotated[list[_StopToken], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)], tuple)
]
_Biases = dict[Annotated[str, Field(pattern="^[0-9]{1,10}$")], Annotated[float, Between(-100, 100)]]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
LogitBias = Annotated[
    tuple[tuple[int, float], ...],
    Sent(Annotated[_Biases, Field(max_length=MAX_LOGIT_BIASES), BeforeValidator(_few)], _by_token),
    Field(json_schema_extra={"additionalProperties": False}),
]


def _prompt_shape(value: Any) -> str | None:
    if isinstance(value, list) and value and type(value[0]) in (int, float):
        return "<ids>"
    return _shape(value)


def _entry_shape(value: Any) -> str | None:
    return "<ids>" if isinstance(value, list) else _shape(value)


TokenIds = Annotated[list[PromptToken], Field(min_length=1, fail_fast=True), Tag("<ids>")]
_PromptEntry = Annotated[
    Annotated[NonEmptyText, TEXT] | TokenIds,
    Discriminator(_entry_shape, custom_error_type=ONE_OF, custom_error_message="text or an array of token ids"),
]
Prompt = Annotated[
    Annotated[NonEmptyText, TEXT] | TokenIds | Annotated[list[_PromptEntry], Field(min_length=1, fail_fast=True), LIST],
    Discriminator(
        _prompt_shape, custom_error_type=ONE_OF, custom_error_message="text, token ids, or an array of either"
    ),
]
