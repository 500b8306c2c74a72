"""Memory for little more than the longest request, and clients that leave: nothing hangs, leaks or turns wrong."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from pathlib import Path

import pytest

from alignedserve.cluster.local import LocalCluster
from alignedserve.config_sources import from_tree
from alignedserve.control.samples import value
from alignedserve.model import ModelInfo
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.request import SamplingParams
from alignedserve.sizing import GIB
from alignedserve.testing.models import make_model
from alignedserve.testing.reference import greedy, load_reference, random_prompts
from support.driver import Answer, Driver
from support.held import wait_nothing_held

VOCAB_SIZE = 400
BLOCK_SIZE = 4
NEW_TOKENS = 40
LONGEST = 160
MOST_ROUNDS = 6
GONE = "the pool no longer has the request's KV"


def pool_gib(folder: Path, blocks: int) -> float:
    from alignedserve.engine.model.inspect import inspect_model

    info: ModelInfo = inspect_model("m", folder, "auto", "cpu")
    return (blocks + 0.5) * info.geometry(BLOCK_SIZE).block_bytes / GIB


async def dropped_requests(cluster: LocalCluster, expected: float) -> float:
    """As the scheduler reports. A busy one may have a report from before the last drop: then it is asked again."""
    deadline = time.monotonic() + 10.0
    while True:
        dropped = value((await cluster.status()).metrics, "alignedserve_requests_dropped_for_room_total")
        if dropped >= expected or time.monotonic() > deadline:
            return dropped
        await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("prefetch", "pool", "cache", "drops"),
    [
        pytest.param(True, 1.5, 1.2, False, id="prefetch"),
        pytest.param(False, 1.06, 1.2, True, id="no-prefetch", marks=pytest.mark.slow),
        pytest.param(
            True, 1.06, 1.06, True, id="just one", marks=pytest.mark.slow
        ),  # as many as the longest request, and three
    ],
)
def test_a_pool_and_a_cache_that_are_nearly_too_small(
    prefetch: bool, pool: float, cache: float, drops: bool, tmp_path: Path
) -> None:
    """`pool` and `cache`: how many of the longest request they have room for. `drops`: so few that KV is dropped.

    Clients leave in the first round only: a dropped request whose client has just left is not submitted again.
    Requests that are lost for another reason do not count: one leaves its cache before it has computed anything, when
    the order to drop its copy in the pool is on the way.
    """
    folder = make_model("llama", tmp_path / "m", seed=31, vocab_size=VOCAB_SIZE)
    longest_blocks = -(-(LONGEST + NEW_TOKENS) // BLOCK_SIZE)
    config = from_tree(
        {
            "model": {"path": str(folder)},
            "cluster": {"device": "cpu", "threads": 1, "prefetch": prefetch},
            "kv_pool": {
                "size_gib": pool_gib(folder, int(longest_blocks * pool)),
                "block_size": BLOCK_SIZE,
                "verify": True,
            },
            "prefill": {"token_budget": 64},
            "decode": {"cache_blocks": int(longest_blocks * cache), "join_iterations": 1},
            "scheduler": {"starvation_after_s": 1.0},
            "supervisor": {"heartbeat_s": 0.2},
        }
    )
    lengths = (30, 12, 44, 25, LONGEST, 33, 17, 28, 60, 36, 22, 120, 9, 50, 31, 40)
    prompts = random_prompts(lengths, VOCAB_SIZE, seed=32)
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)

    async def run() -> tuple[list[list[Answer]], list[tuple[float, int]], sv.ClusterStatus]:
        draw, kept, counts = random.Random(33), list[list[Answer]](), list[tuple[float, int]]()
        async with LocalCluster(config, output_dir=tmp_path) as cluster:
            await cluster.wait_ready()
            async with Driver(cluster.address("scheduler-0"), cluster.token, resubmit=True) as driver:
                for number in range(MOST_ROUNDS):  # whether room runs out depends on what meets, so on the machine
                    asked = prompts * (1 + number)
                    kept += [driver.submit(prompt, sampling, 1 if i % 5 else 3) for i, prompt in enumerate(asked)]
                    for prompt in prompts if number == 0 else ():
                        gone = driver.submit(prompt, sampling)
                        await asyncio.sleep(draw.random() * 0.05)
                        driver.cancel(gone)
                    await driver.wait([answer for group in kept for answer in group], timeout_s=150)
                    await wait_nothing_held(cluster)
                    resubmitted = driver.resubmitted - driver.lost[GONE]
                    expected = resubmitted + (counts[0][0] - counts[0][1] if counts else 0)
                    counts.append((await dropped_requests(cluster, expected), resubmitted))
                    if number and (not drops or counts[-1][0] > counts[0][0]):
                        break
                return kept, counts, await cluster.status()

    kept, counts, status = asyncio.run(run())

    reference = load_reference(folder)
    for prompt, group in zip(itertools.cycle(prompts), kept, strict=False):
        expected = greedy(reference, prompt, NEW_TOKENS, group[0].tokens)
        for answer in group:
            assert (answer.error, answer.finish_reason, answer.tokens) == (None, "length", expected)
    assert value(status.metrics, "alignedserve_decode_evictions_total") > 0
    (before, resubmitted_before), (dropped, resubmitted) = counts[0], counts[-1]
    assert dropped > before or not drops
    assert resubmitted - resubmitted_before == dropped - before  # and each went on: its answer is whole
    assert (status.state, len(status.degraded)) == (("degraded", 1) if dropped else ("ready", 0))
    logged = "KV was dropped" in (tmp_path / "scheduler-0.out").read_text()
    assert logged == bool(dropped)
    if dropped:
        assert f"the KV pool ({int(longest_blocks * pool)} blocks) is too small" in status.degraded[0]
