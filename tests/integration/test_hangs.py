"""Real roles that hang under load: ended and replaced in time, no request and no block lost, no token wrong."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from alignedserve.cluster.local import LocalCluster
from alignedserve.config_sources import from_tree
from alignedserve.proc_stat import is_alive
from support.faulty_roles import FOLDER
from support.gateway import http_to, joined_gateway
from support.held import wait_nothing_held

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS = [f"def number_{index}(" + "a, " * (3 * index) for index in range(6)]
NEW_TOKENS = 128
# Within 10 s on two quiet cores; this is for machines that do other things as well.
BOUND_S = 40.0


class Served:
    """A cluster and a gateway within this process."""

    def __init__(self, cluster: LocalCluster, http: httpx.AsyncClient, folder: Path) -> None:
        self.cluster = cluster
        self.http = http
        self.folder = folder

    async def answer(self, prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        reply = await self.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] == NEW_TOKENS
        return str(reply.json()["choices"][0]["text"])

    async def answers(self) -> list[str]:
        return list(await asyncio.gather(*(self.answer(prompt) for prompt in PROMPTS)))

    async def until_it_decodes(self) -> None:
        """Until requests were running when the decode instance last said what it does."""
        async with asyncio.timeout(BOUND_S):
            while not self.decodes():
                await self.cluster.supervisor.wait_changed(0.05)

    def decodes(self) -> bool:
        member = self.cluster.supervisor.core.roster.slots["decode-0"].member
        return member is not None and bool(member.beat.holds) and not member.beat.holds.startswith("0 running")


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
    undisturbed = await served.answers()
    role_id = f"{role}-0"
    old = served.cluster.peer(role_id)
    order = served.folder / f"hang-{role}"
    running = asyncio.create_task(served.answers())
    if role == "decode":
        await served.until_it_decodes()
    begun = time.monotonic()
    if how == "stopped":
        served.cluster.kill(role_id, signal.SIGSTOP)
    else:
        order.touch()
    while is_alive(old.pid):
        assert time.monotonic() - begun < BOUND_S
        await served.cluster.supervisor.wait_changed(0.05)
    order.unlink(missing_ok=True)
    await served.cluster.wait_restarted(role_id, old.process.incarnation)
    assert time.monotonic() - begun < BOUND_S
    assert await running == undisturbed
    await wait_nothing_held(served.cluster)


async def test_a_worker_that_is_stopped_for_a_moment_goes_on(served: Served) -> None:
    undisturbed = await served.answers()
    old = served.cluster.peer("decode-0")
    running = asyncio.create_task(served.answers())
    await served.until_it_decodes()
    served.cluster.kill("decode-0", signal.SIGSTOP)
    await asyncio.sleep(0.4)
    assert not running.done()
    served.cluster.kill("decode-0", signal.SIGCONT)
    assert await running == undisturbed
    assert served.cluster.peer("decode-0").process == old.process
    await wait_nothing_held(served.cluster)
