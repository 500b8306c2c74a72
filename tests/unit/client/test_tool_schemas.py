"""Functions as tools: the schema of their parameters, its grammar, and their arguments from what a model writes."""

from __future__ import annotations

import enum
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, NewType, NotRequired, Optional, TypedDict

import annotated_types
import pydantic
import pytest
from jsonschema import Draft202012Validator

from alignedserve.client import InvalidRequestError, Tool, ToolArgumentsError, ToolCall
from alignedserve.client.docstrings import parse_docstring
from alignedserve.client.tools import choice_json, result_text, tools_json
from alignedserve.gateway.body.requests import parse_chat
from alignedserve.request import GrammarKind, GrammarSpec
from support.grammars import tiny_grammars, write

City = NewType("City", str)


class Unit(enum.Enum):
    C = "celsius"
    F = "fahrenheit"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclass
class Node:
    value: int
    left: Node | None = None


class Box(TypedDict):
    width: int
    label: NotRequired[str]


class Point(NamedTuple):
    x: float
    y: float


class Order(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    lines: list[Line] = []


class Line(pydantic.BaseModel):
    count: Annotated[int, annotated_types.Ge(0)]


def call(tool: Tool, arguments: Any) -> dict[str, Any]:
    return tool.arguments_of(ToolCall("call_1", tool.name, json.dumps(arguments)))


def of(annotation: Any) -> Tool:
    """The tool of a function whose only parameter is annotated so."""

    def f(p): ...  # type: ignore[no-untyped-def]

    f.__annotations__ = {"p": annotation}
    return Tool.of(f)


VALUES: list[tuple[Any, Any, Any]] = [
    (str, "Bern", "Bern"),
    (int, 3, 3),
    (int, 3.0, 3),
    (float, 3, 3.0),
    (bool, True, True),
    (None, None, None),
    (Any, {"a": [1]}, {"a": [1]}),
    (City, "Bern", "Bern"),
    (Optional[int], None, None),  # noqa: UP045
    (int | str, "x", "x"),
    (list[int], [1, 2], [1, 2]),
    (Sequence[str], ["a"], ["a"]),
    (set[int], [1, 1], {1}),
    (tuple[int, str], [1, "a"], (1, "a")),
    (tuple[int, ...], [1, 2], (1, 2)),
    (dict[str, list[int]], {"a": [1]}, {"a": [1]}),
    (Mapping[str, bool], {"a": True}, {"a": True}),
    (Literal["a", 2], 2, 2),
    (Unit, "celsius", Unit.C),
    (Level, 2, Level.HIGH),
    (Literal[Unit.C], "celsius", Unit.C),
    (Node, {"value": 1, "left": {"value": 2, "left": None}}, Node(1, Node(2))),
    (Box, {"width": 2}, {"width": 2}),
    (Point, {"x": 1, "y": 2.5}, Point(1.0, 2.5)),
    (Order, {"name": "a", "lines": [{"count": 1}]}, Order(name="a", lines=[Line(count=1)])),
    (list[Order] | None, [{"name": "a"}], [Order(name="a")]),
    (Annotated[int, "a number"], 3, 3),
    (Annotated[int, annotated_types.Ge(2)], 3, 3),
]


@pytest.mark.parametrize(("annotation", "written", "value"), VALUES, ids=lambda one: str(one)[:40])
def test_an_argument_becomes_an_object_of_its_type(annotation: Any, written: Any, value: Any) -> None:
    tool = of(annotation)
    Draft202012Validator(tool.parameters).validate({"p": written})
    (found,) = call(tool, {"p": written}).values()
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("annotation", "written"),
    [(str, 3), (int, "3"), (int, 3.5), (int, True), (bool, 1), (None, 0), (list[int], ["a"]), (list[int], {}),
     (tuple[int, str], [1]), (dict[str, int], {"a": "b"}), (Literal["a"], "b"), (Literal[1], True), (Unit, "kelvin"),
     (Node, {"value": 1, "lft": None}), (Node, {}), (Box, {"width": "a"}), (Order, {"name": "too long a name"}),
     (Annotated[int, annotated_types.Ge(2)], 1), (int | None, "x"), (float, 10**400)],
)  # fmt: skip
def test_an_argument_of_another_type_is_named(annotation: Any, written: Any) -> None:
    with pytest.raises(ToolArgumentsError, match=r"f\(.*\): p: ") as caught:
        call(of(annotation), {"p": written})
    assert caught.value.call.id == "call_1"
    assert caught.value.code == "invalid_tool_arguments"


