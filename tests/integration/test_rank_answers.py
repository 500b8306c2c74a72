"""Answers of instances of several ranks: drawn, penalised, under grammars, evicted; those of one rank."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from alignedserve.cluster.local import LocalCluster
from alignedserve.config import Config
from alignedserve.config_sources import from_tree
from alignedserve.control.samples import value
from alignedserve.engine.parallel.processes import OWN_STORES_VARIABLE
from alignedserve.ranks.degrees import Degrees
from alignedserve.testing.models import KINDS, make_model
from support.gateway import http_to, joined_gateway
from support.held import wait_nothing_held

pytestmark = pytest.mark.timeout(300)

TINY = Path(__file__).parents[2] / "src/alignedserve/models/tiny"
SYSTEM = "You write short lists of things that are useful to have at hand. " * 3
SCHEMA = {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 2, "maxItems": 4}
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.9, "seed": 5, "top_p": 0.95},
    {"temperature": 0.7, "seed": 6, "top_k": 40, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 0, "frequency_penalty": 0.8, "logprobs": 3},
    {"temperature": 0.8, "seed": 7, "structured_outputs": {"json": SCHEMA}},
    {"temperature": 0, "structured_outputs": {"regex": "([a-z]{3,8}-){8}end"}},
    {"temperature": 1.0, "seed": 8, "no_repeat_ngram_size": 2, "min_tokens": 60, "logit_bias": {"300": 4}},
)


def config(prefill: Degrees, decode: Degrees, model: Path, cache_blocks: int) -> Config:
    return from_tree(
        {
            "model": {"path": str(model)},
            "cluster": {"device": "cpu", "threads": 2},
            "kv_pool": {"size_gib": 0.1, "block_size": 4, "verify": True},
            "prefill": {
                "tensor_parallel": prefill.tensor, "pipeline_parallel": prefill.stages, "token_budget": 24,
            },
            "decode": {
                "tensor_parallel": decode.tensor, "pipeline_parallel": decode.stages,
                "expert_parallel": decode.experts, "cache_blocks": cache_blocks, "join_iterations": 1,
            },
            "supervisor": {"heartbeat_s": 0.2},
        }
    )  # fmt: skip


async def answers(
    prefill: Degrees, decode: Degrees, model: Path = TINY, cache_blocks: int = 90
) -> tuple[list[dict[str, Any]], str]:
    """Texts, finish reasons and log-probabilities of two rounds, and metrics. 90 blocks hold about three requests."""
    async with LocalCluster(config(prefill, decode, model, cache_blocks)) as cluster:
        await cluster.wait_ready()
        async with joined_gateway(cluster.join_info()) as gateway, http_to(gateway, 120.0) as http:

            async def ask(number: int, way: dict[str, Any]) -> dict[str, Any]:
                body = {"prompt": f"{SYSTEM}List {number}:", "max_tokens": 90, **way}
                said = await http.post("/v1/completions", json=body)
                assert said.status_code == 200, said.text
                (choice,) = said.json()["choices"]
                return {"text": choice["text"], "finish": choice["finish_reason"], "logprobs": choice["logprobs"]}

            found = []
            for _ in range(2):  # the second finds prompts in the prefix cache
                found += await asyncio.gather(*(ask(number, way) for number, way in enumerate(WAYS)))
            metrics = await wait_nothing_held(cluster)
    return found, metrics


@pytest.fixture(scope="module")
def of_one() -> list[dict[str, Any]]:
    return asyncio.run(answers(Degrees(), Degrees()))[0]


@pytest.mark.parametrize(
    ("prefill", "decode", "own"),
    [
        (Degrees(2), Degrees(1, 2), "0"),
        pytest.param(Degrees(1, 2), Degrees(2), "1", marks=pytest.mark.slow),
        pytest.param(Degrees(1, 3), Degrees(2, 2), "1", marks=pytest.mark.slow),
        pytest.param(Degrees(4), Degrees(4), "1", marks=pytest.mark.slow),
    ],
    ids=["tp2-pp2", "pp2-tp2", "pp3-tp2pp2", "tp4-tp4"],
)
async def test_answers_are_those_of_one_rank(
    of_one: list[dict[str, Any]], prefill: Degrees, decode: Degrees, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over one store for all ranks of an instance, or a part of it for each, as on GPUs."""
    monkeypatch.setenv(OWN_STORES_VARIABLE, own)
    found, metrics = await answers(prefill, decode)
    check(found, metrics, of_one)
    assert all(isinstance(json.loads(found[at]["text"]), list) for at in (4, 4 + len(WAYS)))


MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss")


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    vocabulary = json.loads((TINY / "config.json").read_text())["vocab_size"]
    folder = make_model(request.param, tmp_path_factory.mktemp("model") / request.param, seed=26, vocab_size=vocabulary)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def of_one_model(model: Path) -> list[dict[str, Any]]:
    return asyncio.run(answers(Degrees(), Degrees(), model))[0]


@pytest.mark.slow
async def test_answers_of_every_architecture_are_those_of_one_rank(
    model: Path, of_one_model: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each second one with a part of the store for each rank."""
    monkeypatch.setenv(OWN_STORES_VARIABLE, str(KINDS.index(model.name) % 2))
    check(*await answers(Degrees(2), Degrees(2, 2), model), of_one_model)


@pytest.mark.slow
@pytest.mark.parametrize("model", MIXTURES, indirect=True)
async def test_answers_of_ranks_that_share_experts_are_those_of_one_rank(
    model: Path, of_one_model: list[dict[str, Any]]
) -> None:
    check(*await answers(Degrees(), Degrees(experts=2), model), of_one_model)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("model", MIXTURES, indirect=True)
async def test_answers_of_ranks_that_have_a_cache_each_are_those_of_one_rank(
    ranks: int, model: Path, of_one_model: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each cache holds little more than one request: where there is room for more, moves may save all evictions."""
    monkeypatch.setenv(OWN_STORES_VARIABLE, "1")
    found, metrics = await answers(Degrees(), Degrees(experts=ranks), model, 44 * ranks)
    check(found, metrics, of_one_model)


def check(found: list[dict[str, Any]], metrics: str, of_one: list[dict[str, Any]]) -> None:
    for number, (answer, expected) in enumerate(zip(found, of_one, strict=True)):
        assert (answer["text"], answer["finish"]) == (expected["text"], expected["finish"]), WAYS[number % len(WAYS)]
        if answer["logprobs"] is not None:
            pairs = zip(answer["logprobs"]["token_logprobs"], expected["logprobs"]["token_logprobs"], strict=True)
            assert all(own == pytest.approx(theirs, abs=1e-3) for own, theirs in pairs)
    assert value(metrics, "alignedserve_decode_evictions_total") > 0
