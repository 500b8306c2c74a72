"""The page of all fields: it has what the models check and what real replies have, each with a meaning."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pydantic
import pytest
from pydantic_core import PydanticUndefined

from alignedserve.gateway.batches.requests import BatchRequest
from alignedserve.gateway.body.requests import ChatRequest, CompletionRequest
from alignedserve.gateway.body.token_requests import DetokenizeRequest, TokenizeRequest
from alignedserve.model import resolve_model
from alignedserve.request import FinishReason, TokenLogprobs
from alignedserve.text import Tokenizer
from support.fake_cluster import FakeCluster
from support.gateway import RunningGateway, running_gateway

TINY = resolve_model("tiny")
MODELS: dict[str, type[pydantic.BaseModel]] = {
    model.__name__: model
    for model in (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest, BatchRequest)
}
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"place": {"type": "string"}}}}}
ANSWER = '<think>\nHm.\n</think>\n\nWell.\n<tool_call>\n{"name": "look", "arguments": {"place": "Bern"}}\n</tool_call>'
ALL: dict[str, Any] = {
    "n": 2, "max_tokens": 90, "include_timings": True, "return_token_ids": True, "model": "tiny",
}  # fmt: skip


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that makes the page."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "tools/docs")
    return importlib.import_module("fields")


def test_every_field_has_a_meaning(pages: Any) -> None:
    found = [(name, field) for name in [*pages.requests(), *pages.replies()] for field in pages.fields_of(name)]
    assert [(name, field.path) for name, field in found if not field.meaning or not field.kind] == []
    assert len(found) > 400


@pytest.mark.parametrize("name", MODELS)
def test_a_model_s_fields_are_there_with_their_defaults_and_bounds(pages: Any, name: str) -> None:
    rows = {field.path: field for field in pages.fields_of(name)}
    for field, about in MODELS[name].model_fields.items():
        row = rows[about.alias or field]
        assert row.needed is about.is_required()
        if not about.is_required() and isinstance(about.default, bool | str | int) and about.default != "":
            assert row.default == json.dumps(about.default)
        assert about.default is PydanticUndefined or row.default != "required"
    text = pages.page()
    assert all(f"| `{path}` |" in text for path in rows)


def test_bounds_are_those_that_are_checked(pages: Any) -> None:
    rows = {field.path: field for field in pages.fields_of("ChatRequest")}
    assert rows["temperature"].bounds == "at least 0, at most 2"
    assert rows["top_p"].bounds == "above 0, at most 1"
    assert rows["n"].bounds == "at least 1, at most 16"
    assert rows["stop"].bounds.startswith("at least 1 characters, at most 1,024 characters; at most 16 entries")
    assert rows["messages[].tool_calls[].function.arguments"].kind == "text"
    assert rows["structured_outputs.regex"].kind == "text"


# ---- real replies


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """Of a model with tools and reasoning, whose answers have all that a reply can have."""
    folder = tmp_path / "thinks"
    shutil.copytree(TINY, folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{%- if false -%}<think>{%- endif -%}")
    tokenizer = Tokenizer.from_folder(TINY)
    assert tokenizer is not None
    tokens = [*tokenizer.encode(ANSWER, special_tokens=False), 5]
    scored = TokenLogprobs(-1.0, ((7, -0.5),), 2)

    async def script(cluster: FakeCluster, spec: Any) -> None:
        wanted = spec.sampling.logprobs is not None
        prompt = [scored] * (len(spec.prompt_token_ids) - 1) if spec.sampling.prompt_logprobs is not None else []
        for number, token in enumerate(tokens):
            finish = FinishReason.STOP if number == len(tokens) - 1 else None
            logprobs = [scored] if wanted else []
            cluster.emit(spec, [token], logprobs=logprobs, prompt_logprobs=prompt if number == 0 else [], finish=finish)

    async with FakeCluster(script) as cluster, running_gateway(
        cluster, model_path=folder, batches={"folder": str(tmp_path / "batches")}
    ) as gateway:  # fmt: skip
        yield gateway


def paths(value: Any, prefix: str = "") -> Iterator[str]:
    """The paths of all fields of a reply, as the page writes them."""
    if isinstance(value, list):
        for one in value:
            yield from paths(one, f"{prefix}[]")
    elif isinstance(value, dict):
        for name, one in value.items():
            path = f"{prefix}.{name}".lstrip(".")
            yield path
            yield from paths(one, path)


def unknown(pages: Any, component: str, reply: Any) -> set[str]:
    """Fields of a reply that the page lacks. It need not say what is within an object that it names without fields."""
    known = {field.path for field in pages.fields_of(component)}
    parents = {path.rpartition(".")[0].removesuffix("[]") for path in known}
    missing = set()
    for path in paths(reply):
        parent = path.rpartition(".")[0]
        while parent.endswith("[]"):
            parent = parent.removesuffix("[]")
        if path not in known and parent in parents:
            missing.add(path)
    return missing


async def test_what_real_replies_have_is_on_the_page(pages: Any, gateway: RunningGateway) -> None:
    chat = {**ALL, "messages": HI, "tools": [TOOL], "logprobs": True, "top_logprobs": 1}
    prompt = {**ALL, "prompt": "hi", "logprobs": 1}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as http:

        async def ask(path: str, body: Any = None) -> Any:
            answer = await (http.get(path) if body is None else http.post(path, json=body))
            return answer.json() if "event-stream" not in answer.headers["content-type"] else _events(answer.text)

        file = await http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a", b"{}\n")})
        batch = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        replies = [
            ("Completion", await ask("/v1/completions", {**prompt, "prompt_logprobs": 1})),
            ("CompletionChunk", await ask("/v1/completions", prompt | streamed)),
            ("ChatCompletion", await ask("/v1/chat/completions", {**chat, "prompt_logprobs": 1})),
            ("ChatCompletionChunk", await ask("/v1/chat/completions", chat | streamed)),
            ("Error", await ask("/v1/completions", {"prompt": "hi", "n": 99})),
            ("AnthropicMessage", await ask("/v1/messages", {"model": "tiny", "messages": HI, "max_tokens": 90})),
            ("MessagesError", await ask("/v1/messages", {"model": "tiny"})),
            ("TokenCount", await ask("/v1/messages/count_tokens", {"model": "tiny", "messages": HI})),
            ("InputTokens", await ask("/v1/responses/input_tokens", {"input": "hi"})),
            ("Response", await ask("/v1/responses", {"input": "hi"})),
            ("Tokenized", await ask("/tokenize", {"prompt": "hi", "return_token_strs": True})),
            ("Detokenized", await ask("/detokenize", {"tokens": [5]})),
            ("ModelList", await ask("/v1/models")),
            ("Model", await ask("/v1/models/tiny")),
            ("Health", await ask("/health")),
            ("Version", await ask("/version")),
            ("Load", await ask("/load")),
            ("Status", await ask("/alignedserve/status")),
            ("File", file.json()),
            ("Batch", await ask("/v1/batches", batch)),
            ("FileList", await ask("/v1/files")),
            ("BatchList", await ask("/v1/batches")),
        ]
    for component, reply in replies:
        assert reply
        for one in reply if isinstance(reply, list) else [reply]:
            assert unknown(pages, component, one) == set(), component
    whole = set(paths(replies[2][1]))
    assert {"choices[].message.reasoning_content", "choices[].message.tool_calls[].function.name"} <= whole
    chunks = set(paths(replies[3][1]))
    assert {"[].choices[].delta.reasoning_content", "[].usage.completion_tokens_details.reasoning_tokens"} <= chunks


def _events(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_a_field_that_the_page_lacks_is_found(pages: Any) -> None:
    reply = {"id": "a", "choices": [{"index": 0, "colour": "red"}], "mood": "good"}
    assert unknown(pages, "Completion", reply) == {"choices[].colour", "mood"}
