"""Answers under grammars and with excluded tokens through real processes: valid, and the same when a process dies while
they are written.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from alignedserve.cluster.local import LocalCluster
from alignedserve.config_sources import from_tree
from alignedserve.text import Tokenizer
from support.gateway import http_to, joined_gateway
from support.held import wait_nothing_held

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

TINY = Path(__file__).parents[2] / "src/alignedserve/models/tiny"
_FOUND = Tokenizer.from_folder(TINY)
assert _FOUND is not None
TOKENIZER: Tokenizer = _FOUND
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 20, "maxLength": 60},
        "n": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "n"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 2, "maxItems": 2}
FORMATS: tuple[dict[str, Any], ...] = (
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
    {"structured_outputs": {"regex": r"([a-z]{3,8}-){15}end"}},
    {"guided_choice": ["yes", "no"]},
    {},
    {"no_repeat_ngram_size": 2, "bad_words": ["the", "value"], "suppress_tokens": [9, 10], "min_length": 90,
     "begin_suppress_tokens": list(range(200, 260)), "skip_special_tokens": False},
)  # fmt: skip


@dataclass
class Served:
    cluster: LocalCluster
    http: httpx.AsyncClient

    async def write(self, number: int, begun: asyncio.Event | None = None, **keys: Any) -> tuple[str, str]:
        """The text and the finish reason of a streamed answer under one of FORMATS. `begun` is set in its middle."""
        body = {"prompt": f"Item {number}:", "max_tokens": 200, "temperature": 0, "stream": True}
        text, finish, pieces = "", "", 0
        sent = body | FORMATS[number % len(FORMATS)] | keys
        async with self.http.stream("POST", "/v1/completions", json=sent) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                assert "choices" in event, event
                (choice,) = event["choices"]
                text, finish, pieces = text + choice["text"], choice["finish_reason"] or finish, pieces + 1
                if begun is not None and pieces == 8:
                    begun.set()
        return text, finish


def check(number: int, text: str, finish: str) -> None:
    kind = number % len(FORMATS)
    if kind == 0:
        assert finish == "stop"
        value = json.loads(text)
        assert [sorted(item) for item in value] == [["n", "name"]] * 2
        assert all(isinstance(item["n"], int) and 20 <= len(item["name"]) <= 60 for item in value)
    elif kind == 1:
        assert re.fullmatch(r"([a-z]{3,8}-){15}end", text)
    elif kind == 2:
        assert text in ("yes", "no")
    elif kind == 4:
        ids = TOKENIZER.encode(text, special_tokens=False)
        assert len(ids) > 60
        assert not {"the", " the", "value", " value"} & {TOKENIZER.token_text(token) for token in ids}


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["llguidance", pytest.param("xgrammar", marks=pytest.mark.slow)]
)
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    config = from_tree(
        {
            "model": {"path": str(TINY)},
            "cluster": {"device": "cpu", "threads": 1},
            "engine": {"grammar": request.param},
            "kv_pool": {"size_gib": 0.1, "block_size": 4},
            "decode": {"cache_blocks": 300},
            "supervisor": {"heartbeat_s": 0.1},
        }
    )
    async with LocalCluster(config) as cluster:
        await cluster.wait_ready()
        async with joined_gateway(cluster.join_info()) as gateway, http_to(gateway, 120.0) as http:
            yield Served(cluster, http)


@pytest.mark.parametrize("temperature", [0, 1])
async def test_what_is_finished_is_valid(served: Served, temperature: int) -> None:
    answers = await asyncio.gather(*(served.write(n, temperature=temperature, seed=n) for n in range(12)))
    for number, answer in enumerate(answers):
        check(number, *answer)


@pytest.mark.parametrize(
    "role", ["decode-0", "scheduler-0", pytest.param("prefill-0", marks=pytest.mark.slow),
             pytest.param("kv_pool-0", marks=pytest.mark.slow)]
)  # fmt: skip
async def test_a_death_in_the_middle_changes_no_answer(served: Served, role: str) -> None:
    expected = await asyncio.gather(*(served.write(number) for number in range(8)))
    begun = asyncio.Event()
    asked = [asyncio.create_task(served.write(number, begun)) for number in range(8)]
    await begun.wait()
    old = served.cluster.peer(role).process.incarnation
    served.cluster.kill(role)
    await served.cluster.wait_restarted(role, old)
    answers = await asyncio.gather(*asked)
    assert answers == expected
    for number, answer in enumerate(answers):
        check(number, *answer)
    await wait_nothing_held(served.cluster)


async def test_a_grammar_that_cannot_be_followed_is_refused_and_harms_no_other_request(served: Served) -> None:
    good = asyncio.create_task(served.write(0))
    bad = {"uniqueItems": {"type": "array", "uniqueItems": True}, "const": {"const": -(2**63)}}
    for keyword, schema in bad.items():  # the second one ended llguidance's process
        answer = await served.http.post("/v1/completions", json={"prompt": "x", "guided_json": schema})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_grammar", "guided_json")
        assert keyword in error["message"]
    check(0, *await good)


# ---- calls of tools

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"places": {"type": "array", "items": ITEM, "minItems": 2, "maxItems": 2}},
            "required": ["places"],
            "additionalProperties": False,
        },
    },
}


async def call_of(served: Served, number: int, begun: asyncio.Event | None = None) -> list[tuple[str, str, str]]:
    """Id, name and arguments of the calls in a streamed answer that must be calls. `begun` is set in its middle."""
    messages = [{"role": "user", "content": f"Look at {number}."}]
    asked = {"tools": [LOOK], "tool_choice": "required", "parallel_tool_calls": number % 2 == 0}
    body = {"messages": messages, "max_tokens": 240, "temperature": 0, "stream": True, **asked}
    calls: dict[int, list[str]] = {}
    pieces, finish = 0, None
    async with served.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            (choice,) = json.loads(line[6:])["choices"]
            finish = choice["finish_reason"] or finish
            assert not choice["delta"].get("content")
            for call in choice["delta"].get("tool_calls", ()):
                name, call_id = call["function"].get("name", ""), call.get("id", "")
                known = calls.setdefault(call["index"], [call_id, name, ""])
                known[2] += call["function"]["arguments"]
                pieces += 1
            if begun is not None and pieces >= 8:
                begun.set()
    assert finish == ("tool_calls" if number % 2 else finish)
    return [(call_id, name, arguments) for call_id, name, arguments in calls.values()]


async def test_a_call_that_a_death_interrupts_is_the_same_and_valid(served: Served) -> None:
    expected = await asyncio.gather(*(call_of(served, number) for number in range(4)))
    begun = asyncio.Event()
    asked = [asyncio.create_task(call_of(served, number, begun)) for number in range(4)]
    await begun.wait()
    old = served.cluster.peer("decode-0").process.incarnation
    served.cluster.kill("decode-0")
    await served.cluster.wait_restarted("decode-0", old)
    answers = await asyncio.gather(*asked)
    for number, (answer, first) in enumerate(zip(answers, expected, strict=True)):
        assert [call[1:] for call in answer] == [call[1:] for call in first]
        whole = answer[: 1 if number % 2 else -1] or answer
        for call_id, name, arguments in whole[:1]:
            assert (name, call_id[:5]) == ("look", "call_")
            places = json.loads(arguments)["places"]
            assert [sorted(place) for place in places] == [["n", "name"]] * 2
    await wait_nothing_held(served.cluster)
