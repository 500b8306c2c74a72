"""Real roles that hang under load: ended and replaced in time, no request and no block lost, no token wrong."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from alignedserve.cluster.local import LocalCluster
from alignedserve.config_sources import from_tree
from alignedserve.proc_stat import is_alive
from alignedserve.proto import supervisor_pb2 as sv
from support.faulty_roles import FOLDER
from support.gateway import http_to, joined_gateway
from support.held import wait_nothing_held

pytestmark = pytest.mark.asyncio(loop_scope="module")

BEGINNING = "Return the sum of all numbers of the list. " * 4
PROMPTS = [BEGINNING * (index % 2) + f"def number_{index}(" + "a, " * (3 * index) for index in range(6)]
NEW_TOKENS = 128
# Within 10 s on two quiet cores; this is for machines that do other things as well.
BOUND_S = 40.0


class Served:
    """A cluster and a gateway within this process."""

    def __init__(self, cluster: LocalCluster, http: httpx.AsyncClient, folder: Path) -> None:
        self.cluster = cluster
        self.http = http
        self.folder = folder
        self.undisturbed: list[list[int]] = []
        self.streams: list[list[int]] = []  # the tokens that have come of the answers asked for last

    async def read(self, prompt: str, tokens: list[int]) -> None:
        body = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "return_token_ids": True}
        async with self.http.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    tokens += json.loads(line[6:])["choices"][0]["token_ids"]
        assert len(tokens) == NEW_TOKENS

    async def answers(self) -> list[list[int]]:
        self.streams = streams = [[] for _ in PROMPTS]
        await asyncio.gather(*(self.read(prompt, tokens) for prompt, tokens in zip(PROMPTS, streams, strict=True)))
        return streams

    @property
    def tokens(self) -> int:
        return sum(map(len, self.streams))

    def under_way(self) -> bool:
        """Whether some tokens have come, and not all."""
        return 0 < self.tokens < len(PROMPTS) * NEW_TOKENS

    def beat(self, role_id: str) -> sv.Heartbeat:
        member = self.cluster.supervisor.core.roster.slots[role_id].member
        assert member is not None
        return member.beat


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not holds():  # noqa: ASYNC110  # there is no event for this
            await asyncio.sleep(0.01)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("orders")
    tree = {
        "cluster": {"device": "cpu", "threads": 1},
        "kv_pool": {"size_gib": 0.1},
        "supervisor": {"heartbeat_s": 0.2},
    }
    config = from_tree(tree)
    module = "support.faulty_roles"
    async with LocalCluster(config, environment={FOLDER: str(folder)}, module=module) as cluster:
        await cluster.wait_ready()
        async with joined_gateway(cluster.join_info()) as gateway, http_to(gateway, 120.0) as http:
            yield Served(cluster, http, folder)


@pytest.mark.parametrize(("role", "how"), [("decode", "stopped"), ("decode", "loop"), ("prefill", "loop")])
async def test_a_worker_that_hangs_is_replaced_and_every_answer_is_what_it_would_have_been(
    served: Served, role: str, how: str
) -> None:
    undisturbed = served.undisturbed = served.undisturbed or await served.answers()
    role_id = f"{role}-0"
    old = served.cluster.peer(role_id)
    order, slow = served.folder / f"hang-{role}", served.folder / "slow-decode"
    slow.touch()  # or a fast machine ends the streams before the fault
    if role == "prefill":  # it hangs in the first pass of the prompts that come now
        await until(lambda: not served.beat(role_id).busy)
        order.touch()
    running = asyncio.create_task(served.answers())
    if role == "prefill":
        await until(lambda: served.beat(role_id).busy and not served.beat(role_id).holds.startswith("0 tokens"))
    else:
        await until(served.under_way)
    begun = time.monotonic()
    if how == "stopped":
        served.cluster.kill(role_id, signal.SIGSTOP)
    else:
        order.touch()
    try:
        while is_alive(old.pid):
            assert time.monotonic() - begun < BOUND_S
            await served.cluster.supervisor.wait_changed(0.05)
        assert served.tokens == 0 if role == "prefill" else served.under_way()
    finally:
        slow.unlink()
        order.unlink(missing_ok=True)  # or its successor hangs, too, and the next test with it
    await served.cluster.wait_restarted(role_id, old.process.incarnation)
    assert time.monotonic() - begun < BOUND_S
    assert await running == undisturbed
    await wait_nothing_held(served.cluster)


async def test_a_worker_that_is_stopped_for_a_moment_goes_on(served: Served) -> None:
    undisturbed = served.undisturbed = served.undisturbed or await served.answers()
    old = served.cluster.peer("decode-0")
    slow = served.folder / "slow-decode"
    slow.touch()
    running = asyncio.create_task(served.answers())
    await until(served.under_way)
    served.cluster.kill("decode-0", signal.SIGSTOP)
    await asyncio.sleep(0.4)
    assert served.under_way()
    slow.unlink()
    served.cluster.kill("decode-0", signal.SIGCONT)
    assert await running == undisturbed
    assert served.cluster.peer("decode-0").process == old.process
    await wait_nothing_held(served.cluster)
