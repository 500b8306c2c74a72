"""Copies that fail or lie on every channel of real processes, with `--verify-kv`: no wrong token, nothing left held."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import PreTrainedModel

from alignedserve.cluster.local import LocalCluster
from alignedserve.config_sources import from_tree
from alignedserve.control.samples import value
from alignedserve.testing.models import VOCAB_SIZE, make_model
from alignedserve.testing.reference import greedy, load_reference, random_prompts
from support.faulty_channel import FaultPlan, fault_environment
from support.gateway import http_to, joined_gateway
from support.held import wait_nothing_held

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(180)]

NEW_TOKENS = 32
COPY_FAILED = {"transfer_failed", "checksum_mismatch"}
LENGTHS = (20, 31, 12, 40, 25, 33, 17, 28, 5, 36, 22, 150, 9, 80, 30, 44)


@dataclass
class Served:
    cluster: LocalCluster
    http: httpx.AsyncClient

    async def ask(self, prompt: list[int]) -> dict[str, Any]:
        """A greedy answer, or the error object that came instead; streamed, as it would be lost in the middle."""
        body = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        tokens: list[int] = []
        async with self.http.stream("POST", "/v1/completions", json=body | {"return_token_ids": True}) as answer:
            if answer.status_code != 200:
                return dict(json.loads(await answer.aread()))
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                part = json.loads(line.removeprefix("data: "))
                if "error" in part:
                    return dict(part)
                tokens += part["choices"][0]["token_ids"] if part["choices"] else []
        return {"tokens": tokens}

    async def metrics(self) -> str:
        return (await self.cluster.status()).metrics


@contextlib.asynccontextmanager
async def serving(folder: Path, plan: FaultPlan) -> AsyncIterator[Served]:
    # A decode cache for the longest request and little more, joined without looking ahead: evictions are certain.
    config = from_tree(
        {
            "model": {"path": str(folder)},
            "cluster": {"device": "cpu", "threads": 1},
            "kv_pool": {"size_gib": 0.1, "block_size": 4, "verify": True, "copy_timeout_s": 1.0},
            "prefill": {"token_budget": 64},
            "decode": {"cache_blocks": 70, "join_iterations": 1},
            "scheduler": {"min_batch_requests": 4, "starvation_after_s": 2.0},
            "supervisor": {"heartbeat_s": 0.1},
        }
    )
    async with LocalCluster(config, environment=fault_environment(plan)) as cluster:
        await cluster.wait_ready()
        async with joined_gateway(cluster.join_info()) as gateway, http_to(gateway, 120.0) as http:
            yield Served(cluster, http)


@dataclass(frozen=True)
class Model:
    folder: Path
    reference: PreTrainedModel


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = make_model("llama", tmp_path_factory.mktemp("model"), seed=3)
    return Model(folder, load_reference(folder))


async def test_whatever_a_copy_does_wrong_the_tokens_are_right(model: Model) -> None:
    plan = FaultPlan(refuse=0.04, error=0.06, delay=0.1, short=0.08, flip=0.08, flipped_bits=3)
    prompts = random_prompts(LENGTHS * 2, VOCAB_SIZE, seed=5)
    async with serving(model.folder, plan) as served:
        answers = await asyncio.gather(*(served.ask(prompt) for prompt in prompts))
        metrics = await wait_nothing_held(served.cluster)
    expected = [greedy(model.reference, prompt, NEW_TOKENS) for prompt in prompts]
    errors = [answer["error"]["code"] for answer in answers if "tokens" not in answer]
    assert set(errors) <= COPY_FAILED
    assert len(errors) <= len(answers) // 10, errors
    good = [(a["tokens"], tokens) for a, tokens in zip(answers, expected, strict=True) if "tokens" in a]
    assert [found for found, _ in good] == [tokens for _, tokens in good]
    for instance in ("prefill-0", "decode-0"):
        assert value(metrics, "alignedserve_kv_checksum_mismatches_total", instance=instance) > 0
        assert value(metrics, "alignedserve_kv_copy_failures_total", instance=instance) > 0
    assert value(metrics, "alignedserve_decode_evictions_total") > 0


@pytest.mark.slow
async def test_a_copy_that_never_ends_costs_its_worker_and_no_request(model: Model) -> None:
    # The seventh copy of a prompt to the pool hangs.
    prompts = random_prompts([20] * 9, VOCAB_SIZE, seed=6)
    async with serving(model.folder, FaultPlan(stuck=1.0, after=6, most=1, only="prefill-0/cache>")) as served:
        old = served.cluster.peer("prefill-0").process.incarnation
        answers = await asyncio.gather(*(served.ask(prompt) for prompt in prompts[:6]))
        answers += await asyncio.gather(*(served.ask(prompt) for prompt in prompts[6:]))
        assert served.cluster.peer("prefill-0").process.incarnation > old
        await wait_nothing_held(served.cluster)
    assert [answer.get("tokens") for answer in answers] == [greedy(model.reference, p, NEW_TOKENS) for p in prompts]
