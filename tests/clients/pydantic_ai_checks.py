"""pydantic-ai: structured output by tool, native and prompted, function tools, streams, both of OpenAI's APIs."""

from __future__ import annotations

from typing import Literal

from checks import MODEL, check, main, raises
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import (
    Agent,
    ModelHTTPError,
    NativeOutput,
    PromptedOutput,
    RunContext,
    Tool,
    ToolOutput,
    UnexpectedModelBehavior,
    capture_run_messages,
)
from pydantic_ai.capabilities import PrepareOutputTools
from pydantic_ai.exceptions import IncompleteToolCall
from pydantic_ai.messages import ModelResponse, ToolCallPart, ToolReturnPart
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.providers.vllm import VLLMProvider
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition

SETTINGS = ModelSettings(temperature=0, max_tokens=200)


class Place(BaseModel):
    """A place."""

    name: Literal["Bern", "Oslo", "Quito"]
    people: int = Field(ge=0, le=999)


class Anything(BaseModel):
    """Any object."""

    model_config = ConfigDict(extra="allow")


def models(url: str) -> list[Model]:
    base = {"base_url": f"{url}/v1", "api_key": "none"}
    return [
        OpenAIChatModel(MODEL, provider=OpenAIProvider(**base)),
        OpenAIChatModel(MODEL, provider=VLLMProvider(**base)),
        OpenAIResponsesModel(MODEL, provider=OpenAIProvider(**base)),
    ]


@check
async def text_and_its_stream(url: str) -> None:
    for model in models(url):
        agent = Agent(model, model_settings=ModelSettings(temperature=0, max_tokens=24), instructions="Be brief.")
        whole = await agent.run("Name a place.")
        assert whole.output
        assert whole.usage.output_tokens <= 24
        async with agent.run_stream("Name a place.") as streamed:
            pieces = [piece async for piece in streamed.stream_text(delta=True)]
        assert "".join(pieces) == whole.output, model
        further = await agent.run("Another.", message_history=whole.all_messages())
        assert further.output


@check
async def structured_output_by_tool_and_native(url: str) -> None:
    for model in models(url):
        for strict in (None, True, False):
            for kind in (ToolOutput(Place, strict=strict), NativeOutput(Place, strict=strict)):
                agent = Agent(model, output_type=kind, model_settings=SETTINGS, retries=0)
                found = await agent.run("Name a place.")
                assert isinstance(found.output, Place), (model, kind)
                async with agent.run_stream("Name a place.") as streamed:
                    parts = [part async for part in streamed.stream_output(debounce_by=None)]
                assert parts[-1] == found.output, (model, kind)


@check
async def one_of_several_types(url: str) -> None:
    class Person(BaseModel):
        name: Literal["Ada", "Bob"]

    for model in models(url):
        for kind in ([Place, Person], NativeOutput([Place, Person])):
            agent = Agent(model, output_type=kind, model_settings=SETTINGS, retries=0)
            found = await agent.run("Name a place or a person.")
            assert isinstance(found.output, Place | Person), (model, kind)


@check
async def structured_output_that_is_prompted(url: str) -> None:
    """The server is told that an object is wanted, and not which. Only an answer that was cut may fail."""
    settings: ModelSettings = {**SETTINGS, "max_tokens": 600}
    for model in models(url):
        agent = Agent(model, output_type=PromptedOutput(Anything), model_settings=settings, retries=0)
        with capture_run_messages() as messages:
            try:
                assert isinstance((await agent.run("Name a place.")).output, Anything), model
            except (IncompleteToolCall, UnexpectedModelBehavior):
                assert isinstance(messages[-1], ModelResponse)
                assert messages[-1].finish_reason == "length", model


class OneLook:
    """A tool that is offered in the first turn alone, and the output in the later ones: the loop has two turns."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def look(self, place: Literal["Bern", "Oslo"], days: Literal[1, 2, 3]) -> str:
        """Look at the weather."""
        assert place in ("Bern", "Oslo")
        assert days in (1, 2, 3)
        self.calls.append((place, days))
        return f"{place}: {days * 5} degrees"

    @staticmethod
    async def first(context: RunContext[None], definition: ToolDefinition) -> ToolDefinition | None:
        return definition if context.run_step == 1 else None

    @staticmethod
    async def later(context: RunContext[None], definitions: list[ToolDefinition]) -> list[ToolDefinition]:
        return definitions if context.run_step > 1 else []


@check
async def a_tool_is_called_and_its_result_leads_to_the_output(url: str) -> None:
    settings: ModelSettings = {**SETTINGS, "parallel_tool_calls": False}
    for model in models(url):
        looks = OneLook()
        tool = Tool(looks.look, prepare=looks.first, takes_ctx=False)
        outputs = PrepareOutputTools(looks.later)
        agent = Agent(model, output_type=ToolOutput(Place), model_settings=settings, tools=[tool], retries=0,
                      capabilities=[outputs])  # fmt: skip
        found = await agent.run("How warm is it?")
        assert isinstance(found.output, Place), model
        assert len(looks.calls) == 1
        parts = [part for message in found.all_messages() for part in message.parts]
        called = [part.tool_name for part in parts if isinstance(part, ToolCallPart)]
        assert called[0] == "look"
        assert called[1].startswith("final_result")
        assert any(isinstance(part, ToolReturnPart) and part.tool_name == "look" for part in parts)


@check
async def errors_name_the_status(url: str) -> None:
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        with raises(ModelHTTPError) as raised:
            await Agent(kind("another", provider=provider)).run("Hello.")
        assert raised.error.status_code == 404


if __name__ == "__main__":
    main()
