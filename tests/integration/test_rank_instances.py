"""Instances of several ranks in a whole cluster: the same tokens for all pairs of degrees; no rank is lost alone."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from alignedserve.cluster.local import LocalCluster
from alignedserve.config import Config
from alignedserve.config_sources import from_tree
from alignedserve.control.samples import value
from alignedserve.engine.parallel.processes import OWN_STORES_VARIABLE
from alignedserve.ranks.degrees import Degrees
from alignedserve.request import SamplingParams
from alignedserve.testing.models import make_model
from alignedserve.testing.reference import greedy, load_reference, random_prompts
from support.driver import Driver
from support.held import wait_nothing_held
from support.pace import slowness
from support.started import ranks_of, wait_ended

pytestmark = pytest.mark.timeout(300)

VOCAB_SIZE = 203  # which no number of ranks here divides
NEW_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
LENGTHS = (24, 9, 60, 31, 12, 90)


def config(folder: Path, prefill: Degrees, decode: Degrees, cache_blocks: int = 80) -> Config:
    tree = {
        "model": {"path": str(folder)},
        "cluster": {"device": "cpu", "threads": 2},
        "kv_pool": {"size_gib": 0.1, "block_size": 4, "verify": True},
        "prefill": {
            "tensor_parallel": prefill.tensor,
            "pipeline_parallel": prefill.stages,
            "token_budget": 32,
        },
        "decode": {
            "tensor_parallel": decode.tensor,
            "pipeline_parallel": decode.stages,
            "expert_parallel": decode.experts,
            "cache_blocks": cache_blocks,
        },
        "supervisor": {"heartbeat_s": 0.2},
    }
    return from_tree(tree)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("model"), seed=21, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("mixtral", tmp_path_factory.mktemp("mixture"), seed=25, vocab_size=VOCAB_SIZE)


def repr_of(degrees: object) -> str | None:
    return f"{degrees.tensor}x{degrees.stages}x{degrees.experts}" if isinstance(degrees, Degrees) else None


BACK_WITHIN_S = 10.0
ONE, TWO, FOUR = Degrees(), Degrees(2), Degrees(4)
STAGES, BOTH = Degrees(1, 2), Degrees(2, 2)
PAIRS = [(ONE, TWO), (TWO, ONE), (STAGES, STAGES)]
SLOW_PAIRS = [
    (TWO, TWO), (FOUR, ONE), (ONE, FOUR), (TWO, FOUR), (FOUR, TWO), (FOUR, FOUR),
    (ONE, STAGES), (STAGES, ONE), (TWO, STAGES), (STAGES, TWO), (BOTH, ONE), (TWO, BOTH),
]  # fmt: skip


@pytest.mark.parametrize(
    ("prefill", "decode"), [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW_PAIRS)], ids=repr_of
)
async def test_every_pair_of_degrees_gives_the_same_tokens(folder: Path, prefill: Degrees, decode: Degrees) -> None:
    await check_tokens(folder, prefill, decode)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (TWO, STAGES),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in ((TWO, FOUR), (FOUR, TWO), (STAGES, TWO), (ONE, BOTH), (BOTH, FOUR))
        ),
    ],
    ids=repr_of,
)
async def test_pairs_whose_ranks_have_stores_of_their_own_give_the_same_tokens(
    folder: Path,
    prefill: Degrees,
    decode: Degrees,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(OWN_STORES_VARIABLE, "1")
    await check_tokens(folder, prefill, decode)
    said = capfd.readouterr().err
    assert all(f"kv_pool-0 to decode-0/cache/{rank}: channel" in said for rank in range(decode.ranks))


@pytest.mark.parametrize("prefill", [ONE, pytest.param(TWO, marks=pytest.mark.slow)], ids=repr_of)
async def test_ranks_that_share_experts_give_the_same_tokens(mixture: Path, prefill: Degrees) -> None:
    await check_tokens(mixture, prefill, Degrees(experts=2))


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("mixtral", 2),
        *(pytest.param(kind, 2, marks=pytest.mark.slow) for kind in ("qwen3_moe", "gpt_oss")),
        *(pytest.param(kind, 4, marks=pytest.mark.slow) for kind in ("mixtral", "qwen3_moe", "gpt_oss")),
    ],
)
async def test_ranks_that_share_experts_and_have_a_cache_each_give_the_same_tokens(
    kind: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(OWN_STORES_VARIABLE, "1")
    folder = make_model(kind, tmp_path / kind, seed=25, vocab_size=VOCAB_SIZE)
    await check_tokens(folder, TWO if ranks == 2 else ONE, Degrees(experts=ranks), cache_blocks=60 * ranks)
    said = capfd.readouterr().err
    assert all(f"kv_pool-0 to decode-0/cache/{rank}: channel" in said for rank in range(ranks))
    assert "decode-0/cache/0 to decode-0/cache/1: channel" in said


async def test_requests_that_move_between_ranks_give_the_same_tokens(
    mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long and short answers by turns: when the short ones of a rank have ended, the other gives it some of its own."""
    monkeypatch.setenv(OWN_STORES_VARIABLE, "1")
    reference, prompts = load_reference(mixture), random_prompts((24,) * 12, VOCAB_SIZE, seed=27)
    counts = [(4, 70)[number % 2] for number in range(len(prompts))]
    async with LocalCluster(config(mixture, ONE, Degrees(experts=2), 400)) as cluster:
        await cluster.wait_ready()
        async with Driver(cluster.address("scheduler-0"), cluster.token) as driver:
            for _ in range(3):
                answers = [
                    driver.submit(prompt, replace(GREEDY, max_tokens=count))[0]
                    for prompt, count in zip(prompts, counts, strict=True)
                ]
                await driver.wait(answers, 120)
                for prompt, count, answer in zip(prompts, counts, answers, strict=True):
                    assert answer.tokens == greedy(reference, prompt, count, answer.tokens)
            metrics = await wait_nothing_held(cluster)
    assert value(metrics, "alignedserve_decode_moves_total") > 0
    assert value(metrics, "alignedserve_decode_moved_blocks_total") > 0
    assert value(metrics, "alignedserve_kv_checksum_mismatches_total") == 0


