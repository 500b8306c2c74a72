"""The disk tier through real workers: what one cluster computed the next one reads, and no fault of a disk is seen."""

from __future__ import annotations

import asyncio
import json
import os
import struct
from pathlib import Path

import pytest

from alignedserve.cluster.local import LocalCluster
from alignedserve.config import Config
from alignedserve.config_sources import from_tree
from alignedserve.control.samples import value
from alignedserve.kv_pool.disk.breaker import MOST_FAULTS
from alignedserve.kv_pool.disk.file import PAGE_BYTES, padded
from alignedserve.request import SamplingParams
from alignedserve.testing.models import make_model
from alignedserve.testing.reference import greedy, load_reference, random_prompts
from support.driver import Answer, Driver

pytestmark = pytest.mark.slow

NEW_TOKENS = 8
BLOCK = 4
LENGTHS = (120, 90, 150, 60, 110)
SAMPLING = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models") / "llama", seed=7)


def config_for(folder: Path, disk: Path, size_gib: float) -> Config:
    return from_tree(
        {
            "model": {"path": str(folder)},
            "cluster": {"device": "cpu", "threads": 1},
            "kv_pool": {
                "size_gib": size_gib,
                "block_size": BLOCK,
                "verify": True,
                "disk_path": str(disk),
                "disk_gib": 0.05,
            },
            "supervisor": {"heartbeat_s": 0.2, "fence_after_s": 60.0},
        }
    )


def prompts_of(folder: Path, seed: int = 11) -> list[list[int]]:
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    return random_prompts(LENGTHS, vocab_size, seed=seed, shared=0)


async def ask(cluster: LocalCluster, driver: Driver, prompts: list[list[int]]) -> list[Answer]:
    """The answers, once nothing of them is held."""
    answers = await driver.generate(prompts, SAMPLING)
    async with asyncio.timeout(30):
        while value(await reported(cluster), "alignedserve_kv_blocks", state="owned"):
            pass
    return answers


async def reported(cluster: LocalCluster) -> str:
    """The metrics, after every role has sent them anew."""
    await asyncio.sleep(0.3)
    return (await cluster.status()).metrics


def check(folder: Path, answers: list[Answer]) -> None:
    reference = load_reference(folder)
    for answer in answers:
        assert answer.error is None
        assert answer.tokens == greedy(reference, answer.spec.prompt_token_ids, NEW_TOKENS, answer.tokens)


def file_in(folder: Path) -> Path:
    (file,) = folder.glob("*.kv")
    return file


def of_disk(metrics: str, name: str, **labels: str) -> float:
    return value(metrics, f"alignedserve_disk_tier_{name}", **labels)


def served(config: Config, prompts: list[list[int]]) -> tuple[list[Answer], str]:
    """The answers of a new cluster, and its metrics before it ends."""

    async def run() -> tuple[list[Answer], str]:
        async with LocalCluster(config) as cluster:
            await cluster.wait_ready()
            async with Driver(cluster.address("scheduler-0"), cluster.token, resubmit=True) as driver:
                return await ask(cluster, driver, prompts), await reported(cluster)

    return asyncio.run(run())


def test_a_restarted_cluster_reads_what_the_one_before_has_computed(folder: Path, tmp_path: Path) -> None:
    config, prompts = config_for(folder, tmp_path, 0.1), prompts_of(folder)
    before, metrics = served(config, prompts)
    assert value(metrics, "alignedserve_prefix_cache_hit_tokens_total") == 0
    after, metrics = served(config, prompts)
    check(folder, [*before, *after])
    kept = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts]
    assert [answer.cached_tokens for answer in after] == kept
    assert value(metrics, "alignedserve_prefix_cache_hit_tokens_total", tier="disk") == sum(kept)
    assert of_disk(metrics, "read_bytes_total") > 0


def test_blocks_that_were_changed_on_disk_are_computed_again(folder: Path, tmp_path: Path) -> None:
    config, prompts = config_for(folder, tmp_path, 0.1), prompts_of(folder)
    before, _ = served(config, prompts)
    file = file_in(tmp_path)
    data = bytearray(file.read_bytes())
    _, block_bytes, _, _, _, slots = struct.unpack_from("<8sQQ32s32sQ", data)
    for place in range(PAGE_BYTES, PAGE_BYTES + slots * padded(block_bytes), padded(block_bytes)):
        data[place] ^= 1
    file.write_bytes(data)
    after, metrics = served(config, prompts)
    check(folder, [*before, *after])
    # Reading is off after so many faults. Reads that had begun by then are rejected, too.
    assert MOST_FAULTS <= of_disk(metrics, "rejected_blocks_total") <= len(prompts)
    assert [answer.cached_tokens for answer in after] == [0] * len(prompts)


def test_a_small_memory_a_truncated_file_and_a_killed_shard_cost_no_answer(folder: Path, tmp_path: Path) -> None:
    config = config_for(folder, tmp_path, 0.001)  # about 350 blocks; the rounds need 550
    rounds = [prompts_of(folder, seed) for seed in range(4)]

    async def run() -> tuple[list[Answer], list[str]]:
        async with LocalCluster(config) as cluster:
            await cluster.wait_ready()
            async with Driver(cluster.address("scheduler-0"), cluster.token, resubmit=True) as driver:
                answers, metrics = [], []
                for prompts in [*rounds, *rounds]:
                    answers += await ask(cluster, driver, prompts)
                metrics.append(await reported(cluster))
                os.truncate(file_in(tmp_path), 4096)  # while the shard has it open
                for prompts in rounds:
                    answers += await ask(cluster, driver, prompts)
                metrics.append(await reported(cluster))
                killed = cluster.peer("kv_pool-0").process.incarnation
                late = [driver.submit(prompt, SAMPLING)[0] for prompts in rounds for prompt in prompts]
                await driver.wait_tokens(late[:1])
                cluster.kill("kv_pool-0")
                await cluster.wait_restarted("kv_pool-0", killed)
                await driver.wait(late)
                answers += await ask(cluster, driver, rounds[0])
                return [*answers, *late], metrics

    answers, (small, truncated) = asyncio.run(run())
    check(folder, answers)
    assert of_disk(small, "read_bytes_total") > 0, "memory held everything"
    assert of_disk(truncated, "faults_total", doing="read") + of_disk(truncated, "rejected_blocks_total") > 0
