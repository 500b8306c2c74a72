"""Responses that are stored: conversations that go on by id, owners, limits, and lines of batches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from alignedserve.gateway.batches import service as service_module
from alignedserve.gateway.batches.database import StoreError
from alignedserve.model import resolve_model
from alignedserve.request import FinishReason, RequestSpec
from alignedserve.text import Tokenizer
from support.fake_cluster import FakeCluster, playing
from support.gateway import RunningGateway, running_gateway

TOKENIZER = Tokenizer.from_folder(resolve_model("tiny"))
assert TOKENIZER is not None
ASKED: dict[str, Any] = {"model": "tiny", "input": "Return the"}


def ids(text: str) -> list[int]:
    assert TOKENIZER is not None
    return TOKENIZER.encode(text)


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with FakeCluster(playing(ids(" value"), finish=FinishReason.STOP)) as cluster:
        yield cluster


@pytest.fixture
async def gateway(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RunningGateway]:
    monkeypatch.setattr(service_module, "POLL_S", 0.05)
    async with running_gateway(cluster, batches={"folder": str(tmp_path / "store")}) as gateway:
        yield gateway
        store = gateway.server.batches.responses
        assert store is not None
        await gateway.server.batches.call(store.check_integrity)


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=10.0) as client:
        yield client


async def test_items_of_stored_responses_are_named_by_id(client: openai.AsyncOpenAI, cluster: FakeCluster) -> None:
    first = await client.responses.create(**ASKED)
    user = {"role": "user", "content": "Return the"}
    named: Any = [user, {"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "More."}]
    second = await client.responses.create(model="tiny", input=named)
    spelled: Any = [user, {"role": "assistant", "content": " value"}, {"role": "user", "content": "More."}]
    await client.responses.create(model="tiny", input=spelled, store=False)
    assert cluster.submitted[1].prompt_token_ids == cluster.submitted[2].prompt_token_ids
    items = [item async for item in client.responses.input_items.list(second.id, order="asc")]
    assert items[1].to_dict()["content"][0]["text"] == " value"  # type: ignore[index]
    for unknown in ("msg_none", "", f"{first.output[0].id}0", "_", first.id):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="tiny", input=[{"type": "item_reference", "id": unknown}])
        assert (caught.value.param, caught.value.code) == ("input", "item_not_found")


async def test_a_conversation_goes_on_by_id(client: openai.AsyncOpenAI, cluster: FakeCluster) -> None:
    first = await client.responses.create(**ASKED, instructions="Be short.")
    assert first.to_dict()["store"] is True
    second = await client.responses.create(model="tiny", input="More.", previous_response_id=first.id)
    third = await client.responses.create(
        model="tiny", input=[{"role": "user", "content": "Last."}], previous_response_id=second.id
    )
    assert third.previous_response_id == second.id
    earlier = [{"role": "user", "content": "Return the"}, {"role": "assistant", "content": " value"}]
    whole: Any = [*earlier, {"role": "user", "content": "More."}, earlier[1], {"role": "user", "content": "Last."}]
    await client.responses.create(model="tiny", input=whole, store=False)
    assert cluster.submitted[2].prompt_token_ids == cluster.submitted[3].prompt_token_ids

    assert (await client.responses.retrieve(third.id)).to_dict() == third.to_dict()
    items = [item async for item in client.responses.input_items.list(third.id, order="asc", limit=2)]
    texts = [item.to_dict()["content"][0]["text"] for item in items]  # type: ignore[index]
    assert texts == ["Return the", " value", "More.", " value", "Last."]
    newest = await client.responses.input_items.list(third.id, limit=1)
    assert newest.data[0].id == items[-1].id
    assert newest.has_more
    with pytest.raises(openai.NotFoundError):
        await client.responses.input_items.list(third.id, after="msg_none")

    await client.responses.delete(first.id)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match="no response"):
            await ask(first.id)
    await client.responses.create(model="tiny", input="And?", previous_response_id=second.id)  # it has all it needs


async def test_a_streamed_response_is_stored_when_its_client_has_its_end(
    client: openai.AsyncOpenAI, cluster: FakeCluster
) -> None:
    events = [event async for event in await client.responses.create(**ASKED, stream=True)]
    last = events[-1]
    assert last.type == "response.completed"
    assert (await client.responses.retrieve(last.response.id)).to_dict() == last.response.to_dict()


async def test_a_call_and_its_output_meet_over_two_responses(client: openai.AsyncOpenAI, cluster: FakeCluster) -> None:
    tool: Any = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": False}
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    cluster.script = playing(ids(call), finish=FinishReason.STOP)
    first = await client.responses.create(**ASKED, tools=[tool])
    (asked,) = first.output
    assert asked.type == "function_call"
    output: Any = {"type": "function_call_output", "call_id": asked.call_id, "output": "7"}
    await client.responses.create(model="tiny", input=[output], previous_response_id=first.id, tools=[tool])
    whole: Any = [{"role": "user", "content": "Return the"}, asked.to_dict(), output]
    await client.responses.create(model="tiny", input=whole, tools=[tool], store=False)
    assert cluster.submitted[1].prompt_token_ids == cluster.submitted[2].prompt_token_ids


async def test_what_is_not_stored_cannot_go_on(client: openai.AsyncOpenAI) -> None:
    unstored = await client.responses.create(**ASKED, store=False)
    assert unstored.to_dict()["store"] is False
    for previous in (unstored.id, "resp_none"):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**ASKED, previous_response_id=previous)
        assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(unstored.id)


async def test_a_store_that_fails_costs_no_answer(
    client: openai.AsyncOpenAI, gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = gateway.server.batches.responses

    def full(*given: Any) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(type(store), "put", full)
    answer = await client.responses.create(**ASKED)
    assert (answer.output_text, answer.to_dict()["store"]) == (" value", False)


async def test_a_store_that_was_closed_costs_no_answer(cluster: FakeCluster, tmp_path: Path) -> None:
    async with running_gateway(cluster, batches={"folder": str(tmp_path / "store")}) as gateway:
        service = gateway.server.batches

        async def closing(cluster: FakeCluster, spec: RequestSpec) -> None:
            await service.close()
            await playing(ids(" value"), finish=FinishReason.STOP)(cluster, spec)

        cluster.script = closing
        async with httpx.AsyncClient(base_url=gateway.url) as http:
            answer = (await http.post("/v1/responses", json=ASKED)).json()
    assert (answer["status"], answer["store"]) == ("completed", False)


async def test_without_a_folder_nothing_is_stored_and_nothing_fails(cluster: FakeCluster) -> None:
    async with running_gateway(cluster) as gateway, httpx.AsyncClient(base_url=gateway.url) as http:
        answer = (await http.post("/v1/responses", json=ASKED)).json()
        assert (answer["status"], answer["store"]) == ("completed", False)
        for fields in ({"store": True}, {"previous_response_id": "resp_1"}):
            error = (await http.post("/v1/responses", json={**ASKED, **fields})).json()["error"]
            assert ([error["param"]], error["code"]) == (list(fields), "unsupported_parameter")
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
            refused = await http.request(method, f"/v1/responses/resp_1{path}")
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "batches_not_configured")


async def test_responses_belong_to_their_key(cluster: FakeCluster, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text("sk-alice\nsk-bob\n")
    async with running_gateway(
        cluster, batches={"folder": str(tmp_path / "store")}, api_key_file=str(keys)
    ) as gateway, httpx.AsyncClient(base_url=gateway.url) as http:  # fmt: skip
        alice, bob = ({"x-api-key": f"sk-{name}"} for name in ("alice", "bob"))
        answer = (await http.post("/v1/responses", json=ASKED, headers=alice)).json()
        path = f"/v1/responses/{answer['id']}"
        for method, where in (("GET", path), ("DELETE", path), ("GET", f"{path}/input_items")):
            assert (await http.request(method, where, headers=bob)).status_code == 404
        body = {**ASKED, "previous_response_id": answer["id"]}
        assert (await http.post("/v1/responses", json=body, headers=bob)).status_code == 400
        assert (await http.get(path, headers=alice)).json() == answer
        assert (await http.get(f"{path}?stream=true", headers=alice)).json()["error"]["param"] == "stream"
        deleted = await http.delete(path, headers=alice)
        assert deleted.json() == {"id": answer["id"], "object": "response", "deleted": True}


async def test_lines_of_responses_are_answered_and_not_stored(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(**ASKED)
    bodies = [{"input": "More.", "previous_response_id": first.id}, {"input": "a"}, {"input": "a", "store": True}]
    rows = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/responses", "body": body}
        for number, body in enumerate(bodies)
    ]
    content = "\n".join(map(json.dumps, rows)).encode()
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/responses", completion_window="24h")
    async with asyncio.timeout(20.0):
        while batch.status != "completed":
            await asyncio.sleep(0.02)
            batch = await client.batches.retrieve(batch.id)
    found = {}
    for file_id in (batch.output_file_id, batch.error_file_id):
        assert file_id is not None
        for row in map(json.loads, (await client.files.content(file_id)).text.splitlines()):
            found[row["custom_id"]] = row["response"]["body"]
    assert [found[number]["object"] for number in "01"] == ["response"] * 2
    assert (found["0"]["store"], found["0"]["previous_response_id"]) == (False, first.id)
    assert found["2"]["error"]["param"] == "store"
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(found["1"]["id"])
