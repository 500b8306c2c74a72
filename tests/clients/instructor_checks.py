"""instructor: objects by each of its modes, as partial streams and lists too."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import openai
from checks import MODEL, check, main
from instructor import Mode
from instructor.core.exceptions import IncompleteOutputException
from pydantic import BaseModel, ConfigDict, Field, field_validator

ASKED: list[Any] = [{"role": "user", "content": "Name a place."}]
GIVEN: dict[str, Any] = {"model": MODEL, "messages": ASKED, "temperature": 0, "max_tokens": 160, "max_retries": 0}


class Place(BaseModel):
    """A place."""

    name: Literal["Bern", "Oslo", "Quito"]
    people: int = Field(ge=0, le=999)


class Anything(BaseModel):
    """Any object."""

    model_config = ConfigDict(extra="allow")


def client(url: str, mode: Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)


def later(url: str, mode: Mode) -> Any:
    return instructor.from_openai(openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)


# What the mode tells the server; in the others it knows nothing of the schema unless a user adds it.
TOLD: dict[Mode, dict[str, Any]] = {
    Mode.TOOLS: {},
    Mode.TOOLS_STRICT: {},
    Mode.JSON_SCHEMA: {},
    Mode.MD_JSON: {"extra_body": {"guided_json": Place.model_json_schema()}},
}


@check
async def an_object_by_each_mode(url: str) -> None:
    for mode, options in TOLD.items():
        place, raw = client(url, mode).chat.completions.create_with_completion(response_model=Place, **GIVEN, **options)
        assert isinstance(place, Place), mode
        assert raw.usage.completion_tokens > 1
        again = await later(url, mode).chat.completions.create(response_model=Place, **GIVEN, **options)
        assert again.model_dump() == place.model_dump(), mode


@check
def strict_tools(url: str) -> None:
    assert isinstance(client(url, Mode.TOOLS).create(response_model=Place, strict=True, **GIVEN), Place)


@check
def a_code_block_as_markdown_mode_asks_for_it(url: str) -> None:
    form = r'```json\n\{"name": ?"(Bern|Oslo)", ?"people": ?(0|[1-9][0-9]{0,2})\}\n```'
    options = {**GIVEN, "extra_body": {"structured_outputs": {"regex": form}}}
    assert isinstance(client(url, Mode.MD_JSON).create(response_model=Place, **options), Place)


@check
def json_mode(url: str) -> None:
    """Its own form tells the server only that an object is wanted. Only an answer that was cut may fail."""
    said: list[Any] = []
    asking = client(url, Mode.JSON)
    asking.on("completion:response", said.append)
    try:
        assert isinstance(asking.create(response_model=Anything, **{**GIVEN, "max_tokens": 400}), Anything)
    except IncompleteOutputException:
        assert said[0].choices[0].finish_reason == "length"
    (response,) = said
    assert response.choices[0].message.content.startswith("{")


@check
async def partial_objects_as_a_stream(url: str) -> None:
    """The last one is whole. It need not be the one that is not streamed: its type has another name in the prompt."""
    for mode, options in TOLD.items():
        asked = {name: value for name, value in GIVEN.items() if name != "max_retries"}
        parts = list(client(url, mode).create_partial(response_model=Place, **asked, **options))
        assert len(parts) > 1, mode
        assert isinstance(Place.model_validate(parts[-1].model_dump()), Place), mode
        stream = later(url, mode).create_partial(response_model=Place, **asked, **options)
        *_, last = [part async for part in stream]
        assert last.model_dump() == parts[-1].model_dump(), mode


@check
def a_list_of_objects(url: str) -> None:
    """How many the model writes is its own affair; those that are whole are valid."""
    found = []
    asked = {name: value for name, value in GIVEN.items() if name != "max_retries"}
    for place in client(url, Mode.TOOLS).create_iterable(response_model=Place, **asked):
        found.append(place)
        if len(found) == 3:
            break
    assert all(isinstance(place, Place) for place in found)


@check
def an_object_that_its_own_validator_refuses_is_asked_for_again(url: str) -> None:
    """The earlier call and its error go back as messages."""
    seen: list[str] = []

    class Checked(Place):
        @field_validator("name")
        @classmethod
        def second(cls, value: str) -> str:
            seen.append(value)
            if len(seen) == 1:
                raise ValueError("another one, please")
            return value

    for mode in (Mode.TOOLS, Mode.JSON_SCHEMA):
        seen.clear()
        assert isinstance(client(url, mode).create(response_model=Checked, **{**GIVEN, "max_retries": 2}), Checked)
        assert len(seen) == 2, mode


@check
def the_responses_api(url: str) -> None:
    asked = {"model": MODEL, "input": ASKED, "temperature": 0, "max_output_tokens": 160, "max_retries": 0}
    found = client(url, Mode.RESPONSES_TOOLS).responses.create(response_model=Place, **asked)
    assert isinstance(found, Place)


if __name__ == "__main__":
    main()
