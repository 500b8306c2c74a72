"""Instances whose stages are on several nodes of this machine: the same tokens, and no node's ranks are lost alone."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from alignedserve.cluster.launch import rank_hosts
from alignedserve.cluster.local import LocalCluster
from alignedserve.cluster.supervisor.plan import Node
from alignedserve.config import Config
from alignedserve.config_sources import from_tree
from alignedserve.control.runtime import RoleSettings
from alignedserve.errors import AlignedServeError
from alignedserve.ranks.degrees import Degrees
from alignedserve.request import SamplingParams
from alignedserve.testing.models import make_model
from alignedserve.testing.reference import greedy, load_reference, random_prompts
from support.driver import Driver
from support.held import wait_nothing_held
from support.pace import slowness
from support.started import ranks_of, wait_ended

pytestmark = pytest.mark.timeout(300)

VOCAB_SIZE = 203  # which no number of ranks here divides
NEW_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
LENGTHS = (24, 9, 60, 31, 12, 90)
NODES = (Node("node-0", "127.0.0.1"), Node("node-1", "127.0.0.2"))
ONE, STAGES, BOTH = Degrees(), Degrees(1, 2), Degrees(2, 2)
TOGETHER = {"prefill-0": "node-0", "decode-0": "node-0"}
APART = {"prefill-0": "node-0", "decode-0": "node-1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("model"), seed=26, vocab_size=VOCAB_SIZE)


def config(folder: Path, prefill: Degrees, decode: Degrees, channel: str = "auto", **pool: object) -> Config:
    tree = {
        "model": {"path": str(folder)},
        "cluster": {"device": "cpu", "threads": 2, "channel": channel},
        "kv_pool": {"size_gib": 0.1, "block_size": 4, "verify": True, **pool},
        "prefill": {
            "tensor_parallel": prefill.tensor,
            "pipeline_parallel": prefill.stages,
            "nodes": min(2, prefill.stages),
            "token_budget": 32,
        },
        "decode": {
            "tensor_parallel": decode.tensor,
            "pipeline_parallel": decode.stages,
            "nodes": min(2, decode.stages),
            "cache_blocks": 80,
        },
        "supervisor": {"heartbeat_s": 0.2},
    }
    return from_tree(tree)


def id_of(value: object) -> str:
    if isinstance(value, Degrees):
        return f"{value.tensor}x{value.stages}"
    if isinstance(value, str):
        return value
    return "apart" if value == APART else "together"


@pytest.mark.parametrize(
    ("prefill", "decode", "placed", "channel"),
    [
        (ONE, STAGES, TOGETHER, "auto"),
        pytest.param(STAGES, STAGES, APART, "auto", marks=pytest.mark.slow),
        pytest.param(STAGES, STAGES, APART, "nixl", marks=pytest.mark.slow),
        pytest.param(STAGES, ONE, TOGETHER, "auto", marks=pytest.mark.slow),
        pytest.param(BOTH, BOTH, TOGETHER, "auto", marks=pytest.mark.slow),
        pytest.param(Degrees(2), BOTH, APART, "auto", marks=pytest.mark.slow),
    ],
    ids=id_of,
)
async def test_stages_on_two_nodes_give_the_same_tokens(
    folder: Path, prefill: Degrees, decode: Degrees, placed: dict[str, str], channel: str
) -> None:
    """Every answer is that of `transformers`, twice, and no process is left in the end."""
    prompts, reference = random_prompts(LENGTHS, VOCAB_SIZE, seed=27), load_reference(folder)
    async with LocalCluster(config(folder, prefill, decode, channel), nodes=NODES, placed=placed) as cluster:
        await cluster.wait_ready()
        hosts = cluster.launcher.rank_host_pids
        assert len(hosts) == (prefill.stages > 1) + (decode.stages > 1)
        theirs = [rank for pid in hosts.values() for rank in ranks_of(pid)]
        assert len(theirs) == sum(degrees.ranks // 2 for degrees in (prefill, decode) if degrees.stages > 1)
        async with Driver(cluster.address("scheduler-0"), cluster.token) as driver:
            for _ in range(2):  # prompts of the second round are in the prefix cache
                for prompt, answer in zip(prompts, await driver.generate(prompts, GREEDY), strict=True):
                    assert answer.error is None
                    assert answer.tokens == greedy(reference, prompt, NEW_TOKENS, answer.tokens)
            await wait_nothing_held(cluster)
        status = await cluster.status()
        told = " ".join(peer.holds for peer in status.peers)
        assert all(re.search(rf"pid {pid} on [\w-]+: layers? [\d-]+, [\d.]+ MiB", told) for pid in theirs), told
        waited = re.findall(r"alignedserve_rank_waited_seconds_total\{.*\} (.+)", status.metrics)
        assert len(waited) == sum(degrees.ranks for degrees in (prefill, decode) if degrees.ranks > 1)
        assert all(float(seconds) > 0.0 for seconds in waited)
        remote = "gloo" if channel == "auto" else channel
        moved = rf'alignedserve_transfer_bytes_total{{[^}}]*channel="[^"]*{remote}[^"]*"[^}}]*}} [1-9]'
        assert re.search(moved, status.metrics)
    await wait_ended([*hosts.values(), *theirs])


def rank_elsewhere(cluster: LocalCluster, role_id: str) -> int:
    (rank,) = ranks_of(cluster.launcher.rank_host_pids[f"{role_id}.1"])
    return rank


def host_elsewhere(cluster: LocalCluster, role_id: str) -> int:
    return cluster.launcher.rank_host_pids[f"{role_id}.1"]


def first_rank(cluster: LocalCluster, role_id: str) -> int:
    return cluster.pids[role_id]


@pytest.mark.parametrize(
    ("role_id", "victim", "number"),
    [
        ("decode-0", host_elsewhere, signal.SIGKILL),
        pytest.param("decode-0", rank_elsewhere, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("decode-0", rank_elsewhere, signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param("decode-0", host_elsewhere, signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param("decode-0", first_rank, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("decode-0", first_rank, signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param("prefill-0", rank_elsewhere, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("prefill-0", host_elsewhere, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
async def test_what_is_lost_on_one_node_is_the_instances_and_costs_no_token(
    folder: Path, role_id: str, victim: Callable[[LocalCluster, str], int], number: int
) -> None:
    prompts, reference = random_prompts(LENGTHS, VOCAB_SIZE, seed=28), load_reference(folder)
    async with LocalCluster(config(folder, STAGES, STAGES), nodes=NODES, placed=TOGETHER) as cluster:
        await cluster.wait_ready()
        async with Driver(cluster.address("scheduler-0"), cluster.token, resubmit=True) as driver:
            incarnation = cluster.peer(role_id).process.incarnation
            theirs = [cluster.pids[role_id], host_elsewhere(cluster, role_id), rank_elsewhere(cluster, role_id)]
            answers = [driver.submit(prompt, GREEDY)[0] for prompt in prompts]
            async with asyncio.timeout(60.0):
                while not any(len(answer.tokens) > 2 for answer in answers):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            os.kill(victim(cluster, role_id), number)
            restarted = asyncio.create_task(cluster.wait_restarted(role_id, incarnation, timeout_s=20 * slowness()))
            answers += [driver.submit(prompt, GREEDY)[0] for prompt in prompts]  # so that both roles have work
            await driver.wait(answers, 120)
            for prompt, answer in zip([*prompts, *prompts], answers, strict=True):
                assert answer.tokens == greedy(reference, prompt, NEW_TOKENS, answer.tokens)
            await restarted
            await wait_nothing_held(cluster)
            await wait_ended(theirs)


async def test_a_node_with_other_weights_ends_the_start_by_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node resolves the model's folder by itself: here a rank host finds another one under the same path."""
    other = make_model("llama", tmp_path / "other", seed=29, vocab_size=VOCAB_SIZE)
    start = rank_hosts.start_rank_host

    async def elsewhere(
        settings: RoleSettings, environment: dict[str, str], output: int | None
    ) -> rank_hosts.PlainRankHost:
        config = {**settings.config, "model": {**settings.config["model"], "path": str(other)}}
        return await start(replace(settings, config=config), environment, output)

    monkeypatch.setattr("alignedserve.cluster.launch.process_launcher.start_rank_host", elsewhere)
    asked = config(folder, ONE, STAGES)
    once = replace(asked, supervisor=replace(asked.supervisor, max_start_failures=1))
    async with LocalCluster(once, nodes=NODES, placed=TOGETHER) as cluster:
        with pytest.raises(AlignedServeError, match=r"other on node node-1 has other weights .* copy the same files"):
            await cluster.wait_ready(60.0)
