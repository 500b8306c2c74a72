"""Checks with helpers of the `openai` and `anthropic` packages through a real server, beside those of `openai_rows`."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import anthropic
import openai
from pydantic import BaseModel, Field

from support.grammar_rows import ROWS
from support.openai_rows import World, row

__all__ = ["ROWS"]  # all of them

MESSAGES: list[Any] = [{"role": "user", "content": "Name a place."}]


class Place(BaseModel):
    """A place."""

    name: Literal["Bern", "Oslo"]
    people: int = Field(ge=0, le=99)


def of_openai(world: World) -> dict[str, Any]:
    return {"base_url": f"{world.url}/v1", "api_key": "none", "max_retries": 0}


@row
def objects_parsed_by_the_openai_package(world: World) -> None:
    asked: dict[str, Any] = {"model": "surface", "messages": MESSAGES, "temperature": 0, "max_tokens": 100}

    async def later() -> Any:
        async with openai.AsyncOpenAI(**of_openai(world)) as client:
            return (await client.chat.completions.parse(response_format=Place, **asked)).choices[0].message.parsed

    with openai.OpenAI(**of_openai(world)) as client:
        whole = client.chat.completions.parse(response_format=Place, **asked).choices[0].message.parsed
        with client.chat.completions.stream(response_format=Place, **asked) as stream:
            kinds = [event.type for event in stream]
            last = stream.get_final_completion().choices[0].message.parsed
        tool = openai.pydantic_function_tool(Place)
        calls = client.chat.completions.parse(tools=[tool], tool_choice="required", parallel_tool_calls=False, **asked)
    assert isinstance(whole, Place)
    assert whole == last == asyncio.run(later())
    assert kinds.count("content.delta") > 1
    assert kinds[-1] == "content.done"
    found: Any = calls.choices[0].message.tool_calls
    assert isinstance(found[0].function.parsed_arguments, Place)


@row
def responses_parsed_by_the_openai_package(world: World) -> None:
    asked: dict[str, Any] = {"model": "surface", "input": "Name a place.", "temperature": 0, "max_output_tokens": 100}

    async def later() -> Any:
        async with openai.AsyncOpenAI(**of_openai(world)) as client, client.responses.stream(**asked) as stream:
            return (await stream.get_final_response()).output_text

    with openai.OpenAI(**of_openai(world)) as client:
        whole = client.responses.parse(text_format=Place, **asked).output_parsed
        with client.responses.stream(text_format=Place, **asked) as stream:
            last = stream.get_final_response().output_parsed
        text = client.responses.create(**asked).output_text
        tool: Any = openai.pydantic_function_tool(Place)["function"]
        forced: dict[str, Any] = {"tools": [{"type": "function", **tool}], "tool_choice": "required"}
        called: Any = client.responses.create(**asked, **forced, parallel_tool_calls=False).output[-1]
        result: Any = {"type": "function_call_output", "call_id": called.call_id, "output": "so be it"}
        more = client.responses.parse(**{**asked, "input": [*MESSAGES, called, result]}, text_format=Place)
    assert isinstance(whole, Place)
    assert whole == last
    assert text
    assert text == asyncio.run(later())
    assert isinstance(Place.model_validate_json(called.arguments), Place)
    assert isinstance(more.output_parsed, Place)


@row
def messages_with_the_anthropic_package(world: World) -> None:
    tool = {"name": "settle", "input_schema": Place.model_json_schema()}
    asked: dict[str, Any] = {"model": "surface", "max_tokens": 100, "extra_body": {"temperature": 0}}

    async def later(choice: Any) -> Any:
        async with anthropic.AsyncAnthropic(base_url=world.url, api_key="none", max_retries=0) as client:
            return await client.messages.create(messages=MESSAGES, tools=[tool], tool_choice=choice, **asked)  # type: ignore[list-item]

    with anthropic.Anthropic(base_url=world.url, api_key="none", max_retries=0) as client:
        whole = client.messages.parse(messages=MESSAGES, output_format=Place, **asked).parsed_output
        text = client.messages.create(messages=MESSAGES, **asked).content[0]
        with client.messages.stream(messages=MESSAGES, **asked) as stream:
            pieces = "".join(stream.text_stream)
        for kind in ("any", "tool"):
            named = {"name": "settle"} if kind == "tool" else {}
            choice = {"type": kind, "disable_parallel_tool_use": True, **named}
            message = asyncio.run(later(choice))
            used = message.content[-1]
            assert (message.stop_reason, used.type, used.name) == ("tool_use", "tool_use", "settle")
            assert isinstance(Place.model_validate(used.input), Place)
            result: Any = {"type": "tool_result", "tool_use_id": used.id, "content": "so be it"}
            turns: Any = [*MESSAGES, {"role": "assistant", "content": message.content}]
            turns.append({"role": "user", "content": [result]})
            assert isinstance(client.messages.parse(messages=turns, output_format=Place, **asked).parsed_output, Place)
    assert isinstance(whole, Place)
    assert text.type == "text"
    assert text.text
    assert pieces == text.text
