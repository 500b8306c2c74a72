"""The client with real workers: calls and objects are certain, and the same when a gateway or a worker is killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import pytest_asyncio

from alignedserve.client import AsyncBatchClient, AsyncClient, Completion, Message, ToolResult
from alignedserve.cluster.local import LocalCluster
from alignedserve.config_sources import from_tree
from support.gateway_process import GatewayProcess

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300), pytest.mark.slow]

Word = Literal["alpha beta gamma delta", "epsilon zeta eta theta"]
TURNS = [Message("user", "What does len return?")]


@dataclass
class Report:
    first: Word
    second: Word
    sizes: tuple[int, int]


def look(first: Word, second: Word, third: Word = "alpha beta gamma delta") -> str:
    """Look at three words.

    Args:
        first: a word.
        second: another.
    """
    return f"{first}, {second}, {third}"


async def slowly(first: Word) -> str:
    """Look at one word."""
    await asyncio.sleep(0)
    return first


KINDS: list[dict[str, Any]] = [
    {"tools": [look], "tool_choice": "required", "parallel_tool_calls": False},
    {"response_format": Report},
    {"structured_outputs": {"regex": r"([a-z]{3,8}-){20}end"}},
]


@dataclass
class Running:
    cluster: LocalCluster
    gateways: tuple[GatewayProcess, GatewayProcess]

    @property
    def addresses(self) -> list[str]:
        return [gateway.grpc_address for gateway in self.gateways]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Running]:
    tree = {
        "cluster": {"device": "cpu", "threads": 1},
        "kv_pool": {"size_gib": 0.1},
        "supervisor": {"heartbeat_s": 0.1},
    }
    async with LocalCluster(from_tree(tree)) as cluster:
        await cluster.wait_ready()
        async with GatewayProcess(cluster, "gateway-0") as first, GatewayProcess(cluster, "gateway-1") as second:
            yield Running(cluster, (first, second))


def told(completion: Completion) -> Any:
    (choice,) = completion.choices
    return choice.text, choice.token_ids, choice.finish_reason, [(c.name, c.arguments) for c in choice.tool_calls]


async def read(client: AsyncClient, kind: dict[str, Any], middle: asyncio.Event | None = None) -> Completion:
    stream = client.chat_stream(TURNS, max_tokens=300, temperature=0, **kind)
    async for chunk in stream:
        if middle is not None and len(chunk.token_ids) and len(stream._chunks) > 8:
            middle.set()
    return await stream.completion()


async def test_functions_are_called_by_a_wild_model(running: Running) -> None:
    async with AsyncClient(running.addresses, timeout_s=120) as client:
        options: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
        events: list[Any] = []
        async with client.stream_tools(
            TURNS, tools=[look, slowly], on_error="tell", max_rounds=8, temperature=0, **options
        ) as stream:
            events += [event async for event in stream]
            run = await stream.run()
        results = [event for event in events if isinstance(event, ToolResult)]
        assert results
        assert run.results == tuple(results)
        assert all(result.error is None for result in results), "strict calls fit"
        (reply,) = await asyncio.gather(read(client, KINDS[1]))
        assert isinstance(reply.parsed, Report)


@pytest.mark.parametrize("victim", ["gateway", "decode-0"])
async def test_a_death_in_the_middle_changes_no_call_and_no_object(running: Running, victim: str) -> None:
    async with AsyncClient(running.addresses, timeout_s=120) as client:
        calm = [told(await read(client, kind)) for kind in KINDS]
    async with GatewayProcess(running.cluster, f"gateway-of-{victim}") as doomed:
        gateways = [doomed.grpc_address, *running.addresses]
        clients = [AsyncClient(gateways, timeout_s=120) for _ in KINDS]  # each begins with the first address
        middles = [asyncio.Event() for _ in KINDS]
        streams = [asyncio.create_task(read(*each)) for each in zip(clients, KINDS, middles, strict=True)]
        await asyncio.gather(*(middle.wait() for middle in middles))
        if victim == "gateway":
            doomed.kill()
        else:
            old = running.cluster.peer(victim).process.incarnation
            running.cluster.kill(victim)
            await running.cluster.wait_restarted(victim, old)
        found = await asyncio.gather(*streams)
        for client in clients:
            await client.close()
    assert [told(completion) for completion in found] == calm
    if victim == "gateway":
        assert any(completion.client_timings.attempts > 1 for completion in found)


async def test_an_offline_batch_of_conversations_with_tools(running: Running, tmp_path: Any) -> None:
    keys = {"folder": str(tmp_path / "batches"), "lease_s": 2.0}
    options: dict[str, Any] = {**KINDS[0], "max_tokens": 300, "temperature": 0}
    async with (
        GatewayProcess(running.cluster, "gateway-batches", keys) as gateway,
        AsyncBatchClient(gateway.url) as client,
    ):
        job = await client.wait(await client.create([TURNS] * 4, **options), timeout_s=120)
        results = [result async for result in client.results(job)]
    assert (job.status, len(results)) == ("completed", 4)
    calls = [call for result in results if result.completion for call in result.completion.tool_calls]
    assert [call.name for call in calls] == ["look"] * 4
    assert all(call.parsed_arguments.keys() >= {"first", "second"} for call in calls)
