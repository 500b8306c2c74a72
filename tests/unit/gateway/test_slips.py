"""Fields of tools and formats that are misspelt, misplaced or without a meaning: refused, or named in the header."""

from __future__ import annotations

from typing import Any

import pytest

from alignedserve.errors import InvalidRequestError
from alignedserve.gateway.body.requests import parse_chat
from alignedserve.gateway.translated.messages_request import parse_messages
from alignedserve.gateway.translated.responses_request import parse_responses
from support.gateway_front import HI

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def chat(**fields: Any) -> Any:
    return parse_chat({"messages": HI, **fields})


def tool(outside: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}, **(outside or {})}


@pytest.mark.parametrize(
    ("given", "param", "said"),
    [
        (tool(paramters=SCHEMA), "tools[0].function.paramters", "did you mean parameters"),
        (tool(params=SCHEMA), "tools[0].function.params", "did you mean parameters"),
        (tool(input_schema=SCHEMA), "tools[0].function.input_schema", "did you mean parameters"),
        (tool(descripton="d"), "tools[0].function.descripton", "did you mean description"),
        (tool({"strict": True}), "tools[0].strict", "belongs into tools[0].function"),
        ({"type": "function", "function": {}}, "tools[0].function.name", "is required"),
        (tool(name="a b"), "tools[0].function.name", "'a b'"),
    ],
)
def test_a_slip_that_would_change_a_tool_is_refused(given: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(tools=[given]).tool_use()
    assert caught.value.param == param
    assert said in caught.value.message


def test_what_a_tool_has_beside_its_fields_is_named() -> None:
    request = chat(
        tools=[tool({"cache_control": {}, "strict": False}, parameters=SCHEMA, arguments="x", version=2)],
        tool_choice={"type": "function", "function": {"name": "f"}, "mode": "x"},
    )
    assert request.tool_use().forced
    wanted = ["tools.cache_control", "tools.strict", "tools.function.arguments", "tools.function.version"]
    assert request.ignored == [*wanted, "tool_choice.mode"]
    older = chat(functions=[{"name": "f", "kind": 1}])
    assert older.ignored == ["functions.kind"]


def test_what_a_format_has_beside_its_fields_is_named() -> None:
    inner = {"name": "x", "schema": SCHEMA, "strct": True}
    request = chat(response_format={"type": "json_schema", "json_schema": inner, "schema": {}})
    assert request.ignored == ["response_format.schema", "response_format.json_schema.strct"]
    assert chat(response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}}).ignored == []


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"type": "json_schema", "schema": SCHEMA}, "json_schema is required: schema belongs into it"),
        ({"type": "json_schema", "json_schema": {"schem": SCHEMA}}, "json_schema.schema is required"),
        ({"type": "json_schema", "json_schema": {"schema": "x"}}, "json_schema.schema must be a JSON schema"),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": "yes"}}, "json_schema.strict must be"),
    ],
)
def test_a_format_without_its_schema_says_what_it_lacks(wanted: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        chat(response_format=wanted).grammar_spec()


def test_other_endpoints_name_them_as_the_client_wrote_them() -> None:
    flat = {"type": "function", "name": "f", "parameters": SCHEMA, "version": 2}
    assert parse_responses({"input": "hi", "tools": [flat]}).ignored == ["tools.version"]
    with pytest.raises(InvalidRequestError, match="stand beside type, not in function") as caught:
        parse_responses({"input": "hi", "tools": [tool(parameters=SCHEMA)]})
    assert caught.value.param == "tools[0].name"
    with pytest.raises(InvalidRequestError, match=r"input\[0\].content is required"):
        parse_responses({"input": [{"role": "user"}]})
    theirs = {"name": "f", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
    body = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], "tools": [theirs]}
    found = parse_messages({**body, "tool_choice": {"type": "auto", "mode": 1}}).ignored
    assert found == ["tool_choice.mode", "tools[0].cache_control"]
