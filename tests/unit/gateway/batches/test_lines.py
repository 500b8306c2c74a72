"""One line of a batch: what its endpoint returns or raises, and how often it is tried."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest

from alignedserve.gateway.batches import lines as lines_module
from alignedserve.gateway.batches.batches import LineAnswer
from alignedserve.gateway.batches.gate import Gate
from alignedserve.gateway.batches.jsonl import Line
from alignedserve.gateway.batches.lines import MOST_TRIES, LineAnswerer
from support.fake_cluster import FakeCluster, counting_script, silent_script
from support.gateway import RunningGateway, running_gateway

TEXT = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}'


async def answer(text: bytes, endpoint: Any) -> tuple[LineAnswer, Any]:
    gate: Gate = None  # type: ignore[assignment]  # nothing is refused
    async with asyncio.timeout(5.0):
        found = await LineAnswerer({"path": endpoint}, gate).answer("path", Line(0, text))
    return found, orjson.loads(found.row)


async def test_an_answer_that_cannot_be_written_is_an_error_of_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an answer the whole batch would be begun again and again."""
    monkeypatch.setattr(lines_module, "FIRST_PAUSE_S", 0.001)
    calls = 0

    async def endpoint(body: Any, priority: int) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        return {"id": "x", "no JSON": object()}

    found, row = await answer(TEXT, endpoint)
    assert found.failed
    assert (row["response"]["status_code"], calls) == (500, MOST_TRIES)


async def test_fields_that_the_server_does_not_know_are_named() -> None:
    async def endpoint(body: Any, priority: int) -> dict[str, Any]:
        return {"id": "x", **body}

    _, row = await answer(TEXT.replace(b"{}", b'{"ignored_fields": ["max_token"]}'), endpoint)
    assert (row["response"]["ignored_fields"], row["response"]["body"]) == (["max_token"], {"id": "x"})
    _, row = await answer(TEXT, endpoint)
    assert "ignored_fields" not in row["response"]


async def test_a_line_of_any_size_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "_LARGE_BYTES_S", 1 << 40)
    monkeypatch.setattr(lines_module, "len", lambda text: 300 << 20, raising=False)  # gateway.max_body_mib may be 1024

    async def endpoint(body: Any, priority: int) -> dict[str, Any]:
        return {"id": "x"}

    found, row = await answer(TEXT, endpoint)
    assert not found.failed
    assert row["response"]["request_id"] == "x"


async def test_a_limit_that_is_lowered_cuts_no_line_that_was_valid(tmp_path: Path) -> None:
    keys = {"folder": str(tmp_path / "store"), "lease_s": 0.5}
    body = {"prompt": [5, 6], "max_tokens": 2, "user": "x" * 100_000, "max_token": 5}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    async with FakeCluster() as cluster:
        cluster.script = silent_script
        async with running_gateway(cluster, batches=keys) as first, client_of(first) as client:
            file = await client.files.create(file=("in", orjson.dumps(row)), purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            await until_status(client, batch.id, "in_progress")
        cluster.script = counting_script
        async with (
            running_gateway(cluster, gateway_id="gateway-1", batches=keys, max_body_mib=0.01) as second,
            client_of(second) as client,
        ):
            ended = await until_status(client, batch.id, "completed")
            assert ended.output_file_id is not None
            found = orjson.loads((await client.files.content(ended.output_file_id)).content)
    assert ended.request_counts.model_dump() == {"total": 1, "completed": 1, "failed": 0}
    assert found["response"]["ignored_fields"] == ["user", "max_token"]


def client_of(gateway: RunningGateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)


async def until_status(client: openai.AsyncOpenAI, batch_id: str, status: str) -> Any:
    async with asyncio.timeout(10.0):
        while (batch := await client.batches.retrieve(batch_id)).status != status:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return batch
