"""A cluster whose instances copy over Gloo or NIXL: exact tokens, evictions both ways, deaths; and channels refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from alignedserve.cluster.local import LocalCluster
from alignedserve.config import Config
from alignedserve.config_sources import from_tree
from alignedserve.control.samples import value
from alignedserve.errors import ResourceError
from alignedserve.request import SamplingParams
from alignedserve.testing.models import make_model
from alignedserve.testing.reference import greedy, load_reference, random_prompts
from support.driver import Driver

VOCAB_SIZE = 400
NEW_TOKENS = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


def config(folder: Path, **cluster: Any) -> Config:
    return from_tree(
        {
            "model": {"path": str(folder)},
            "cluster": {"device": "cpu", "threads": 1, "channel": "gloo", **cluster},
            "kv_pool": {"size_gib": 0.1, "block_size": 4, "verify": True},
            "decode": {"cache_blocks": 60, "join_iterations": 1},
            "scheduler": {"join_window": 10.0},
            "supervisor": {"heartbeat_s": 0.2},
        }
    )


def moved(metrics: str, channel: str, source: str, destination: str) -> float:
    """Copies over a channel between stores whose names begin so."""
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if line.startswith("alignedserve_transfer_copies_total")
        and f'channel="{channel}"' in line
        and f'source="{source}' in line
        and f'destination="{destination}' in line
    )


@pytest.mark.parametrize("channel", ["gloo", "nixl"])
async def test_tokens_are_exact_and_survive_the_death_of_either_end(tmp_path: Path, channel: str) -> None:
    folder = make_model("llama", tmp_path / "m", seed=21, vocab_size=VOCAB_SIZE)
    prompts = random_prompts([24] * 12, VOCAB_SIZE, seed=22)
    reference = load_reference(folder)
    expected = [greedy(reference, prompt, NEW_TOKENS) for prompt in prompts]

    async with LocalCluster(config(folder, channel=channel)) as cluster:
        await cluster.wait_ready()
        async with Driver(cluster.address("scheduler-0"), cluster.token, resubmit=True) as driver:
            answers = await driver.generate(prompts, GREEDY)
            assert [answer.tokens for answer in answers] == expected
            await asyncio.sleep(0.4)
            metrics = (await cluster.status()).metrics
            assert moved(metrics, channel, "prefill-0/", "decode-0/cache") >= len(prompts)
            assert moved(metrics, channel, "decode-0/cache", "prefill-0/requests") > 0
            assert value(metrics, "alignedserve_kv_checksum_mismatches_total") == 0

            for role_id in ("prefill-0", "decode-0"):
                incarnation = cluster.peer(role_id).process.incarnation
                # So many that the cache cannot hold them together: most are open when the process is killed.
                answers = [driver.submit(prompt, GREEDY)[0] for prompt in prompts * 4]
                await driver.wait_tokens(answers[:1], 3)
                assert not all(answer.done.is_set() for answer in answers)
                resubmitted = driver.resubmitted
                cluster.kill(role_id)
                await driver.wait(answers, 60)
                assert [answer.tokens for answer in answers] == expected * 4
                await cluster.wait_restarted(role_id, incarnation)
                assert driver.resubmitted > resubmitted, role_id


async def test_a_channel_that_cannot_be_had_ends_the_start_with_what_is_missing(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "m", seed=21, vocab_size=VOCAB_SIZE)
    async with LocalCluster(config(folder, channel="nccl")) as cluster:
        with pytest.raises(
            ResourceError, match=r"cluster\.channel is 'nccl'.*KV is in host memory.*allow_slow_channel"
        ):
            await cluster.wait_ready()
        assert cluster.supervisor.core.state() == "failed"


async def test_the_next_best_is_taken_where_that_is_allowed(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "m", seed=21, vocab_size=VOCAB_SIZE)
    prompts = random_prompts([9, 30], VOCAB_SIZE, seed=2)
    allowed = config(folder, channel="nccl", allow_slow_channel=True)
    async with LocalCluster(allowed, output_dir=tmp_path / "out") as cluster:
        await cluster.wait_ready()
        async with Driver(cluster.address("scheduler-0"), cluster.token, resubmit=True) as driver:
            answers = await driver.generate(prompts, GREEDY)
        reference = load_reference(folder)
        assert [answer.tokens for answer in answers] == [greedy(reference, prompt, NEW_TOKENS) for prompt in prompts]
        await asyncio.sleep(0.4)
        assert 'channel="shared-memory"' in (await cluster.status()).metrics
    log = (tmp_path / "out" / "decode-0.out").read_text()
    assert "channel shared-memory, cluster.channel is 'nccl'" in log