async def check_tokens(folder: Path, prefill: Degrees, decode: Degrees, cache_blocks: int = 80) -> None:
    """Every answer is that of `transformers`, twice, and no rank is left in the end."""
    prompts, reference = random_prompts(LENGTHS, VOCAB_SIZE, seed=22), load_reference(folder)
    async with LocalCluster(config(folder, prefill, decode, cache_blocks)) as cluster:
        await cluster.wait_ready()
        pids = cluster.pids
        others = [pid for role in ("prefill-0", "decode-0") for pid in ranks_of(pids[role])]
        assert len(others) == prefill.ranks + decode.ranks - 2
        async with Driver(cluster.address("scheduler-0"), cluster.token) as driver:
            for _ in range(2):  # prompts of the second round are in the prefix cache
                for prompt, answer in zip(prompts, await driver.generate(prompts, GREEDY), strict=True):
                    assert answer.error is None
                    assert answer.tokens == greedy(reference, prompt, NEW_TOKENS, answer.tokens)
            await wait_nothing_held(cluster)
        status = await cluster.status()
        told, metrics = {peer.process.id: peer.holds for peer in status.peers}, status.metrics
        for role, degrees in (("prefill-0", prefill), ("decode-0", decode)):
            assert (str(degrees) in told[role]) == (degrees.ranks > 1)
            assert all(str(pid) in told[role] for pid in ranks_of(pids[role]))
            assert told[role].count("pid ") == (degrees.ranks if degrees.ranks > 1 else 0)
            assert told[role].count("layer") == (degrees.ranks if degrees.stages > 1 else 0)
            each = [
                f'alignedserve_rank_weight_bytes{{instance="{role}",rank="{rank}"}}' for rank in range(degrees.ranks)
            ]
            assert all((name in metrics) == (degrees.ranks > 1) for name in each)
    await wait_ended(others)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
