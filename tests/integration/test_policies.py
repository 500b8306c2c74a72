"""A cluster with each policy that serves: the same tokens, nothing left behind, and it is that policy that decided."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from alignedserve.cluster.local import LocalCluster
from alignedserve.cluster.runtime_dir import cluster_dir
from alignedserve.config_sources import load
from alignedserve.control.samples import value
from alignedserve.request import SamplingParams
from alignedserve.scheduler.systems import FOLDER_VARIABLE, served_settings
from alignedserve.testing.models import make_model
from alignedserve.testing.reference import greedy, load_reference, random_prompts
from support.driver import Answer, Driver
from support.faulty_roles import FOLDER
from support.held import nothing_held
from support.traced_roles import EVEN, TRACE

EXAMPLE = Path(__file__).parents[2] / "examples/shortest_first.py"
SHIPPED = Path(__file__).parents[2] / "scheduler/cost/data"
POLICIES = "alignedserve.scheduler.policies"
BUBBLES = "alignedserve_iteration_bubble_seconds"
LENGTHS = (12, 130, 8, 90, 20, 150, 33, 5, 110, 16, 70, 26)
VOCAB_SIZE = 400
NEW_TOKENS = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


@dataclass(frozen=True)
class Served:
    answers: list[Answer]
    metrics: str
    classes: set[str]  # that formed batches
    learned: str  # the metrics after more load, if it was asked for


def serve(policy: str, folder: Path, *, times: int = 1, learn: bool = False, **flags: object) -> Served:
    """Serve prompts of LENGTHS, `times` of each, all at once with a policy, configured as `alignedserve serve` does.

    `learn`: afterwards, serve until rounds go in order of arrival.
    """
    model, trace = make_model("llama", folder / "m", seed=41, vocab_size=VOCAB_SIZE), folder / "trace"
    keys = {
        "scheduler.policy": policy,
        "model.path": str(model),
        "cluster.device": "cpu",
        "cluster.threads": 1,
        "kv_pool.size_gib": 0.1,
        "kv_pool.block_size": 4,
        "decode.cache_blocks": 90,  # of the 232 that all requests come to: several batches
        "scheduler.min_batch_requests": 3,
        "supervisor.heartbeat_s": 0.2,
        "supervisor.fence_after_s": 60.0,
        "supervisor.stall_after_s": 60.0,
    }
    config = load(environ={}, flags={**keys, **flags}, settings_of=served_settings)
    prompts = random_prompts(LENGTHS * times, VOCAB_SIZE, seed=42)

    async def run() -> tuple[list[Answer], str, Path, str]:
        environment, hold = {TRACE: str(trace), FOLDER: str(folder)}, folder / "hang-decode"
        if learn:  # the noise of a busy machine would only delay it
            environment[EVEN] = "1"
        module = "support.traced_roles"
        async with LocalCluster(config, environment=environment, output_dir=folder, module=module) as cluster:
            await cluster.wait_ready()
            async with Driver(cluster.address("scheduler-0"), cluster.token, resubmit=True) as driver:
                # All wait in the pool before the first iteration: there is a choice.
                hold.touch()
                answers = [driver.submit(prompt, GREEDY)[0] for prompt in prompts]
                while not all(answer.tokens or answer.error for answer in answers):  # noqa: ASYNC110  # no event
                    await asyncio.sleep(0.02)
                hold.unlink()
                await driver.wait(answers)
                metrics = await settled(cluster)
                assert list((await cluster.status()).degraded) == []  # also where a guarded policy was at fault
                learned = await in_order_of_arrival(cluster, driver) if learn else ""
                return answers, metrics, cluster_dir(cluster.cluster_id), learned

    answers, metrics, runtime, learned = asyncio.run(run())
    assert not runtime.exists()
    classes = set(trace.read_text().split())
    assert {named for named in classes if value(metrics, "alignedserve_scheduler_policy", policy=named)} == classes
    return Served(answers, metrics, classes, learned)


async def settled(cluster: LocalCluster, timeout_s: float = 10.0) -> str:
    """The metrics once every role has reported that it holds nothing; those of the last look where one does."""
    await asyncio.sleep(0.3)  # what was reported before the requests came says nothing
    for _ in range(round(timeout_s / 0.1)):
        metrics = (await cluster.status()).metrics
        if not value(metrics, "alignedserve_kv_blocks", state="owned"):
            break
        await asyncio.sleep(0.1)
    return metrics


async def in_order_of_arrival(cluster: LocalCluster, driver: Driver, timeout_s: float = 60.0) -> str:
    """The metrics once rounds go in order of arrival, under more load than the cache holds."""
    open_answers: list[Answer] = []
    numbers = itertools.count()
    async with asyncio.timeout(timeout_s):
        metrics = ""
        while not value(metrics, "alignedserve_decode_in_order_of_arrival", decode="decode-0"):
            open_answers = [answer for answer in open_answers if not answer.done.is_set()]
            for number in itertools.islice(numbers, 2 * len(LENGTHS) - len(open_answers)):
                (prompt,) = random_prompts(LENGTHS[number % len(LENGTHS) :][:1], VOCAB_SIZE, seed=number)
                sampling = SamplingParams(temperature=0.0, max_tokens=10 + 7 * number % 31, ignore_eos=True)
                open_answers += driver.submit(prompt, sampling)
            await asyncio.sleep(0.05)
            metrics = (await cluster.status()).metrics
        await driver.wait(open_answers)
    return metrics


def through_buffers(metrics: str) -> float:
    """Copies from the pool to the candidate buffers of the prefill instance."""
    copies = (line for line in metrics.splitlines() if line.startswith("alignedserve_transfer_copies_total"))
    into = ('destination="prefill-0/batch', 'destination="prefill-0/requests')
    return sum(float(line.rpartition(" ")[2]) for line in copies if any(buffer in line for buffer in into))


def bubble_share(served: Served) -> float:
    """Of the predicted time of the decode instance's iterations."""
    predicted_s = value(served.metrics, "alignedserve_iteration_predicted_seconds_total", instance="decode-0")
    return value(served.metrics, f"{BUBBLES}_sum", instance="decode-0") / predicted_s


