"""langchain-openai: text, structured output by every method, tools and their results, streams, both APIs of OpenAI."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

import openai
from checks import MODEL, check, main, raises
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

ASKED = [SystemMessage("Be brief."), HumanMessage("Name a place.")]


class Place(BaseModel):
    """A place."""

    name: Literal["Bern", "Oslo", "Quito"]
    people: int = Field(ge=0, le=999)
    kinds: list[Literal["old", "new"]] = Field(max_length=3)


class Town(TypedDict):
    """A town."""

    name: Literal["Bern", "Oslo"]
    far: bool


@tool
def look(place: Literal["Bern", "Oslo"], days: Literal[1, 2, 3]) -> str:
    """Look at the weather of a place."""
    return f"{place}: {days * 5} degrees"


@tool
def count(first: Literal["a", "b"], second: bool) -> int:
    """Count something."""
    return len(first) + second


def chat(url: str, **options: Any) -> ChatOpenAI:
    given = {"model": MODEL, "temperature": 0, "max_tokens": 160, "max_retries": 0, "stream_usage": True}
    return ChatOpenAI(base_url=f"{url}/v1", api_key="none", **{**given, **options})


def call_all(message: BaseMessage) -> list[ToolMessage]:
    """The results of the message's calls: a tool raises if its arguments are not what it takes."""
    assert isinstance(message, AIMessage)
    assert message.tool_calls
    assert not message.invalid_tool_calls
    tools = {"look": look, "count": count}
    return [tools[call["name"]].invoke(call) for call in message.tool_calls]


@check
def a_stream_is_the_whole_answer(url: str) -> None:
    model = chat(url, max_tokens=24)
    whole = model.invoke(ASKED)
    streamed = None
    for chunk in model.stream(ASKED):
        streamed = chunk if streamed is None else streamed + chunk
    assert whole.text
    assert streamed is not None
    assert streamed.text == whole.text
    assert streamed.usage_metadata == whole.usage_metadata
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] <= 24
    assert whole.response_metadata["finish_reason"] == streamed.response_metadata["finish_reason"]


@check
async def the_same_with_asyncio_and_many_at_once(url: str) -> None:
    model = chat(url, max_tokens=12)
    prompts = [f"Say {number}." for number in range(6)]
    one_by_one = [model.invoke(prompt).text for prompt in prompts]
    assert [message.text for message in await model.abatch(prompts)] == one_by_one
    assert "".join([chunk.text async for chunk in model.astream(prompts[3])]) == one_by_one[3]


@check
def completions(url: str) -> None:
    model = OpenAI(
        model=MODEL, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=16, max_retries=0, best_of=1
    )
    whole = model.invoke("Return a list of")
    assert whole
    assert "".join(model.stream("Return a list of")) == whole
    assert model.generate(["Return a list of", "Raise a"]).generations[0][0].text == whole


@check
def log_probabilities(url: str) -> None:
    answer = chat(url, max_tokens=6, logprobs=True, top_logprobs=2).invoke(ASKED)
    entries = answer.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == answer.text
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in entries)


@check
def structured_output_by_each_method(url: str) -> None:
    ways: list[dict[str, Any]] = [
        {"method": method, "strict": strict}
        for method in ("json_schema", "function_calling")
        for strict in (None, True, False)
    ]
    found = [chat(url).with_structured_output(Place, **way).invoke(ASKED) for way in ways]
    assert all(isinstance(place, Place) for place in found), found
    town = chat(url).with_structured_output(Town, method="json_schema").invoke(ASKED)
    assert isinstance(town, dict)
    assert town["name"] in ("Bern", "Oslo")
    assert isinstance(town["far"], bool)
    schema = Place.model_json_schema()
    assert Place.model_validate(chat(url).with_structured_output(schema, method="function_calling").invoke(ASKED))


