"""Several instances of each role, the candidate requests buffer under pressure, and lower precision."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch

from alignedserve.cluster.local import LocalCluster
from alignedserve.config_sources import from_tree
from alignedserve.request import SamplingParams
from alignedserve.testing.models import make_model
from alignedserve.testing.reference import greedy, load_reference, random_prompts
from support.driver import Answer, Driver
from support.held import wait_nothing_held

VOCAB_SIZE = 400
NEW_TOKENS = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


def serve(
    folder: Path, prompts: list[list[int]], spread: tuple[str, ...] = (), **sections: dict[str, Any]
) -> tuple[list[Answer], str]:
    """`spread`: attributes of answers of which there is to be more than one value."""
    tree: dict[str, Any] = {
        "model": {"path": str(folder)},
        "cluster": {"device": "cpu", "threads": 1},
        "kv_pool": {"size_gib": 0.1, "block_size": 4},
        "supervisor": {"heartbeat_s": 0.2},
    }
    for name, keys in sections.items():
        tree[name] = {**tree.get(name, {}), **keys}

    async def run() -> tuple[list[Answer], str]:
        async with LocalCluster(from_tree(tree)) as cluster:
            await cluster.wait_ready()
            async with Driver(cluster.address("scheduler-0"), cluster.token, resubmit=True) as driver:
                answers = await driver.generate(prompts, GREEDY)
                for _ in range(9):  # an instance gets work once the scheduler has its first report
                    if not all(len({getattr(answer, role) for answer in answers}) > 1 for role in spread):
                        answers = await driver.generate(prompts, GREEDY)
                await asyncio.sleep(0.3)  # what was reported before the requests came says nothing
                return answers, await wait_nothing_held(cluster, 2.0)

    return asyncio.run(run())


def test_equal_lengths_are_evicted_to_the_requests_buffer_and_come_back(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "m", seed=21, vocab_size=VOCAB_SIZE)
    prompts = random_prompts([24] * 12, VOCAB_SIZE, seed=22)

    # Every length matches the running batch: no switch, in which evictions would go to the pool.
    answers, metrics = serve(
        folder, prompts, decode={"cache_blocks": 60, "join_iterations": 1}, scheduler={"join_window": 10.0}
    )

    reference = load_reference(folder)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == greedy(reference, prompt, NEW_TOKENS, answer.tokens)
    to_buffer = [
        line
        for line in metrics.splitlines()
        if line.startswith("alignedserve_transfer_copies_total")
        and 'source="decode-0/cache"' in line
        and 'destination="prefill-0/requests' in line
    ]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in to_buffer) > 0


def test_two_prefill_and_two_decode_instances_share_the_work(tmp_path: Path) -> None:
    folder = make_model("qwen3", tmp_path / "m", seed=23, vocab_size=VOCAB_SIZE)
    prompts = random_prompts([10, 200, 12, 180, 14, 160, 16, 140, 11, 190, 13, 170], VOCAB_SIZE, seed=24)

    answers, _ = serve(folder, prompts, ("prefill_id", "decode_id"), cluster={"prefill": 2, "decode": 2})

    reference = load_reference(folder)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == greedy(reference, prompt, NEW_TOKENS, answer.tokens)
    assert {answer.prefill_id for answer in answers} == {"prefill-0", "prefill-1"}
    assert {answer.decode_id for answer in answers} == {"decode-0", "decode-1"}


def test_bfloat16_differs_from_generate_only_within_rounding(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "m", seed=25, vocab_size=VOCAB_SIZE, dtype=torch.bfloat16)
    prompts = random_prompts([1, 40, 90, 130, 7, 64], VOCAB_SIZE, seed=26)

    answers, _ = serve(folder, prompts, model={"dtype": "bfloat16"})

    reference = load_reference(folder, torch.bfloat16)
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = greedy(reference, prompt, NEW_TOKENS)
        at = next((i for i in range(NEW_TOKENS) if answer.tokens[i] != expected[i]), None)
        if at is None:
            continue
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + expected[:at]])).logits[0, -1].float()
        gap = float(logits[expected[at]] - logits[answer.tokens[at]])
        # A few units in the last place of bfloat16 (8 bits) at the size of these logits.
        assert abs(gap) <= 4 * 2**-8 * float(logits.abs().max())
    assert sum(answer.tokens[0] == greedy(reference, p, 1)[0] for p, answer in zip(prompts, answers, strict=True)) >= 4
