"""litellm: completions, streams, tools and structured output through the providers that speak to this server's APIs."""

from __future__ import annotations

import json
import os
from typing import Any, Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # the import asks the network otherwise

import litellm
from checks import MODEL, check, main, raises
from pydantic import BaseModel, Field

OPENAI, VLLM, ANTHROPIC = f"openai/{MODEL}", f"hosted_vllm/{MODEL}", f"anthropic/{MODEL}"
ASKED: list[Any] = [{"role": "user", "content": "Name a place."}]
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["Bern", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["place", "days"],
            "additionalProperties": False,
        },
    },
}


class Place(BaseModel):
    name: Literal["Bern", "Oslo", "Quito"]
    people: int = Field(ge=0, le=999)


def options(url: str, model: str) -> dict[str, Any]:
    base = url if model == ANTHROPIC else f"{url}/v1"
    given = {"messages": ASKED, "temperature": 0, "max_tokens": 160, "max_retries": 0}
    return {"model": model, "api_base": base, "api_key": "none", **given}


def valid(arguments: str) -> bool:
    found = json.loads(arguments)
    return sorted(found) == ["days", "place"] and found["place"] in ("Bern", "Oslo") and found["days"] in (1, 2, 3)


@check
async def a_stream_is_the_whole_answer(url: str) -> None:
    for model in (OPENAI, VLLM, ANTHROPIC):
        asked = options(url, model)
        whole = litellm.completion(**asked)
        chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
        streamed = litellm.stream_chunk_builder(chunks, messages=ASKED)
        assert whole.choices[0].message.content, model
        assert streamed.choices[0].message.content == whole.choices[0].message.content, model
        assert streamed.choices[0].finish_reason == whole.choices[0].finish_reason, model
        assert streamed.usage.completion_tokens == whole.usage.completion_tokens, model
        later = await litellm.acompletion(**asked)
        assert later.choices[0].message.content == whole.choices[0].message.content
        pieces = [
            piece.choices[0].delta.content or "" async for piece in await litellm.acompletion(**asked, stream=True)
        ]
        assert "".join(pieces) == whole.choices[0].message.content, model


@check
def text_completions(url: str) -> None:
    asked: dict[str, Any] = {
        "model": f"text-completion-openai/{MODEL}", "prompt": "Return a list of", "temperature": 0, "max_tokens": 16,
        "api_base": f"{url}/v1", "api_key": "none",
    }  # fmt: skip
    whole = litellm.text_completion(**asked).choices[0].text
    assert whole
    assert "".join(piece.choices[0].text or "" for piece in litellm.text_completion(**asked, stream=True)) == whole


@check
def tools_are_called_and_get_their_results_back(url: str) -> None:
    for model in (OPENAI, VLLM, ANTHROPIC):
        for choice in ("required", {"type": "function", "function": {"name": "look"}}):
            asked = {**options(url, model), "tools": [LOOK], "tool_choice": choice, "parallel_tool_calls": False}
            message = litellm.completion(**asked).choices[0].message
            (call,) = message.tool_calls
            assert call.function.name == "look"
            assert valid(call.function.arguments), (model, call.function.arguments)
            chunks = list(litellm.completion(**asked, stream=True))
            (same,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
            assert (same.function.name, json.loads(same.function.arguments)) == (
                "look",
                json.loads(call.function.arguments),
            ), model
            result = {"role": "tool", "tool_call_id": call.id, "content": "5 degrees"}
            more = {**options(url, model), "messages": [*ASKED, message.model_dump(), result], "max_tokens": 8}
            answer = litellm.completion(**more, tools=[LOOK])
            assert 0 < answer.usage.completion_tokens <= 8, model


@check
def structured_output(url: str) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "place", "schema": Place.model_json_schema()}}
    for model in (OPENAI, VLLM, ANTHROPIC):
        for wanted in (Place, schema):
            answer = litellm.completion(**options(url, model), response_format=wanted).choices[0].message.content
            assert isinstance(Place.model_validate_json(answer), Place), model
            pieces = litellm.completion(**options(url, model), response_format=wanted, stream=True)
            text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
            assert json.loads(text) == json.loads(answer), model


@check
def json_mode(url: str) -> None:
    for model in (OPENAI, VLLM):
        (choice,) = litellm.completion(**{**options(url, model), "max_tokens": 400},
                                       response_format={"type": "json_object"}).choices  # fmt: skip
        text = choice.message.content
        assert isinstance(json.loads(text), dict) if choice.finish_reason == "stop" else text.startswith("{")


@check
def fields_of_other_servers_are_passed_on(url: str) -> None:
    for model in (OPENAI, VLLM):
        answer = litellm.completion(**options(url, model), extra_body={"guided_choice": ["yes", "no"], "top_k": 4})
        assert answer.choices[0].message.content in ("yes", "no")
    with_seed = [
        litellm.completion(**{**options(url, OPENAI), "temperature": 1}, seed=4, n=2).choices[1].message.content
        for _ in range(2)
    ]
    assert with_seed[0] == with_seed[1]


@check
async def responses(url: str) -> None:
    asked: dict[str, Any] = {"model": OPENAI, "input": "Name a place.", "api_base": f"{url}/v1", "api_key": "none"}
    asked |= {"temperature": 0, "max_output_tokens": 24}
    whole = await litellm.aresponses(**asked)
    text = whole.output[0].content[0].text
    assert text
    pieces = [event async for event in await litellm.aresponses(**asked, stream=True)]
    assert "".join(event.delta for event in pieces if event.type == "response.output_text.delta") == text


@check
async def anthropics_messages(url: str) -> None:
    asked: dict[str, Any] = {
        "model": ANTHROPIC, "messages": ASKED, "max_tokens": 24, "api_base": url, "api_key": "none", "temperature": 0,
    }  # fmt: skip
    whole: Any = await litellm.anthropic.messages.acreate(**asked)
    assert whole["content"][0]["text"]
    assert whole["stop_reason"] in ("end_turn", "max_tokens")


@check
def errors_have_litellms_types(url: str) -> None:
    for model in (OPENAI, VLLM, ANTHROPIC):
        with raises(litellm.BadRequestError) as raised:
            litellm.completion(**{**options(url, model), "temperature": 7})
        assert "temperature" in str(raised.error), model
        with raises(litellm.NotFoundError):
            litellm.completion(**{**options(url, model), "model": model.replace(MODEL, "another")})


if __name__ == "__main__":
    main()