@check
def structured_output_in_json_mode(url: str) -> None:
    """Any object: nothing tells the server of a schema."""
    asked = chat(url, max_tokens=400).with_structured_output(None, method="json_mode", include_raw=True)
    answer = asked.invoke("Answer in JSON: what is a list?")
    if answer["raw"].response_metadata["finish_reason"] == "stop":
        assert isinstance(answer["parsed"], dict)
    else:
        assert answer["raw"].text.startswith("{")


@check
def structured_output_at_any_temperature(url: str) -> None:
    model = chat(url, temperature=1.5).with_structured_output(Place)
    places = model.batch([ASKED] * 8)
    assert all(isinstance(place, Place) for place in places)
    assert len({place.model_dump_json() for place in places}) > 1


@check
async def structured_output_as_a_stream(url: str) -> None:
    for method in ("json_schema", "function_calling"):
        model = chat(url).with_structured_output(Place, method=method)
        *_, last = list(model.stream(ASKED))
        assert last == model.invoke(ASKED), method
        *_, later = [part async for part in model.astream(ASKED)]
        assert later == last
    partial = list(chat(url).with_structured_output(Town, method="json_schema").stream(ASKED))
    assert len(partial) > 1
    assert sorted(partial[-1]) == ["far", "name"]


@check
def tools_are_called_and_get_their_results_back(url: str) -> None:
    for choice in ("any", "required", "look", True):
        tools = [look] if choice is True else [look, count]
        for strict in (None, True):
            model = chat(url, max_tokens=600).bind_tools(
                tools, tool_choice=choice, strict=strict, parallel_tool_calls=False
            )
            message = model.invoke(ASKED)
            (result,) = call_all(message)
            assert message.response_metadata["finish_reason"] == "tool_calls"
            answer = chat(url, max_tokens=16).bind_tools([look, count]).invoke([*ASKED, message, result])
            assert isinstance(answer, AIMessage)
            assert answer.text or answer.tool_calls or answer.invalid_tool_calls


@check
def a_call_as_a_stream(url: str) -> None:
    model = chat(url).bind_tools([look, count], tool_choice="any", parallel_tool_calls=False)
    whole = model.invoke(ASKED)
    streamed, pieces = None, 0
    for chunk in model.stream(ASKED):
        streamed, pieces = (chunk if streamed is None else streamed + chunk), pieces + 1
    assert isinstance(streamed, AIMessage)
    assert pieces > 3

    def said(message: AIMessage) -> list[tuple[str, Any]]:
        return [(call["name"], call["args"]) for call in message.tool_calls]

    assert said(streamed) == said(whole)
    assert call_all(streamed)


@check
def tools_that_need_not_be_called(url: str) -> None:
    model = chat(url, max_tokens=24).bind_tools([look, count], tool_choice="auto", strict=True)
    answer = model.invoke(ASKED)
    assert answer.text or answer.tool_calls
    assert not answer.invalid_tool_calls
    none = chat(url, max_tokens=24).bind_tools([look, count], tool_choice="none").invoke(ASKED)
    assert none.text
    assert not none.tool_calls


@check
async def the_responses_api(url: str) -> None:
    model = chat(url, use_responses_api=True)
    whole = model.invoke(ASKED)
    assert whole.text
    streamed = None
    async for chunk in model.astream(ASKED):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    assert streamed.text == whole.text
    assert streamed.usage_metadata == whole.usage_metadata
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Place, method=method).invoke(ASKED), Place), method
    calling = model.bind_tools([look, count], tool_choice="required", parallel_tool_calls=False)
    message = calling.invoke(ASKED)
    results = call_all(message)
    answer = chat(url, use_responses_api=True, max_tokens=16).bind_tools([look]).invoke([*ASKED, message, *results])
    assert isinstance(answer, AIMessage)
    *_, last = list(model.with_structured_output(Place).stream(ASKED))
    assert isinstance(last, Place)


@check
def errors_are_openais(url: str) -> None:
    with raises(openai.NotFoundError) as raised:
        chat(url, model="another").invoke(ASKED)
    assert raised.error.code == "model_not_found"


if __name__ == "__main__":
    main()