@pytest.fixture(scope="module")
def aligned(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return serve("aligned", tmp_path_factory.mktemp("aligned"), learn=True)


def check(served: Served, aligned: Served) -> None:
    assert [answer.error for answer in served.answers] == [None] * len(aligned.answers)
    assert [answer.tokens for answer in served.answers] == [answer.tokens for answer in aligned.answers]
    assert nothing_held(served.metrics)


def test_aligned_serves_what_generate_gives(aligned: Served, tmp_path: Path) -> None:
    reference = load_reference(make_model("llama", tmp_path, seed=41, vocab_size=VOCAB_SIZE))
    prompts = random_prompts(LENGTHS, VOCAB_SIZE, seed=42)
    for prompt, answer in zip(prompts, aligned.answers, strict=True):
        assert answer.tokens == greedy(reference, prompt, NEW_TOKENS, answer.tokens)
    assert aligned.classes == {f"{POLICIES}.rounds:RoundsPolicy"}
    assert through_buffers(aligned.metrics) > 0
    check(aligned, aligned)


def test_rounds_go_in_order_of_arrival_once_a_cpu_has_shown_that_unequal_lengths_cost_nothing(aligned: Served) -> None:
    """Each request's attention is computed on its own there. At first they go by length."""
    name = "alignedserve_decode_in_order_of_arrival"
    assert value(aligned.metrics, name, decode="decode-0") == 0
    assert value(aligned.learned, name, decode="decode-0") == 1


@pytest.mark.parametrize(
    ("policy", "decides"),
    [
        pytest.param("aligned-no-prefetch", "rounds:RoundsPolicy", marks=pytest.mark.slow),
        pytest.param("aligned-no-prefetch-fcfs", "fcfs:FcfsPolicy", marks=pytest.mark.slow),
    ],
)
def test_without_prefetching_nothing_goes_through_the_buffers(
    policy: str, decides: str, aligned: Served, tmp_path: Path
) -> None:
    served = serve(policy, tmp_path)
    check(served, aligned)
    assert served.classes == {f"{POLICIES}.{decides}"}
    assert through_buffers(served.metrics) == 0


@pytest.mark.slow
def test_where_lengths_decide_an_iterations_time_rounds_lose_less_to_them_than_fcfs(tmp_path: Path) -> None:
    cost = json.loads((SHIPPED / "a100-opt-13b.json").read_text())
    cost["dense"]["us"], cost["dense_decode"]["us"] = [1.0, 2.0], [1.0] * len(cost["dense_decode"]["tokens"])
    cost["skew"]["buckets"] = [[0, 0, 0, 0, 0, 1.0]]  # as slow as if all were the longest
    (tmp_path / "cost.json").write_text(json.dumps(cost))
    flags = {"scheduler.cost_model": str(tmp_path / "cost.json"), "times": 4}
    fcfs, rounds = (serve(policy, tmp_path / policy, **flags) for policy in ("fcfs", "aligned"))
    check(fcfs, rounds)
    assert (fcfs.classes, rounds.classes) == ({f"{POLICIES}.fcfs:FcfsPolicy"}, {f"{POLICIES}.rounds:RoundsPolicy"})
    assert through_buffers(fcfs.metrics) > 0
    assert bubble_share(rounds) < 0.9 * bubble_share(fcfs)


@pytest.mark.slow
def test_the_papers_waiting_rule(aligned: Served, tmp_path: Path) -> None:
    """`aligned` has the default rule, and the last test the third one."""
    served = serve("aligned", tmp_path, **{"scheduler.waiting_rule": "paper"})
    check(served, aligned)
    assert served.classes == {f"{POLICIES}.paper_rule:PaperRulePolicy"}


@pytest.mark.slow
def test_aligned_cost_with_a_cost_model_that_ships(aligned: Served, tmp_path: Path) -> None:
    served = serve("aligned-cost", tmp_path, **{"scheduler.cost_model": "rtxpro6000-llama-3.1-8b"})
    check(served, aligned)
    assert served.classes == {f"{POLICIES}.aligned_cost:AlignedCostPolicy"}
    assert value(served.metrics, f"{BUBBLES}_count", instance="decode-0") >= NEW_TOKENS - 1
    assert 0 < bubble_share(served) < 1
    assert value(aligned.metrics, f"{BUBBLES}_count") == 0  # it has no cost model


def test_a_class_beside_the_command_that_names_it(
    aligned: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Roles have another working directory (under Ray): a copy that only the variable leads to."""
    folder = tmp_path / "own"
    folder.mkdir()
    shutil.copy(EXAMPLE, folder / "my_shortest_first.py")
    monkeypatch.syspath_prepend(folder)  # undone at the end, unlike what looking for a policy adds
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))

    served = serve("my_shortest_first:ShortestFirst", tmp_path)

    check(served, aligned)
    assert served.classes == {"my_shortest_first:ShortestFirst"}


@pytest.mark.parametrize(
    ("rule", "decides"),
    [("overdue", "aligned:AlignedPolicy"), pytest.param("rounds", "rounds:RoundsPolicy", marks=pytest.mark.slow)],
)
def test_with_an_objective_that_only_one_request_meets_they_run_one_after_the_other(
    rule: str, decides: str, aligned: Served, tmp_path: Path
) -> None:
    never = {"scheduler.tpot_objective_s": 1e-6, "scheduler.refuse_for_load": False}
    served = serve("aligned", tmp_path, **never, **{"scheduler.waiting_rule": rule})
    check(served, aligned)
    assert served.classes == {f"{POLICIES}.{decides}"}
    iterations, most = "alignedserve_decode_iterations_total", "alignedserve_decode_max_running"
    assert value(served.metrics, iterations) == len(LENGTHS) * (NEW_TOKENS - 1)
    assert value(served.metrics, "alignedserve_decode_held_iterations_total") > 0
    assert value(served.metrics, most) == 256  # it is empty again
    assert value(aligned.metrics, iterations) < len(LENGTHS) * (NEW_TOKENS - 1)
    assert value(aligned.metrics, "alignedserve_decode_held_iterations_total") == 0
    assert value(aligned.metrics, most) == 256
