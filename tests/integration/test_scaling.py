"""A running cluster grows and shrinks: no request is lost, none gets another token, and nothing is held at the end."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from alignedserve.cluster.local import LocalCluster
from alignedserve.config_sources import from_tree
from alignedserve.control.samples import value
from alignedserve.errors import ConfigError, ResourceError
from alignedserve.request import SamplingParams
from alignedserve.testing.models import make_model
from alignedserve.testing.reference import greedy, load_reference, random_prompts
from support.driver import Answer, Driver
from support.held import wait_nothing_held

pytestmark = pytest.mark.timeout(300)

VOCAB_SIZE = 400
STREAMS = 16
NEW_TOKENS = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
LENGTHS = (10, 56, 33, 170, 15, 120, 79, 41)


class Load:
    """`STREAMS` clients, each asking for the same answer again and again."""

    def __init__(self, driver: Driver, prompts: list[list[int]]) -> None:
        self.answers: list[list[Answer]] = [[] for _ in prompts]
        self._driver = driver
        self._stop = asyncio.Event()
        self._clients = [asyncio.create_task(self._ask(number, prompt)) for number, prompt in enumerate(prompts)]

    async def _ask(self, number: int, prompt: list[int]) -> None:
        while not self._stop.is_set():
            (answer,) = self._driver.submit(prompt, GREEDY)
            self.answers[number].append(answer)
            await answer.done.wait()

    async def until(self, role: str, instance_id: str, timeout_s: float = 60.0) -> None:
        """Returns once an answer that began after this call has been served by the instance."""
        seen = [len(answers) for answers in self.answers]
        deadline = time.monotonic() + timeout_s
        while True:
            new = [answer for answers, count in zip(self.answers, seen, strict=True) for answer in answers[count:]]
            if any(getattr(answer, f"{role}_id") == instance_id for answer in new):
                return
            assert time.monotonic() < deadline, f"{instance_id} serves nothing"
            await asyncio.sleep(0.05)

    async def end(self) -> None:
        self._stop.set()
        await asyncio.wait_for(asyncio.gather(*self._clients), 120.0)


async def wait_running(cluster: LocalCluster, decode_id: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not value((await cluster.status()).metrics, "alignedserve_decode_running", instance=decode_id):
        assert time.monotonic() < deadline, f"{decode_id} runs nothing"


@pytest.mark.parametrize("prefetch", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_streams_in_flight_do_not_notice_that_the_cluster_grows_and_shrinks(
    tmp_path: Path, prefetch: bool
) -> None:
    folder = make_model("llama", tmp_path / "m", seed=31, vocab_size=VOCAB_SIZE)
    prompts = random_prompts(LENGTHS, VOCAB_SIZE, seed=32)
    config = from_tree(
        {
            "model": {"path": str(folder)},
            "cluster": {"device": "cpu", "threads": 1, "prefetch": prefetch},
            "kv_pool": {"size_gib": 0.1, "block_size": 4},
            "supervisor": {"heartbeat_s": 0.2},
        }
    )
    async with LocalCluster(config) as cluster:
        await cluster.wait_ready()
        async with Driver(cluster.address("scheduler-0"), cluster.token) as driver:
            load = Load(driver, prompts * (STREAMS // len(prompts)))
            await load.until("decode", "decode-0")
            await cluster.scale(prefill=2, decode=2)
            await asyncio.gather(load.until("prefill", "prefill-1"), load.until("decode", "decode-1"))
            open_before = [answers[-1] for answers in load.answers if not answers[-1].done.is_set()]
            await wait_running(cluster, "decode-1")
            await cluster.scale(prefill=1, decode=1)
            async with asyncio.timeout(10.0):  # a removed role has left the view before its process has ended
                while sorted(cluster.pids) != ["decode-0", "kv_pool-0", "node_agent-0", "prefill-0", "scheduler-0"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            await load.until("decode", "decode-0")
            await load.end()
        await wait_nothing_held(cluster)

    assert len(open_before) > STREAMS // 2
    assert [answer.error for answers in load.answers for answer in answers if answer.error is not None] == []
    reference = load_reference(folder)
    expected = [greedy(reference, prompt, NEW_TOKENS) for prompt in prompts]
    for number, answers in enumerate(load.answers):
        assert all(answer.tokens == expected[number % len(prompts)] for answer in answers)


async def test_what_does_not_fit_is_refused_with_figures_and_a_restarted_supervisor_goes_on_with_what_there_is(
    tmp_path: Path,
) -> None:
    folder = make_model("llama", tmp_path / "m", seed=31, vocab_size=VOCAB_SIZE)
    config = from_tree(
        {
            "model": {"path": str(folder)},
            "cluster": {"device": "cpu", "threads": 1},
            "kv_pool": {"size_gib": 0.1},
            "supervisor": {"heartbeat_s": 0.2},
        }
    )
    async with LocalCluster(config) as cluster:
        await cluster.wait_ready()
        with pytest.raises(ResourceError, match=r"1022 more instances need [0-9.]+ GiB .* only [0-9.]+ GiB"):
            await cluster.scale(decode=1023)
        with pytest.raises(ConfigError, match="between 1 and 1024"):
            await cluster.scale(decode=1025)
        assert "decode-1" not in cluster.pids
        await cluster.scale(decode=2)
        pids = cluster.pids
        await cluster.restart_supervisor()
        await cluster.wait_ready()
        assert (cluster.pids, cluster.view().decode) == (pids, 2)
        await cluster.scale(decode=1)
        assert cluster.pids == {role_id: pid for role_id, pid in pids.items() if role_id != "decode-1"}
