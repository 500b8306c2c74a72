"""Layer-wise offload through real processes: exact tokens with checksums, under faults, cancellations and kills."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from alignedserve.cluster.local import LocalCluster
from alignedserve.config_sources import from_tree
from alignedserve.control.samples import value
from alignedserve.testing.models import VOCAB_SIZE, make_model
from alignedserve.testing.reference import greedy, load_reference, random_prompts
from support.faulty_channel import FaultPlan, fault_environment
from support.gateway import http_to, joined_gateway
from support.held import wait_nothing_held

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

NEW_TOKENS = 8
LAYERWISE_TOKENS = 16
COPY_FAILED = {"transfer_failed", "checksum_mismatch"}
LENGTHS = (90, 31, 12, 140, 65, 201, 17, 128, 5, 96, 63, 150)


@dataclass(frozen=True)
class Model:
    folder: Path
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = make_model("llama", tmp_path_factory.mktemp("model"), seed=3, num_hidden_layers=6)
    reference, prompts = load_reference(folder), random_prompts(LENGTHS, VOCAB_SIZE, seed=5)
    return Model(folder, prompts, [greedy(reference, prompt, NEW_TOKENS) for prompt in prompts])


@dataclass
class Served:
    cluster: LocalCluster
    http: httpx.AsyncClient

    async def post(self, prompt: Sequence[int], **keys: Any) -> dict[str, Any]:
        """A greedy answer, or the error object that came instead."""
        body = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, **keys}
        answer = await self.http.post("/v1/completions", json=body | {"return_token_ids": True})
        return dict(answer.json())

    async def ask(self, prompt: Sequence[int], **keys: Any) -> list[list[int]]:
        """The tokens of each greedy answer."""
        answer = await self.post(prompt, **keys)
        assert "choices" in answer, answer
        return [choice["token_ids"] for choice in answer["choices"]]


@contextlib.asynccontextmanager
async def serving(model: Model, plan: FaultPlan | None = None) -> AsyncIterator[Served]:
    config = from_tree(
        {
            "model": {"path": str(model.folder)},
            "cluster": {"device": "cpu", "threads": 1},
            "kv_pool": {"size_gib": 0.1, "block_size": 4, "verify": True},
            "prefill": {"token_budget": 48, "layerwise_tokens": LAYERWISE_TOKENS},
            "supervisor": {"heartbeat_s": 0.1},
        }
    )
    async with LocalCluster(config, environment=fault_environment(plan) if plan else None) as cluster:
        await cluster.wait_ready()
        async with joined_gateway(cluster.join_info()) as gateway, http_to(gateway, 60.0) as http:
            yield Served(cluster, http)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model: Model) -> AsyncIterator[Served]:
    async with serving(model) as served:
        yield served


async def test_tokens_are_exact_and_groups_and_cancelled_prompts_leave_nothing_behind(
    served: Served, model: Model
) -> None:
    """How many blocks go ahead is decided by time: a pass does not wait for blocks of the pool that are not leased."""
    rounds, layers_ahead = 0, 0.0
    while layers_ahead < 6 * 9:  # six layers of each prompt that is long enough and has its lease in time
        assert rounds < 10, layers_ahead
        layers_ahead = await answer_all(served, model, salted=True)
        rounds += 1
    metrics = await wait_nothing_held(served.cluster)
    blocks = [-(-len(prompt) // 4) for prompt in [*model.prompts, model.prompts[3]]]
    short = sum(-(-length // 4) for length in LENGTHS if length < LAYERWISE_TOKENS)
    copied = value(metrics, "alignedserve_prefill_offload_blocks_total")
    ahead = value(metrics, "alignedserve_prefill_offload_ahead_blocks_total")
    assert copied >= rounds * sum(blocks)
    assert 0 < ahead <= copied - rounds * short
    assert value(metrics, "alignedserve_kv_checksum_mismatches_total") == 0
    assert value(metrics, "alignedserve_kv_checksum_blocks_total", instance="prefill-0") >= copied
    await answer_all(served, model, salted=False)


async def answer_all(served: Served, model: Model, salted: bool) -> float:
    """All prompts, a group, and some that are given up. Returns the layers that were copied ahead until now.

    `salted`: no two requests share cached KV.
    """
    salts = [{"cache_salt": uuid.uuid4().hex} if salted else {} for _ in range(len(model.prompts) + 6)]
    asked = [served.ask(prompt, **salts.pop()) for prompt in model.prompts]
    group = served.ask(model.prompts[3], n=3, **salts.pop())
    cancelled = [
        asyncio.create_task(served.post(model.prompts[5], timeout_s=after_s, **salts.pop()))
        for after_s in (0.02, 0.05, 0.1, 0.15, 0.2)
    ]
    together, *answers = await asyncio.gather(group, *asked)
    ended = await asyncio.gather(*cancelled)
    metrics = await wait_nothing_held(served.cluster)
    assert [tokens for (tokens,) in answers] == model.expected
    assert together == [model.expected[3]] * 3
    codes = [end["error"]["code"] for end in ended if "choices" not in end]
    assert set(codes) == {"deadline_exceeded"}
    in_time = [end["choices"][0]["token_ids"] for end in ended if "choices" in end]
    assert in_time == [model.expected[5]] * len(in_time)
    return value(metrics, "alignedserve_prefill_offload_ahead_layers_total")


async def test_a_prefill_instance_that_is_killed_while_it_copies_ahead_costs_no_token_and_no_block(
    served: Served, model: Model
) -> None:
    before = value((await served.cluster.status()).metrics, "alignedserve_prefill_offload_ahead_layers_total")
    old = served.cluster.peer("prefill-0").process.incarnation
    killed = asyncio.Event()

    async def ask_until_killed(prompt: Sequence[int]) -> list[list[int]]:
        answers: list[list[int]] = []
        while not answers or not killed.is_set():
            answers += await served.ask(prompt, cache_salt=uuid.uuid4().hex)  # so that it is computed
        return answers

    asked = [asyncio.create_task(ask_until_killed(prompt)) for prompt in model.prompts * 2]
    copying = False
    while not copying:
        metrics = (await served.cluster.status()).metrics
        ahead = value(metrics, "alignedserve_prefill_offload_ahead_layers_total") - before
        copying = ahead > 0 and value(metrics, "alignedserve_prefill_pending_tokens") > 0
        assert not any(answer.done() for answer in asked)  # one ends only with an error
    killed.set()
    served.cluster.kill("prefill-0")
    await served.cluster.wait_restarted("prefill-0", old)
    for answers, expected in zip(await asyncio.gather(*asked), model.expected * 2, strict=True):
        assert answers == [expected] * len(answers)
    await wait_nothing_held(served.cluster)


async def test_parts_that_fail_or_lie_are_made_good_by_whole_blocks(model: Model) -> None:
    plan = FaultPlan(refuse=0.03, error=0.03, delay=0.1, short=0.03, flip=0.03, delay_s=0.02, only="prefill-0/cache>")
    async with serving(model, plan) as served:
        answers = await asyncio.gather(*(served.post(prompt) for prompt in model.prompts))
        metrics = await wait_nothing_held(served.cluster)
    errors = [answer["error"]["code"] for answer in answers if "choices" not in answer]
    assert set(errors) <= COPY_FAILED
    assert len(errors) <= len(answers) // 10, errors
    good = [(a["choices"][0]["token_ids"], e) for a, e in zip(answers, model.expected, strict=True) if "choices" in a]
    assert [tokens for tokens, _ in good] == [expected for _, expected in good]
    assert value(metrics, "alignedserve_kv_copy_failures_total", instance="prefill-0") > 0