def look(city: str, days: int = 1, *, unit: Unit = Unit.C, where: Annotated[Point | None, "a place"] = None) -> str:
    """Get the weather
    of a city.

    Of today, or later.

    Args:
        city (str): the city's name,
            in German.
        days: how many days: 1 is today.
        unit (Unit, optional): of the answer.

    Returns:
        The weather.
    """
    return f"{city} {days} {unit} {where}"


def test_a_function_s_signature_and_docstring_are_its_schema() -> None:
    tool = Tool.of(look)
    assert (tool.name, tool.strict) == ("look", True)
    assert tool.description == "Get the weather of a city.\n\nOf today, or later."
    point = {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
             "required": ["x", "y"], "additionalProperties": False}  # fmt: skip
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "the city's name, in German."},
            "days": {"type": "integer", "description": "how many days: 1 is today.", "default": 1},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "description": "of the answer.",
                     "default": "celsius"},
            "where": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}], "description": "a place",
                      "default": None},
        },
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"Point": point},
    }  # fmt: skip
    assert call(tool, {"city": "Bern"}) == {"city": "Bern"}, "a default is the function's own"
    (sent,) = tools_json([look])
    (read,) = parse_chat({"messages": [{"role": "user", "content": "hi"}], "tools": [sent]}).tool_use().tools
    assert (read.name, read.parameters, read.strict) == ("look", tool.parameters, True)


STYLES = {
    "google": "Do.\n\n    Args:\n        a: the a.\n        b (list[str], optional): the b,\n            and more.\n\n"
    "    Raises:\n        ValueError: never.\n    ",
    "numpy": "Do.\n\n    Parameters\n    ----------\n    a : int\n        the a.\n    b : list of str, optional\n"
    "        the b,\n        and more.\n\n    Returns\n    -------\n    int\n        it.\n    ",
    "sphinx": "Do.\n\n    :param int a: the a.\n    :param b: the b,\n        and more.\n    :type b: str\n"
    "    :returns: it.\n    ",
}


@pytest.mark.parametrize("style", STYLES)
def test_each_style_of_docstring_is_read(style: str) -> None:
    found = parse_docstring(STYLES[style])
    assert found.summary == "Do."
    assert found.parameters == {"a": "the a.", "b": "the b, and more."}


@pytest.mark.parametrize(
    ("text", "summary"),
    [(None, ""), ("Do.", "Do."), ("Note: it does.", "Note: it does."), ("Do.\n\nArgs:\n", "Do."),
     ("Do.\n\nArgs:\n    ???\n", "Do."), ("a: int", "a: int"), ("  Do\n  more.\n\n  Still.", "Do more.\n\nStill.")],
)  # fmt: skip
def test_any_other_text_is_the_description(text: str | None, summary: str) -> None:
    assert (parse_docstring(text).summary, parse_docstring(text).parameters) == (summary, {})


class Shop:
    def buy(self, what: str, count: int = 1) -> str:
        """Buy it."""
        return f"{count} {what}"

    @classmethod
    def made(cls, what: str) -> str:
        return what

    @staticmethod
    def open(day: str) -> bool:
        return bool(day)

    def __call__(self, what: str) -> str:
        """Call it."""
        return what


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


async def fetch(url: str) -> str:
    """Fetch it."""
    return url


def now() -> str:
    """The time."""
    return "12:00"


def test_methods_and_wrapped_functions_are_tools() -> None:
    shop = Shop()
    assert list(Tool.of(shop.buy).parameters["properties"]) == ["what", "count"]
    assert Tool.of(Shop.made).parameters["required"] == ["what"]
    assert Tool.of(Shop.open).name == "open"
    assert Tool.of(shop, name="shop").description == "Call it."
    assert Tool.of(logged(look)).parameters == Tool.of(look).parameters
    part = Tool.of(functools.partial(look, "Bern"))
    assert (part.name, part.parameters["required"], part.description[:3]) == ("look", [], "Get")
    assert Tool.of(fetch).description == "Fetch it."
    assert Tool.of(now).parameters == {
        "type": "object", "properties": {}, "required": [], "additionalProperties": False
    }  # fmt: skip
    assert Tool.of(now, name="time", description="", strict=False).to_json()["function"].keys() == {
        "name", "parameters", "strict"
    }  # fmt: skip


