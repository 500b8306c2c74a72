"""Whole clusters of two nodes on this machine: KV crosses over Gloo, shards are written from their own node only."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any

import pytest

from alignedserve.cluster.local import LocalCluster
from alignedserve.cluster.supervisor.plan import Node
from alignedserve.config import Config
from alignedserve.config_sources import from_tree
from alignedserve.control.samples import value
from alignedserve.request import SamplingParams
from alignedserve.testing.models import make_model
from alignedserve.testing.reference import greedy, load_reference, random_prompts
from support.driver import Answer, Driver
from support.held import wait_nothing_held

pytestmark = pytest.mark.timeout(600)

VOCAB_SIZE = 400
NEW_TOKENS = 40
BLOCK_SIZE = 4
PREFIX = 200  # tokens of a shared one
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
NODES = (Node("node-a", "127.0.0.1"), Node("node-b", "127.0.0.2"))
APART = {"prefill-0": "node-a", "decode-0": "node-b"}
TWICE = {"prefill-0": "node-a", "decode-0": "node-a", "prefill-1": "node-b", "decode-1": "node-b"}
LENGTHS = (24, 9, 100, 24, 31, 60, 24, 12, 24, 90, 17, 24)
# A longer one than the others makes the batch switch: what runs is evicted to the pool, not to the requests buffer.


def config(folder: Path, placed: dict[str, str], **sections: Any) -> Config:
    counts = {role: sum(name.startswith(role) for name in placed) for role in ("prefill", "decode")}
    tree: dict[str, Any] = {
        "model": {"path": str(folder)},
        "cluster": {"device": "cpu", "threads": 1, **counts},
        "kv_pool": {"size_gib": 0.1, "block_size": BLOCK_SIZE},
        "decode": {"cache_blocks": 60, "join_iterations": 1},
        "supervisor": {"heartbeat_s": 0.2},
    }
    for name, keys in sections.items():
        tree[name] = {**tree.get(name, {}), **keys}
    return from_tree(tree)


@functools.cache
def truth(folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and what `transformers` answers."""
    prompts = random_prompts(LENGTHS, VOCAB_SIZE, seed=22)
    reference = load_reference(folder)
    return prompts, [greedy(reference, prompt, NEW_TOKENS) for prompt in prompts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("model"), seed=21, vocab_size=VOCAB_SIZE)


def shard_of(cluster: LocalCluster, node_id: str) -> str:
    return next(shard.pool_id for shard in cluster.view().pools if shard.node_id == node_id)


def cached(shards: list[str], metrics: str) -> list[float]:
    """Blocks in each shard's prefix cache."""
    return [value(metrics, "alignedserve_kv_blocks", store=one, state="cached") for one in shards]


def copies(metrics: str, source: str, destination: str, channel: str = "") -> float:
    """Between stores whose names begin so."""
    wanted = (
        "alignedserve_transfer_copies_total",
        f'source="{source}',
        f'destination="{destination}',
        f'channel="{channel}',
    )
    return sum(float(line.rpartition(" ")[2]) for line in metrics.splitlines() if all(word in line for word in wanted))


def loads_torch(cluster: LocalCluster, role_id: str) -> bool:
    return "libtorch" in Path(f"/proc/{cluster.pids[role_id]}/maps").read_text()


