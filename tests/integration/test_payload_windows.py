"""Processes that die while a prompt, or what is stored with KV, is read: every request ends with its tokens.

No prompt is sent with its submission here, and no prefill instance keeps what it has committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from alignedserve.cluster.local import LocalCluster
from alignedserve.config_sources import from_tree
from alignedserve.gateway.ledger import submitter
from alignedserve.gateway.spec_source import SpecSource
from support.gateway import http_to, joined_gateway
from support.held import wait_nothing_held
from support.slow_reads import FOLDER

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

WORDS = (3, 20)
LONGEST = 12
CONFIG: dict[str, Any] = {
    "cluster": {"device": "cpu", "threads": 1},
    "kv_pool": {"size_gib": 0.1},
    "supervisor": {"heartbeat_s": 0.1},
}
# The others in `make test-all`.
VICTIMS = [
    "prefill-0",
    "scheduler-0",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("kv_pool-0", "decode-0")),
]


class Gate:
    """Gateways of this process give no prompts while it is shut; `asked`: what was asked for since then."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: list[Any] = []
        self._open = asyncio.Event()
        self._open.set()
        read = SpecSource.ReadSpecs

        async def slow(source: SpecSource, request: Any, context: Any) -> AsyncIterator[Any]:
            self.asked.append(request)
            await self._open.wait()
            async for answer in read(source, request, context):
                yield answer

        patch.setattr(SpecSource, "ReadSpecs", slow)

    def shut(self) -> None:
        self.asked.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()


@dataclass
class Served:
    cluster: LocalCluster
    folder: Path
    gate: Gate
    http: httpx.AsyncClient
    expected: dict[int, list[list[int]]] = field(default_factory=dict)

    async def ask(self, words: int, http: httpx.AsyncClient | None = None, n: int = 2) -> list[list[int]]:
        """The tokens of greedy answers to one prompt."""
        body = {"prompt": "a " * words, "max_tokens": LONGEST, "ignore_eos": True, "n": n}
        asked = {**body, "temperature": 0, "return_token_ids": True}
        answer = await (http or self.http).post("/v1/completions", json=asked)
        assert answer.status_code == 200, answer.text
        return [choice["token_ids"] for choice in answer.json()["choices"]]

    async def all_right(self, asking: list[asyncio.Task[list[list[int]]]]) -> None:
        for words, answer in zip(WORDS, await asyncio.gather(*asking), strict=True):
            assert answer == self.expected[words]
        await wait_nothing_held(self.cluster)


@pytest_asyncio.fixture(params=[True, False], ids=["buffers", "pool"], scope="module", loop_scope="module")
async def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("reads")
    config = from_tree({**CONFIG, "cluster": {**CONFIG["cluster"], "prefetch": request.param}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(folder))
        patch.setattr(submitter, "_MOST_SENT_TOKENS", 0)
        gate = Gate(patch)
        async with LocalCluster(config, module="support.slow_reads") as cluster:
            await cluster.wait_ready()
            async with joined_gateway(cluster.join_info()) as gateway, http_to(gateway, 60.0) as http:
                served = Served(cluster, folder, gate, http)
                served.expected = {words: await served.ask(words) for words in WORDS}
                yield served


async def seen(found: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while True:
            if found():
                return
            await asyncio.sleep(0.01)


async def kill(served: Served, role_id: str) -> Callable[[], Awaitable[None]]:
    """Returns what waits for its successor."""
    incarnation = served.cluster.peer(role_id).process.incarnation
    served.cluster.kill(role_id)
    return lambda: served.cluster.wait_restarted(role_id, incarnation)


@pytest.mark.parametrize("victim", VICTIMS)
async def test_what_dies_while_a_prompt_is_asked_for_costs_no_request(served: Served, victim: str) -> None:
    served.gate.shut()
    asking = [asyncio.create_task(served.ask(words)) for words in WORDS]
    await seen(lambda: bool(served.gate.asked))
    restarted = await kill(served, victim)
    await restarted()
    served.gate.open()
    await served.all_right(asking)


async def test_a_gateway_that_dies_while_it_is_asked_for_prompts_leaves_nothing(served: Served) -> None:
    served.gate.shut()
    join = served.cluster.join_info()
    async with joined_gateway(join, gateway_id="gateway-1") as other, http_to(other, 60.0) as http:
        lost = asyncio.create_task(served.ask(WORDS[0], http))
        await seen(lambda: bool(served.gate.asked))
    with pytest.raises((AssertionError, httpx.HTTPError)):
        await lost
    served.gate.open()
    await served.all_right([asyncio.create_task(served.ask(words)) for words in WORDS])


async def test_a_request_that_is_cancelled_before_its_prompt_has_come_holds_nothing(served: Served) -> None:
    served.gate.shut()
    asking = [asyncio.create_task(served.ask(words)) for words in WORDS]
    await seen(lambda: bool(served.gate.asked))
    given_up = asyncio.create_task(served.ask(WORDS[0], n=1))
    await asyncio.sleep(0.2)
    given_up.cancel()
    await asyncio.sleep(0.2)
    served.gate.open()
    await served.all_right(asking)


@pytest.mark.parametrize("victim", VICTIMS)
async def test_what_dies_while_the_pool_is_asked_for_a_candidate_costs_no_request(served: Served, victim: str) -> None:
    wait = served.folder / "wait"
    wait.touch()
    asking = [asyncio.create_task(served.ask(words)) for words in WORDS]
    await seen(lambda: any(served.folder.glob("read-*")))
    restarted = await kill(served, victim)
    await restarted()
    wait.unlink()
    await served.all_right(asking)
    for read in served.folder.glob("read-*"):
        read.unlink()