@pytest.mark.parametrize("role_id", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("degrees", [TWO, pytest.param(STAGES, marks=pytest.mark.slow)], ids=repr_of)
async def test_the_death_of_a_rank_is_that_of_its_instance_and_costs_no_token(
    folder: Path, degrees: Degrees, role_id: str, number: int
) -> None:
    """Also of one that is stopped."""
    await check_death(folder, degrees, degrees, role_id, number)


@pytest.mark.slow
@pytest.mark.parametrize(("role_id", "victim"), [("decode-0", 0), ("decode-0", -1), ("prefill-0", 1)])
@pytest.mark.parametrize("degrees", [FOUR, BOTH], ids=repr_of)
async def test_the_death_of_any_of_several_ranks_is_that_of_its_instance(
    folder: Path, degrees: Degrees, role_id: str, victim: int
) -> None:
    await check_death(folder, degrees, degrees, role_id, signal.SIGKILL, victim)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "own"), [(signal.SIGKILL, "0"), (signal.SIGKILL, "1"), (signal.SIGSTOP, "0")])
async def test_the_death_of_a_rank_that_has_experts_costs_no_token(
    mixture: Path, number: int, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over one store, or a store for each rank."""
    monkeypatch.setenv(OWN_STORES_VARIABLE, own)
    await check_death(mixture, ONE, Degrees(experts=2), "decode-0", number)


async def check_death(
    folder: Path, prefill: Degrees, decode: Degrees, role_id: str, number: int, victim: int = 0
) -> None:
    """`victim`: which of the other ranks."""
    prompts, reference = random_prompts(LENGTHS, VOCAB_SIZE, seed=23), load_reference(folder)
    async with LocalCluster(config(folder, prefill, decode)) as cluster:
        await cluster.wait_ready()
        async with Driver(cluster.address("scheduler-0"), cluster.token, resubmit=True) as driver:
            incarnation = cluster.peer(role_id).process.incarnation
            others = ranks_of(cluster.pids[role_id])
            answers = [driver.submit(prompt, GREEDY)[0] for prompt in prompts]
            async with asyncio.timeout(60.0):
                while not any(len(answer.tokens) > 2 for answer in answers):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            os.kill(others[victim], number)
            restarted = asyncio.create_task(
                cluster.wait_restarted(role_id, incarnation, timeout_s=BACK_WITHIN_S * slowness())
            )
            answers += [driver.submit(prompt, GREEDY)[0] for prompt in prompts]  # so that both roles have work
            await driver.wait(answers, 120)
            for prompt, answer in zip([*prompts, *prompts], answers, strict=True):
                assert answer.tokens == greedy(reference, prompt, NEW_TOKENS, answer.tokens)
            await restarted
            await wait_nothing_held(cluster)
            await wait_ended(others)
            again = ranks_of(cluster.pids[role_id])
            assert len(again) == len(others)
            cluster.kill(role_id)
            await wait_ended(again)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_rank_that_is_lost_while_it_loads_or_is_idle_is_replaced_within_ten_seconds(
    folder: Path, number: int
) -> None:
    prompts, reference = random_prompts(LENGTHS, VOCAB_SIZE, seed=24), load_reference(folder)
    async with LocalCluster(config(folder, TWO, TWO)) as cluster:
        async with asyncio.timeout(30.0):
            while not (loading := ranks_of(cluster.pids.get("decode-0", 0))):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert cluster.supervisor.core.state() != "ready"
        os.kill(loading[0], number)
        await cluster.wait_ready()
        incarnation = cluster.peer("decode-0").process.incarnation
        (idle,) = ranks_of(cluster.pids["decode-0"])
        os.kill(idle, number)
        await cluster.wait_restarted("decode-0", incarnation, timeout_s=BACK_WITHIN_S * slowness())
        async with Driver(cluster.address("scheduler-0"), cluster.token) as driver:
            for prompt, answer in zip(prompts, await driver.generate(prompts, GREEDY), strict=True):
                assert answer.tokens == greedy(reference, prompt, NEW_TOKENS, answer.tokens)
        await wait_ended([*loading, idle])