@pytest.mark.parametrize(
    ("placed", "prefetch", "verify", "channel"),
    [
        (APART, True, True, "gloo"),
        pytest.param(APART, False, False, "gloo", marks=pytest.mark.slow),
        pytest.param(APART, False, True, "gloo", marks=pytest.mark.slow),
        pytest.param(APART, False, True, "nixl", marks=pytest.mark.slow),
        pytest.param(TWICE, True, False, "gloo", marks=pytest.mark.slow),
        pytest.param(TWICE, False, True, "gloo", marks=pytest.mark.slow),
    ],
    ids=["apart-prefetch-verify", "apart", "apart-verify", "apart-verify-nixl", "twice-prefetch", "twice-verify"],
)
async def test_tokens_are_exact_where_prefill_and_decode_are_on_two_nodes(
    folder: Path, placed: dict[str, str], *, prefetch: bool, verify: bool, channel: str
) -> None:
    prompts, expected = truth(folder)
    named = {} if channel == "gloo" else {"channel": channel}  # Gloo by itself
    asked = config(folder, placed, cluster={"prefetch": prefetch, **named}, kv_pool={"verify": verify})
    async with LocalCluster(asked, nodes=NODES, placed=placed) as cluster:
        await cluster.wait_ready()
        first, second = (shard_of(cluster, node.node_id) for node in NODES)
        async with Driver(cluster.address("scheduler-0"), cluster.token, resubmit=True) as driver:
            used = set()
            for _ in range(2):
                answers = await driver.generate(prompts, GREEDY)
                used |= {name for answer in answers for name in (answer.prefill_id, answer.decode_id)}
                assert [(answer.error, answer.tokens) for answer in answers] == [(None, tokens) for tokens in expected]
            metrics = await wait_nothing_held(cluster)
        # Every prompt is offloaded where it was computed; what is evicted to the pool goes to its own node's shard.
        assert copies(metrics, "prefill-0/cache", first, "shared-memory") > 0
        assert copies(metrics, "prefill-0/", second) == 0
        if placed is APART:
            assert copies(metrics, "decode-0/cache", first) == 0
            if prefetch:
                assert copies(metrics, "prefill-0/", "decode-0/cache", channel) >= len(prompts)
            else:
                assert copies(metrics, first, "decode-0/cache", channel) >= len(prompts)
                assert copies(metrics, "decode-0/cache", second, "shared-memory") > 0  # evictions, in full
                assert copies(metrics, second, "decode-0/cache", "shared-memory") > 0
                assert loads_torch(cluster, first)
        else:
            assert used == set(placed)
        if verify:
            assert value(metrics, "alignedserve_kv_checksum_blocks_total") > 0
            assert value(metrics, "alignedserve_kv_checksum_mismatches_total") == 0


async def test_what_a_decode_only_node_evicts_to_its_shard_comes_back_from_there(folder: Path) -> None:
    """The prefill instance's buffers are on the other node: it does not go out to them and back (ADR 40)."""
    prompts, expected = truth(folder)
    small = config(folder, APART, kv_pool={"verify": True}, prefill={"requests_buffer_blocks": 40})
    async with LocalCluster(small, nodes=NODES, placed=APART) as cluster:
        await cluster.wait_ready()
        second = shard_of(cluster, "node-b")
        async with Driver(cluster.address("scheduler-0"), cluster.token, resubmit=True) as driver, asyncio.timeout(90):
            came_back = 0.0
            while not came_back:  # what is too large for the cache's room at that moment goes through a buffer
                answers = await driver.generate(prompts + prompts[::-1], GREEDY)
                assert [answer.tokens for answer in answers] == expected + expected[::-1]
                assert driver.resubmitted == 0
                metrics = await wait_nothing_held(cluster)
                came_back = copies(metrics, second, "decode-0/cache", "shared-memory")
        assert copies(metrics, "decode-0/cache", second, "shared-memory") > 0


@pytest.mark.parametrize(
    "prefetch", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["prefetch", "no-prefetch"]
)
async def test_a_killed_shard_process_or_worker_of_either_node_costs_no_token(folder: Path, *, prefetch: bool) -> None:
    prompts, expected = truth(folder)
    asked = config(folder, APART, cluster={"prefetch": prefetch}, kv_pool={"verify": True})
    async with LocalCluster(asked, nodes=NODES, placed=APART) as cluster:
        await cluster.wait_ready()
        async with Driver(cluster.address("scheduler-0"), cluster.token, resubmit=True) as driver:
            for role_id in (*(shard_of(cluster, node.node_id) for node in NODES), "decode-0", "prefill-0"):
                incarnation = cluster.peer(role_id).process.incarnation
                answers = [driver.submit(prompt, GREEDY)[0] for prompt in prompts]
                async with asyncio.timeout(60.0):
                    while not any(len(answer.tokens) > 2 for answer in answers):  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                cluster.kill(role_id)
                await driver.wait(answers, 90)
                assert [answer.tokens for answer in answers] == expected, role_id
                await cluster.wait_restarted(role_id, incarnation, timeout_s=150)
            await wait_nothing_held(cluster)


