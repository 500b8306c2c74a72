"""`response_format` in the client: what is sent, and the object that comes back."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import pydantic
import pytest
from jsonschema import Draft202012Validator

from alignedserve.client import Choice, IncompleteAnswerError, InvalidRequestError
from alignedserve.client.calls import CallPlanner
from alignedserve.client.messages import join_chunks
from alignedserve.client.structured import build, wanted
from alignedserve.client.types import Chunk, ClientTimings, Usage
from alignedserve.gateway.body.requests import parse_completion
from alignedserve.gateway.grpc_service import body_of
from alignedserve.proto import common_pb2, inference_pb2
from alignedserve.request import GrammarKind, GrammarSpec
from support.grammars import allows, tiny_grammars, write


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Part:
    name: str
    size: float | None = None


@dataclass
class Order:
    number: int
    colour: Colour
    kind: Literal["a", 1]
    parts: list[Part]
    sizes: tuple[int, str]
    notes: dict[str, bool] = field(default_factory=dict)
    parent: Order | None = None


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    people: int = pydantic.Field(ge=0)
    tags: list[Literal["old", "new"]] = []
    twin: City | None = None


ORDER = {"number": 3, "colour": "red", "kind": "a", "parts": [{"name": "x", "size": 2}, {"name": "y", "size": None}],
         "sizes": [1, "b"], "notes": {"n": True}, "parent": None}  # fmt: skip


def test_a_dataclass_is_built_from_what_its_schema_describes() -> None:
    found = wanted(Order)
    assert found is not None
    Draft202012Validator(json.loads(found.schema)).validate(ORDER)
    order = found.read(json.dumps(ORDER))
    assert order == Order(3, Colour.RED, "a", [Part("x", 2.0), Part("y")], (1, "b"), {"n": True}, None)
    assert isinstance(order.parts[0].size, float)


@pytest.mark.parametrize("library", ["llguidance"])
@pytest.mark.parametrize("kind", [Part, City])
def test_wild_answers_become_objects(library: str, kind: Any) -> None:
    found = wanted(kind)
    assert found is not None
    built = 0
    for seed in range(6):
        answer = write(tiny_grammars(library), GrammarSpec(GrammarKind.JSON, found.schema), seed)
        if answer is not None:
            assert isinstance(found.read(answer), kind)
            built += 1
    assert built > 2


def test_the_schema_of_a_dataclass_that_refers_to_itself_can_be_followed() -> None:
    found = wanted(Order)
    assert found is not None
    spec = GrammarSpec(GrammarKind.JSON, found.schema)
    assert allows(tiny_grammars("llguidance"), spec, json.dumps(ORDER))


@pytest.mark.parametrize(
    ("given", "schema"),
    [
        ({"type": "object", "required": ["a"]}, {"type": "object", "required": ["a"]}),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 1}}}, {"const": 1}),
    ],
)
def test_a_dict_is_a_schema_or_openai_s_form(given: dict[str, Any], schema: dict[str, Any]) -> None:
    found = wanted(given)
    assert found is not None
    assert json.loads(found.schema) == schema
    assert found.read("[1]") == [1]


def test_what_asks_for_nothing() -> None:
    assert wanted(None) is None
    assert wanted({"type": "text"}) is None


@pytest.mark.parametrize("given", [3, "x", int, object, {"type": "json_schema"}, {"a": object()}, Part("x")])
def test_what_has_no_schema_is_refused(given: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        wanted(given)
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(("kind", "value"), [(int, True), (int, "1"), (Literal[1, 2], 3), (str | None, 3), (Part, [])])
def test_a_value_of_another_type_is_not_taken(kind: Any, value: Any) -> None:
    with pytest.raises(ValueError, match=r"is not|is of none"):
        build(kind, value)


def sent(**options: Any) -> inference_pb2.GenerateRequest:
    return CallPlanner().generate("go", None, options).message  # type: ignore[arg-type, no-any-return]


def test_it_reaches_the_gateway_as_http_s_fields_do() -> None:
    message = sent(response_format=City)
    assert message.grammar.kind == "json"
    spec = parse_completion(body_of(message)).grammar_spec()
    assert spec is not None
    assert spec[0].kind is GrammarKind.JSON
    assert json.loads(spec[0].text)["$defs"]["City"]["additionalProperties"] is False
    choice = common_pb2.Grammar(kind="choice", text='["a", "b"]')
    spec = parse_completion(body_of(inference_pb2.GenerateRequest(prompt="go", grammar=choice))).grammar_spec()
    assert spec is not None
    assert spec[0] == GrammarSpec(GrammarKind.CHOICE, '["a","b"]')
    for kind, text in (("xml", ""), ("choice", "[")):
        wrong = inference_pb2.GenerateRequest(prompt="go", grammar=common_pb2.Grammar(kind=kind, text=text))
        with pytest.raises(InvalidRequestError):
            body_of(wrong)


def answered(text: str, finish: str) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(choices=[inference_pb2.Choice(text=text, finish_reason=finish)])


READERS: list[Callable[..., Any]] = [
    lambda text, finish: (
        CallPlanner().generate("go", None, {"response_format": City}).parse(answered(text, finish), ClientTimings(1.0))
    ),
    lambda text, finish: join_chunks(
        [Chunk("a", "m", 0, text[:5], ()), Chunk("a", "m", 0, text[5:], (), finish, usage=Usage(1, 1))],
        ClientTimings(1.0),
        CallPlanner().stream("go", None, {"response_format": City}).read,
    ),
]


@pytest.mark.parametrize("read", READERS, ids=["whole", "streamed"])
def test_the_answer_comes_back_as_an_object(read: Callable[..., Any]) -> None:
    assert read('{"name": "Rome", "people": 3}', "stop").parsed == City(name="Rome", people=3)
    with pytest.raises(IncompleteAnswerError) as caught:
        _ = read('{"name": "Ro', "length").parsed
    assert (caught.value.text, caught.value.code) == ('{"name": "Ro', "incomplete_answer")
    with pytest.raises(pydantic.ValidationError):
        _ = read('{"name": "Rome", "people": -3}', "stop").parsed


def test_an_answer_cut_by_a_stop_string_is_incomplete() -> None:
    choice = Choice(0, '{"a": ', (), "stop", read=json.loads)
    with pytest.raises(IncompleteAnswerError, match="stop string"):
        _ = choice.parsed
    assert Choice(0, "text", (), "stop").parsed is None
