"""Memory for little more than the longest request, and clients that leave: nothing hangs, leaks or turns wrong."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from alignedserve.cluster.local import LocalCluster
from alignedserve.config_sources import from_tree
from alignedserve.model import ModelInfo
from alignedserve.request import SamplingParams
from alignedserve.sizing import GIB
from alignedserve.testing.driver import Driver
from alignedserve.testing.metrics import value
from alignedserve.testing.models import make_model
from alignedserve.testing.reference import greedy, load_reference, random_prompts

VOCAB_SIZE = 400
BLOCK_SIZE = 4
NEW_TOKENS = 40
LONGEST = 160


def pool_gib(folder: Path, blocks: int) -> float:
    from alignedserve.engine.inspect import inspect_model

    info: ModelInfo = inspect_model("m", folder, "auto", "cpu")
    return (blocks + 0.5) * info.geometry(BLOCK_SIZE).block_bytes / GIB


@pytest.mark.parametrize("prefetch", [True, False], ids=["prefetch", "no-prefetch"])
def test_a_pool_and_a_cache_that_are_nearly_too_small(prefetch: bool, tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "m", seed=31, vocab_size=VOCAB_SIZE)
    longest_blocks = -(-(LONGEST + NEW_TOKENS) // BLOCK_SIZE)
    config = from_tree(
        {
            "model": {"path": str(folder)},
            "cluster": {"device": "cpu", "threads": 1, "prefetch": prefetch},
            "kv_pool": {
                "size_gib": pool_gib(folder, longest_blocks * 3 // 2),
                "block_size": BLOCK_SIZE,
                "verify": True,
            },
            "prefill": {"token_budget": 64},
            "decode": {"cache_blocks": longest_blocks * 6 // 5, "join_iterations": 1},
            "scheduler": {"starvation_after_s": 1.0},
            "supervisor": {"heartbeat_s": 0.2},
        }
    )
    lengths = (30, 12, 44, 25, LONGEST, 33, 17, 28, 60, 36, 22, 120, 9, 50, 31, 40)
    prompts = random_prompts(lengths, VOCAB_SIZE, seed=32)
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)

    async def run() -> tuple[list[list[int]], list[object], str]:
        draw = random.Random(33)
        async with LocalCluster(config) as cluster:
            await cluster.wait_ready()
            async with Driver(cluster.address("scheduler-0"), cluster.token) as driver:
                kept = [driver.submit(prompt, sampling)[0] for prompt in prompts]
                for prompt in prompts:
                    gone = driver.submit(prompt, sampling)
                    await asyncio.sleep(draw.random() * 0.05)
                    driver.cancel(gone)
                await driver.wait(kept, timeout_s=90)
                await asyncio.sleep(1.0)
                metrics = (await cluster.status()).metrics
        return [answer.tokens for answer in kept], [answer.error for answer in kept], metrics

    tokens, errors, metrics = asyncio.run(run())

    reference = load_reference(folder)
    lost = [error for error in errors if error is not None]
    # The driver does not submit again what the last resort drops, as a gateway would; whatever came is right.
    assert len(lost) <= value(metrics, "alignedserve_requests_dropped_for_room_total")
    for prompt, answer in zip(prompts, tokens, strict=True):
        assert answer == greedy(reference, prompt, NEW_TOKENS)[: len(answer)]
    assert sum(len(answer) == NEW_TOKENS for answer in tokens) == len(prompts) - len(lost)
    assert value(metrics, "alignedserve_kv_blocks", state="owned") == 0