async def test_a_cached_prefix_is_copied_to_a_node_that_is_free_and_given_back(folder: Path) -> None:
    """An instance of the other node computes what it is not lent in time, as when the nodes' link is new. Then there is
    nothing left to copy, and another prefix follows.
    """
    asked = config(
        folder,
        TWICE,
        kv_pool={"verify": True, "prefix_cache": True},
        prefill={"token_budget": 32},
        decode={"cache_blocks": 600},
    )
    answers: list[Answer] = []
    async with LocalCluster(asked, nodes=NODES, placed=TWICE) as cluster:
        await cluster.wait_ready()
        shards = [shard_of(cluster, node.node_id) for node in NODES]
        async with Driver(cluster.address("scheduler-0"), cluster.token, resubmit=True) as driver:
            for seed in range(23, 27):
                near = await copied(cluster, driver, shards, answers, seed)
                assert all(answer.cached_tokens >= PREFIX for answer in near)
                metrics = await wait_nothing_held(cluster)
                lent = value(metrics, "alignedserve_prefix_cache_hit_tokens_total", tier="other node")
                if lent:
                    break
        assert driver.resubmitted == 0
    reference = load_reference(folder)
    for answer in answers:
        assert answer.tokens == greedy(reference, answer.spec.prompt_token_ids, NEW_TOKENS)
    assert lent >= PREFIX
    assert value(metrics, "alignedserve_kv_checksum_mismatches_total") == 0


async def copied(
    cluster: LocalCluster, driver: Driver, shards: list[str], answers: list[Answer], seed: int
) -> list[Answer]:
    """Ask about one prefix until instances of both nodes have answered; returns the answers of those where it was."""
    system, tail = random_prompts((PREFIX, 8), VOCAB_SIZE, seed=seed, shared=0)
    before = cached(shards, (await cluster.status()).metrics)
    (first,) = await driver.generate([system + tail], GREEDY)
    answers.append(first)
    home = TWICE[first.prefill_id]
    at = [node.node_id for node in NODES].index(home)
    async with asyncio.timeout(20.0):  # of the next heartbeats
        while cached(shards, (await cluster.status()).metrics)[at] < before[at] + PREFIX // BLOCK_SIZE:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    begun = len(answers)
    async with asyncio.timeout(40.0):  # how fast each instance is, is learned first
        while len({TWICE[one.prefill_id] for one in answers[begun:]}) < 2:
            for tail in random_prompts((150, 151, 152, 153), VOCAB_SIZE, seed=len(answers), shared=0):
                answers += driver.submit(system + tail, GREEDY, cached={shards[at]: PREFIX})
            await driver.wait(answers)
    return [one for one in answers[begun:] if TWICE[one.prefill_id] == home]


async def test_a_pool_of_one_node_does_without_torch(folder: Path) -> None:
    prompts, expected = truth(folder)
    async with LocalCluster(config(folder, {"prefill-0": "", "decode-0": ""})) as cluster:
        await cluster.wait_ready()
        async with Driver(cluster.address("scheduler-0"), cluster.token, resubmit=True) as driver:
            answers = await driver.generate(prompts[:2], GREEDY)
        assert [answer.tokens for answer in answers] == expected[:2]
        assert loads_torch(cluster, "decode-0")
        assert not loads_torch(cluster, "kv_pool-0")
