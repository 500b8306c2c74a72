"""Checks of structured output through a real server, among the rows of `openai_rows`."""

from __future__ import annotations

import json
import re
from typing import Any

from support.openai_rows import PROMPT, ROWS, World, row

__all__ = ["ROWS"]  # all of them

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}
LIMITED: dict[str, Any] = {"max_tokens": 60, "return_token_ids": True}


def valid(text: str) -> bool:
    found = json.loads(text)
    return set(found) == {"name", "size"} and len(found["name"]) <= 6 and 0 <= found["size"] <= 99


@row
def json_of_a_schema(world: World) -> None:
    text, _, finish = world.both(prompt=PROMPT, response_format=FORMAT, temperature=0, **LIMITED)
    assert (valid(text), finish) == (True, "stop")
    messages = [{"role": "user", "content": "Name a thing."}]
    answer = world.ask("chat/completions", messages=messages, response_format=FORMAT, temperature=1, seed=5, **LIMITED)
    assert valid(answer["choices"][0]["message"]["content"])


@row
def two_answers_of_a_schema_with_log_probabilities_and_penalties(world: World) -> None:
    options = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logprobs": 2, "n": 2, "temperature": 1, "seed": 3}
    body = {"prompt": PROMPT, "response_format": FORMAT, **options, **LIMITED}
    first, second = world.ask(**body)["choices"]
    assert valid(first["text"])
    assert valid(second["text"])
    assert first["text"] != second["text"]
    assert all(value <= 0 for value in first["logprobs"]["token_logprobs"])
    streamed = ["", ""]
    for event in world.stream(**body):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == [first["text"], second["text"]]


@row
def a_stop_string_and_min_tokens_under_a_grammar(world: World) -> None:
    letters = {"prompt": PROMPT, "structured_outputs": {"regex": "[ab]+"}, "temperature": 0, **LIMITED}
    text, tokens, finish = world.both(**letters, min_tokens=20)
    assert re.fullmatch("[ab]{20,}", text)
    assert len(tokens) >= 20
    assert finish in ("stop", "length")
    text, _, finish = world.both(prompt=PROMPT, response_format=FORMAT, temperature=0, stop='"size"', **LIMITED)
    assert text.startswith("{")
    assert (text.endswith(("size", '"')), finish) == (False, "stop")


@row
def a_grammar_that_cannot_be_followed_is_refused(world: World) -> None:
    wrong = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    answer = world.post("completions", {"prompt": PROMPT, "structured_outputs": {"json": wrong}})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_grammar", "structured_outputs.json")
    assert "uniqueItems at /properties/a" in error["message"]
