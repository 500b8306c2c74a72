"""An agent of pydantic-ai against scripted workers: what it asks of them, and what it makes of their answers.

Other clients run against a whole server in `tests/cluster/test_other_clients.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.messages import ToolReturnPart
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

from alignedserve.model import resolve_model
from alignedserve.request import FinishReason, RequestSpec
from alignedserve.text import Tokenizer
from support.fake_cluster import FakeCluster, playing
from support.gateway import RunningGateway

TOKENIZER = Tokenizer.from_folder(resolve_model("tiny"))
assert TOKENIZER is not None
END = 5
MODELS = (OpenAIChatModel, OpenAIResponsesModel)
KINDS = {"tool": ToolOutput, "native": NativeOutput, "prompted": PromptedOutput}
JSON = '{"name": "Bern", "people": 7}'


class Place(BaseModel):
    """A place."""

    name: Literal["Bern", "Oslo"]
    people: int = Field(ge=0, le=999)


def ids(text: str) -> list[int]:
    assert TOKENIZER is not None
    return TOKENIZER.encode(text)


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def saying(cluster: FakeCluster, *answers: str) -> None:
    """The workers' answers to one request after the other, token by token."""
    waiting: Iterator[str] = iter(answers)

    async def script(cluster: FakeCluster, spec: RequestSpec) -> None:
        steps = [[token] for token in ids(next(waiting))]
        await playing(*steps, [END], finish=FinishReason.STOP)(cluster, spec)

    cluster.script = script


@pytest.fixture(params=MODELS, ids=lambda kind: kind.__name__)
def model(request: pytest.FixtureRequest, gateway: RunningGateway) -> Model:
    provider = OpenAIProvider(base_url=f"{gateway.url}/v1", api_key="none")
    found: Model = request.param("tiny", provider=provider, settings=ModelSettings(temperature=0, max_tokens=100))
    return found


@pytest.mark.parametrize("kind", KINDS)
async def test_an_object_whole_and_streamed(model: Model, cluster: FakeCluster, kind: str) -> None:
    written = call("final_result", JSON) if kind == "tool" else JSON
    agent = Agent(model, output_type=KINDS[kind](Place), retries=0)
    saying(cluster, written, written)
    assert (await agent.run("Name a place.")).output == Place(name="Bern", people=7)
    async with agent.run_stream("Name a place.") as stream:
        parts = [part async for part in stream.stream_output(debounce_by=None)]
    assert parts[-1] == Place(name="Bern", people=7)
    for spec in cluster.submitted:  # each way asks for a grammar; only two of them say which object
        assert spec.sampling.grammar is not None
        assert ('"Oslo"' in json.dumps(spec.sampling.grammar.text).replace("\\", "")) is (kind != "prompted")


async def test_a_tool_is_called_and_its_result_is_in_the_next_prompt(model: Model, cluster: FakeCluster) -> None:
    agent = Agent(model, output_type=Place, retries=0)
    asked: list[str] = []

    @agent.tool_plain
    def look(place: Literal["Bern", "Oslo"]) -> str:
        asked.append(place)
        return "seven people"

    saying(cluster, call("look", '{"place": "Oslo"}'), call("final_result", JSON))
    found = await agent.run("How many?")
    assert (found.output, asked) == (Place(name="Bern", people=7), ["Oslo"])
    parts = [part for message in found.all_messages() for part in message.parts]
    assert "seven people" in [part.content for part in parts if isinstance(part, ToolReturnPart)]
    first, second = cluster.submitted
    assert TOKENIZER is not None
    prompts = [TOKENIZER.decode(list(spec.prompt_token_ids)) for spec in (first, second)]
    assert "seven people" not in prompts[0]
    assert "<tool_response>\nseven people\n</tool_response>" in prompts[1]
    assert call("look", '{"place": "Oslo"}') in prompts[1]


async def test_arguments_have_the_keys_that_the_tool_names_and_the_reply_has_the_tool_as_sent(
    gateway: RunningGateway, cluster: FakeCluster
) -> None:
    """Its schema says nothing of other keys; a model that may write them need not stop."""
    place = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    parameters = {"type": "object", "properties": {"place": place}, "required": ["place"]}
    tool = {"type": "function", "name": "look", "parameters": parameters}
    saying(cluster, call("look", '{"place": {"name": "Bern"}}'))
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client:
        answer = await client.responses.create(model="tiny", input="hi", tools=[tool], tool_choice="required")  # type: ignore[list-item]
    grammar = cluster.submitted[0].sampling.grammar
    assert grammar is not None
    (arguments,) = [line for line in json.loads(grammar.text)["lark"].splitlines() if "%json" in line]
    assert arguments.count('"additionalProperties": false') == 2
    assert answer.tools[0].to_dict()["parameters"] == parameters


async def test_text_and_its_stream(model: Model, cluster: FakeCluster) -> None:
    agent = Agent(model)
    saying(cluster, "Return the value.", "Return the value.")
    found = await agent.run("Hello.")
    assert (found.output, found.usage.output_tokens) == ("Return the value.", len(ids("Return the value.")) + 1)
    async with agent.run_stream("Hello.") as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    assert len(pieces) > 1
    assert "".join(pieces) == "Return the value."


async def test_a_refusal_is_the_servers_own(gateway: RunningGateway) -> None:
    provider = OpenAIProvider(base_url=f"{gateway.url}/v1", api_key="none")
    for kind in MODELS:
        with pytest.raises(ModelHTTPError) as caught:
            await Agent(kind("another", provider=provider)).run("Hello.")
        assert caught.value.status_code == 404
