"""Every architecture, through the real workers, stores and channels in plain processes: tokens equal `generate`'s."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from alignedserve.cluster.local import LocalCluster
from alignedserve.config import Config
from alignedserve.config_sources import from_tree
from alignedserve.control.samples import value
from alignedserve.request import SamplingParams
from alignedserve.testing.models import KINDS, make_model
from alignedserve.testing.reference import greedy, load_reference, random_prompts
from support.driver import Answer, Driver
from support.faulty_roles import FOLDER
from support.held import wait_nothing_held

NEW_TOKENS = 48
# Short ones first: many run together, and grow until the cache is full. 300 tokens are five chunks.
LENGTHS = (20, 31, 12, 40, 25, 33, 17, 28, 1, 36, 22, 300, 9, 150, 30, 44)


@dataclass
class Run:
    answers: list[Answer]
    metrics: str


def config_for(folder: Path, *, prefetch: bool) -> Config:
    # A decode cache for the longest request and little more, which one batch can fill without looking ahead: what waits
    # together joins together, and evictions are certain.
    # Chunks of 64 tokens cut every long prompt.
    return from_tree(
        {
            "model": {"path": str(folder)},
            "cluster": {"device": "cpu", "prefetch": prefetch, "threads": 1},
            "kv_pool": {"size_gib": 0.25, "block_size": 4, "verify": True},
            "prefill": {"token_budget": 64},
            "decode": {"cache_blocks": 110, "join_iterations": 1, "overlap": "auto" if prefetch else "on"},
            "scheduler": {"min_batch_requests": 4, "max_batch_share": 0.9, "starvation_after_s": 2.0},
            "supervisor": {"heartbeat_s": 0.2, "fence_after_s": 60.0, "stall_after_s": 60.0},
        }
    )


async def serve(config: Config, prompts: list[list[int]], sampling: SamplingParams, orders: Path) -> Run:
    """`orders`: a folder for `faulty_roles`."""
    hold = orders / "hang-decode"
    async with LocalCluster(config, environment={FOLDER: str(orders)}, module="support.faulty_roles") as cluster:
        await cluster.wait_ready()
        async with Driver(cluster.address("scheduler-0"), cluster.token, resubmit=True) as driver:
            # Every prompt waits in the pool before the first iteration, however fast this machine is.
            hold.touch()
            answers = [driver.submit(prompt, sampling)[0] for prompt in prompts]
            while not all(answer.tokens or answer.error for answer in answers):  # noqa: ASYNC110  # no event says so
                await asyncio.sleep(0.02)
            hold.unlink()
            await driver.wait(answers)
            await asyncio.sleep(0.3)  # what was reported before the requests came says nothing
            return Run(answers, await wait_nothing_held(cluster, 2.0))


# What processes do with a request depends on its KV's shape, windows and experts. Kinds whose engine alone differs from
# these are in unit/engine/test_exact.py, and here in `make test-all`.
IN_MAKE_TEST = ("llama", "gpt_oss")
# The way to the decode instance does not depend on the architecture: a few kinds go straight from the pool as well, and
# launch iterations ahead.
CASES = [
    *(pytest.param(k, True, id=f"{k}-prefetch", marks=() if k in IN_MAKE_TEST else pytest.mark.slow) for k in KINDS),
    pytest.param("llama", False, id="llama-direct"),
    *(pytest.param(kind, False, id=f"{kind}-direct", marks=pytest.mark.slow) for kind in ("gemma2", "gpt2")),
]


@pytest.mark.parametrize(("kind", "prefetch"), CASES)
def test_greedy_tokens_equal_generate(kind: str, prefetch: bool, tmp_path: Path) -> None:
    folder = make_model(kind, tmp_path / kind, seed=7)
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    prompts = random_prompts(LENGTHS, vocab_size, seed=11)
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)

    run = asyncio.run(serve(config_for(folder, prefetch=prefetch), prompts, sampling, tmp_path))

    reference = load_reference(folder)
    expected = [
        greedy(reference, prompt, NEW_TOKENS, answer.tokens)
        for prompt, answer in zip(prompts, run.answers, strict=True)
    ]
    assert [answer.error for answer in run.answers] == [None] * len(LENGTHS)
    assert [answer.tokens for answer in run.answers] == expected
    assert len({token for tokens in expected for token in tokens}) > 24, "tokens do not vary: nothing was shown"
    assert value(run.metrics, "alignedserve_decode_evictions_total") > 0
    assert value(run.metrics, "alignedserve_kv_checksum_blocks_total") > 0
    assert value(run.metrics, "alignedserve_kv_copy_failures_total") == 0