def bare(a): ...  # type: ignore[no-untyped-def]


def many(*args: int) -> None: ...


def more(**kwargs: int) -> None: ...


def unknown(a: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821


def by_number(a: dict[int, int]) -> None: ...


def with_function(a: Callable[[], None]) -> None: ...


@pytest.mark.parametrize(
    ("wrong", "why"),
    [(bare, "a has no annotation"), (many, r"\*args"), (more, r"\*\*kwargs"), (unknown, "Nowhere"),
     (with_function, "no JSON schema"), (lambda: 1, "no name of a tool"), (Shop(), "no name of a tool"),
     (3, "must be a function")],
)  # fmt: skip
def test_what_is_no_tool_is_refused_by_name(wrong: Any, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why) as caught:
        tools_json([wrong])
    assert caught.value.param == "tools"


def test_without_pydantic_unknown_types_are_refused() -> None:
    program = (
        "import sys; from alignedserve.client import Tool, InvalidRequestError\n"
        "def f(a: dict[int, int]): ...\n"
        "try: Tool.of(f)\n"
        "except InvalidRequestError as error: print(error)\n"
        "assert 'pydantic' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "no JSON schema for dict[int, int]" in done.stdout
    assert call(of(dict[int, int]), {"p": {"1": 2}}) == {"p": {1: 2}}, "pydantic knows it"


@pytest.mark.parametrize("given", [None, 3, "look", {"type": "function"}])
def test_tools_are_a_list(given: Any) -> None:
    with pytest.raises(InvalidRequestError):
        tools_json(given)


def test_a_choice_may_be_a_function() -> None:
    named = {"type": "function", "function": {"name": "look"}}
    assert [choice_json(choice) for choice in ("auto", "none", "required")] == ["auto", "none", "required"]
    assert [choice_json(choice) for choice in (look, Tool.of(look), "look", named)] == [named] * 4


@pytest.mark.parametrize("arguments", ['{"city": "Be', "[]", '"x"', "nonsense"])
def test_arguments_that_are_no_object_are_an_error(arguments: str) -> None:
    with pytest.raises(ToolArgumentsError, match="not"):
        Tool.of(look).arguments_of(ToolCall("a", "look", arguments))


def test_missing_and_unknown_arguments_are_named() -> None:
    with pytest.raises(ToolArgumentsError, match="city missing"):
        call(Tool.of(look), {"days": 2})
    with pytest.raises(ToolArgumentsError, match="no parameter 'town'"):
        call(Tool.of(look), {"city": "a", "town": "b"})
    assert Tool.of(now).arguments_of(ToolCall("a", "now", "")) == {}


@pytest.mark.parametrize(
    ("value", "text"),
    [("x", "x"), (None, "null"), ({"a": "ü"}, '{"a": "ü"}'), (Node(1), '{"value": 1, "left": null}'),
     (Order(name="a"), '{"name": "a", "lines": []}'), ([Unit.C, {1}], '["celsius", [1]]')],
)  # fmt: skip
def test_results_are_text_or_json(value: Any, text: str) -> None:
    assert result_text(value) == text


def test_wild_arguments_under_the_schema_s_grammar_are_a_call() -> None:
    """Also with definitions beside a default or a description."""

    def wild(node: Node, box: Box, unit: Unit = Unit.C, where: Annotated[Point | None, "a place"] = None) -> None: ...

    tool = Tool.of(wild)
    spec = GrammarSpec(GrammarKind.JSON, json.dumps(tool.parameters))
    found = [write(tiny_grammars("llguidance"), spec, seed) for seed in range(6)]
    called = [tool.arguments_of(ToolCall("a", "wild", answer)) for answer in found if answer is not None]
    assert len(called) > 2
    assert all(isinstance(arguments["node"], Node) for arguments in called)


def test_classes_of_equal_names_have_definitions_of_their_own() -> None:
    def other() -> Any:
        @dataclass
        class Node:
            name: str

        return Node

    first, second = other(), other()
    kind = tuple[first, second]  # type: ignore[valid-type]
    (found,) = call(of(kind), {"p": [{"name": "a"}, {"name": "b"}]}).values()
    assert [type(one) for one in found] == [first, second]
    assert len(of(kind).parameters["$defs"]) == 2
