"""OpenAI's Agents SDK: both of its models, function tools, structured output, hand-offs, streams."""

from __future__ import annotations

from typing import Any, Literal

import openai
from agents import (
    Agent,
    AgentOutputSchema,
    MaxTurnsExceeded,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import MODEL, check, main
from pydantic import BaseModel, Field

set_tracing_disabled(True)
SETTINGS = ModelSettings(temperature=0, max_tokens=200)


class Place(BaseModel):
    name: Literal["Bern", "Oslo", "Quito"]
    people: int = Field(ge=0, le=999)


def models(url: str) -> list[Model]:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return [OpenAIChatCompletionsModel(MODEL, client), OpenAIResponsesModel(MODEL, client)]


class Looks:
    """A tool that remembers its calls. `once`: it is offered until it was called."""

    def __init__(self, *, once: bool = False) -> None:
        self.once = once
        self.calls: list[tuple[str, int]] = []

    def tool(self) -> Any:
        @function_tool(is_enabled=lambda _, __: not (self.once and self.calls))
        def look(place: Literal["Bern", "Oslo"], days: Literal[1, 2, 3]) -> str:
            """Look at the weather.

            Args:
                place: where
                days: how many
            """
            assert place in ("Bern", "Oslo")
            assert days in (1, 2, 3)
            self.calls.append((place, days))
            return f"{place}: {days * 5} degrees"

        return look


@check
async def an_answer_and_its_stream(url: str) -> None:
    """The answer is one of two words, so that it ends: the SDK raises where an answer was cut."""
    settings = SETTINGS.resolve(ModelSettings(extra_body={"guided_choice": ["yes", "no"]}))
    for model in models(url):
        agent = Agent(name="one", instructions="Be brief.", model=model, model_settings=settings)
        whole = await Runner.run(agent, "Is a list a sequence?")
        assert whole.final_output in ("yes", "no"), type(model)
        assert whole.context_wrapper.usage.output_tokens > 0
        streamed = Runner.run_streamed(agent, "Is a list a sequence?")
        deltas = [
            event.data.delta
            async for event in streamed.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        assert "".join(deltas) == streamed.final_output == whole.final_output, type(model)


@check
async def structured_output(url: str) -> None:
    for model in models(url):
        for output in (Place, AgentOutputSchema(Place, strict_json_schema=False)):
            agent = Agent(name="one", model=model, model_settings=SETTINGS, output_type=output)
            whole = await Runner.run(agent, "Name a place.")
            assert isinstance(whole.final_output, Place), type(model)
            streamed = Runner.run_streamed(agent, "Name a place.")
            assert [event async for event in streamed.stream_events()]
            assert streamed.final_output == whole.final_output, type(model)


@check
async def tools_are_called_and_the_run_goes_on_with_their_results(url: str) -> None:
    """After the first turn the SDK itself sets tool_choice back; an output type ends the second one."""
    settings = SETTINGS.resolve(ModelSettings(tool_choice="required", parallel_tool_calls=False))
    for model in models(url):
        looks = Looks()
        agent = Agent(
            name="one",
            model=model,
            model_settings=settings,
            tools=[looks.tool()],
            tool_use_behavior="stop_on_first_tool",
        )
        whole = await Runner.run(agent, "How warm is it?")
        assert len(looks.calls) == 1
        assert "degrees" in whole.final_output
        streamed = Runner.run_streamed(agent, "How warm is it?")
        names = [event.name async for event in streamed.stream_events() if event.type == "run_item_stream_event"]
        assert names[:2] == ["tool_called", "tool_output"], names
        assert looks.calls[1:] == looks.calls[:1]


@check
async def a_loop_of_calls_and_an_answer(url: str) -> None:
    """The second turn sees the first one's call and result, and must be of the output type."""
    settings = SETTINGS.resolve(ModelSettings(tool_choice="required", parallel_tool_calls=False))
    for model in models(url):
        looks = Looks()
        first = Agent(
            name="one",
            model=model,
            model_settings=settings,
            tools=[looks.tool()],
            tool_use_behavior="stop_on_first_tool",
        )
        called = await Runner.run(first, "How warm is it?")
        second = Agent(name="two", model=model, model_settings=SETTINGS, output_type=Place)
        answer = await Runner.run(second, [*called.to_input_list(), {"role": "user", "content": "So where?"}])
        assert isinstance(answer.final_output, Place), type(model)
        third = await Runner.run(second, [*answer.to_input_list(), {"role": "user", "content": "And then?"}])
        assert isinstance(third.final_output, Place), type(model)


@check
async def a_run_of_two_turns(url: str) -> None:
    """The tool is offered until it was called, so the second turn is the answer."""
    settings = SETTINGS.resolve(ModelSettings(tool_choice="look", parallel_tool_calls=False))
    for model in models(url):
        for streamed in (False, True):
            looks = Looks(once=True)
            agent = Agent(name="one", model=model, model_settings=settings, tools=[looks.tool()], output_type=Place)
            if streamed:
                result: Any = Runner.run_streamed(agent, "How warm is it?", max_turns=2)
                assert [event async for event in result.stream_events()]
            else:
                result = await Runner.run(agent, "How warm is it?", max_turns=2)
            assert len(looks.calls) == 1
            assert isinstance(result.final_output, Place), type(model)


@check
async def a_loop_is_bounded_by_its_turns(url: str) -> None:
    """The tools stay offered, and tool_choice is auto from the second turn on: every call that comes is valid."""
    settings = SETTINGS.resolve(ModelSettings(tool_choice="look", parallel_tool_calls=False))
    for model in models(url):
        looks = Looks()
        agent = Agent(name="one", model=model, model_settings=settings, tools=[looks.tool()], output_type=Place)
        try:
            result = await Runner.run(agent, "How warm is it?", max_turns=3)
        except MaxTurnsExceeded:
            assert len(looks.calls) == 3
        else:
            assert isinstance(result.final_output, Place), type(model)
            assert looks.calls


@check
async def a_hand_off_to_another_agent(url: str) -> None:
    for model in models(url):
        other = Agent(name="Other", model=model, model_settings=SETTINGS, output_type=Place)
        settings = SETTINGS.resolve(ModelSettings(tool_choice="required", parallel_tool_calls=False))
        agent = Agent(name="One", model=model, model_settings=settings, handoffs=[other])
        result = await Runner.run(agent, "Name a place.")
        assert result.last_agent is other
        assert isinstance(result.final_output, Place), type(model)


if __name__ == "__main__":
    main()
