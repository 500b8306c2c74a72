"""benchmarks/gpu: the suite's declaration, how it keeps its results, and each group's logic at toy size on a CPU."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks/gpu"))

from gpu_suite import __main__ as suite  # noqa: E402
from gpu_suite import report  # noqa: E402
from gpu_suite.cases import (  # noqa: E402
    bandwidth,
    iteration,
    kernels,
    pool,
    prefill,
    rank_times,
    ranks,
    throughput,
    tokens,
    transfers,
)
from gpu_suite.groups import GROUPS, MOST_S, Group, planned_s  # noqa: E402
from gpu_suite.models import random_model, read_weight_bytes  # noqa: E402
from gpu_suite.offline import Job, Offline, decode_engine  # noqa: E402
from gpu_suite.record import Context, Recorder, read_records  # noqa: E402
from gpu_suite.reference import Agreement, agreement, greedy  # noqa: E402
from gpu_suite.requests import draw_lengths  # noqa: E402
from gpu_suite.rows import BY_KEY, ROWS  # noqa: E402
from gpu_suite.trace import STEP, idle_of  # noqa: E402

from alignedserve.engine.model.loader import LoadedModel  # noqa: E402
from alignedserve.engine.runner import ModelRunner, allocate_cache  # noqa: E402
from alignedserve.ranks.degrees import Degrees  # noqa: E402
from alignedserve.testing.models import KINDS, make_model  # noqa: E402

DOCUMENT = ROOT / "docs/measurements/gpu.md"


def context(folder: Path, group: str = "test") -> Context:
    return Context("cpu", True, folder, folder, Recorder(folder / f"{group}.jsonl", group), seed=5)


def figures(of: Context) -> dict[str, dict[str, Any]]:
    records = read_records(of.work / f"{of.record.group}.jsonl")
    assert not [record["traceback"] for record in records if "error" in record]
    return {record["figure"]: record for record in records if "figure" in record}


# ---- what is declared


def test_every_row_is_in_the_document_with_its_bound_and_the_command_that_measures_it() -> None:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    for row in ROWS:
        assert [line for line in lines if row.what in line and row.bound in line and row.command in line], row.key


def test_all_groups_together_take_less_than_a_call_may() -> None:
    assert planned_s() <= MOST_S <= 570
    assert len({group.name for group in GROUPS}) == len(GROUPS)
    for group in GROUPS:
        assert (ROOT / "benchmarks/gpu" / f"{group.module.replace('.', '/')}.py").is_file()
    assert {row.group for row in ROWS} <= {group.name for group in GROUPS}


def test_an_unknown_group_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(SystemExit, match=r"nonsense; there are: kernels.*sweep"):
        suite.chosen("pool,nonsense")
    assert [group.name for group in suite.chosen("pool,tokens")] == ["tokens", "pool"]
    assert not any(group.extra for group in suite.chosen(""))


def test_on_a_cpu_where_nothing_is_measured_each_group_has_longer() -> None:
    gpu, cpu = (suite.on_device(GROUPS, device) for device in ("cuda", "cpu"))
    assert gpu == list(GROUPS)
    assert [group.budget_s for group in cpu] == [4 * group.budget_s for group in GROUPS]
    assert planned_s(tuple(cpu)) <= MOST_S * suite.patience("cpu")


# ---- what is kept


def test_what_is_not_installed_is_said_before_any_group_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "NEEDED", {"json": "json", "no_such_module": "no-such-package"})
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["run.sh", "--device", "cpu", "--only", "pool", "--out", str(out)])
    with pytest.raises(SystemExit, match=r"no-such-package.*PYTHON") as refused:
        suite.main()
    assert "json" not in str(refused.value)
    assert not out.exists()


def test_a_machine_without_a_gpu_is_told_of_the_run_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "count_gpus", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="--device cpu"):
        suite.require_gpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    suite.require_gpu()


def test_a_case_that_fails_is_recorded_with_its_traceback_and_the_next_one_goes_on(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "g.jsonl", "g")
    with recorder.case("breaks", row="idle"):
        raise ValueError("no kernel")
    with recorder.case("goes on"):
        recorder.figure("idle", 0.01, "of the time", row="idle", samples=[3.0, 1.0, 2.0])
        recorder.figure("idle too long", 0.03, "of the time", row="idle")
        recorder.figure("idle unknown", math.nan, "of the time", row="idle")
    with (tmp_path / "g.jsonl").open("a") as lines:
        lines.write('{"half a li')
    records = read_records(tmp_path / "g.jsonl")
    failure = next(record for record in records if "error" in record)
    assert (failure["case"], failure["error"], failure["row"]) == ("breaks", "ValueError: no kernel", "idle")
    assert "test_gpu_suite.py" in failure["traceback"]
    found = {record["figure"]: record for record in records if "figure" in record}
    assert [record["met"] for record in found.values()] == [True, False, False]
    assert found["idle"]["samples"]["median"] == 2.0
    assert found["idle unknown"]["value"] == "nan"


def machine(device: str) -> dict[str, Any]:
    smi = {"driver_version": "1.2"}
    gpu = {"name": "NVIDIA Made-Up", "cuda": "13.0"} if device == "cuda" else None
    return {"device": device, "nvidia_smi": smi, "gpu": gpu, "python": "3", "packages": {}, "commit": "c", "date": "d"}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_table_has_every_row_and_no_figure_of_a_cpu(device: str, tmp_path: Path) -> None:
    recorder = Recorder(report.records_file(tmp_path, "prefill"), "prefill")
    recorder.figure("llama", 0.625, "of the rate", row="prefill")
    recorder.figure("opt", 0.5, "of the rate", row="prefill")
    failed = {"status": "failed", "reason": "one case broke", "seconds": 1.0}
    results = report.write_results(tmp_path, tmp_path, machine(device), ["run"], {"prefill": failed, "pool": failed})
    table = (tmp_path / "table.md").read_text()
    rows = {row["key"]: row for row in json.loads((tmp_path / "results.json").read_text())["rows"]}
    assert list(rows) == [row.key for row in ROWS]
    assert results["measured_on_gpu"] == (device == "cuda")
    for row in ROWS:
        assert f"| {row.what} | {row.bound} |" in table
    if device == "cpu":
        assert "0.625" not in table
        assert {row["met"] for row in rows.values()} == {"not measured"}
        return
    assert (rows["prefill"]["measured"], rows["prefill"]["met"]) == (
        "llama: 0.625 of the rate; opt: 0.5 of the rate",
        "no",
    )
    assert rows["pool-copies"]["measured"] == "not measured: one case broke"
    assert rows["idle"]["measured"] == "not measured"
    assert "- `prefill`: failed: one case broke" in table


def test_a_group_that_crashes_or_hangs_takes_nothing_from_the_others(tmp_path: Path) -> None:
    code = {
        "sound": "",
        "crashes": "import os; os.abort()",
        "hangs": "import time; time.sleep(60)",
        "late": "",
    }
    write = (
        "import sys; from pathlib import Path; from gpu_suite.record import Recorder; "
        "Recorder(Path(sys.argv[1]), 'g').figure('before', 1.0, '', row='prefill'); "
    )

    limits_s: dict[str, float] = {}

    def command(group: Group, args: argparse.Namespace, work: Path, limit_s: float) -> list[str]:
        limits_s[group.name] = limit_s
        text = f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks/gpu')!r}); {write}{code[group.name]}"
        return [sys.executable, "-c", text, str(report.records_file(work, group.name))]

    groups = [Group(name, 2.0 if name == "hangs" else 30.0, "", timed=name == "late") for name in code]
    args = argparse.Namespace(device="cpu", quick=True, out=tmp_path, limit_s=60.0)
    (tmp_path / "work").mkdir()
    ran = suite.Suite(args, groups, tmp_path / "work", command)
    ran.run()
    status = {name: ended["status"] for name, ended in ran.ended.items()}
    assert status == {"sound": "ok", "crashes": "failed", "hangs": "out of time", "late": "ok"}
    assert limits_s["hangs"] == 2.0
    assert 40.0 < limits_s["late"] < 58.0  # its own 30 s, and the time that the other groups left
    kept = json.loads((tmp_path / "results.json").read_text())["groups"]
    assert all(group["records"][0]["figure"] == "before" for group in kept.values())
    assert {file.name for file in tmp_path.iterdir()} == {"work", "results.json", "table.md", "logs.txt"}


# ---- how figures are found


def event(cat: str, begin: float, length: float, correlation: int | None = None, name: str = "k") -> dict[str, Any]:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": length, "args": args}


def test_idle_time_is_what_lies_between_iterations_not_within_them() -> None:
    events = []
    for step in range(4):
        host, device = 10.0 * step, 100.0 + 50.0 * step
        events.append(event("user_annotation", host, 5.0, name=STEP))
        events.append(event("gpu_user_annotation", device, 40.0, name=STEP))
        events.append(event("cuda_runtime", host + 1.0, 1.0, step, name="cudaGraphLaunch"))
        # Two kernels of one graph, 4 apart; the last one ends 10 before the next iteration's first.
        events += [event("kernel", device, 16.0, step), event("kernel", device + 20.0, 20.0, step)]
    events.append(event("kernel", 5.0, 1.0, 99))  # of no launch
    idle = idle_of(events)
    assert (idle.iterations, idle.total_s) == (4, pytest.approx(190e-6))
    assert idle.between_s == pytest.approx(30e-6)
    assert idle.within_s == pytest.approx(16e-6)
    assert idle.share == pytest.approx(30 / 190)
    with pytest.raises(ValueError, match="had work on the device"):
        idle_of(events[:6])


def test_drawn_lengths_are_sharegpts() -> None:
    lengths = draw_lengths(4000, seed=1)
    assert 150 < sum(one.prompt for one in lengths) / 4000 < 175
    assert 315 < sum(one.answer for one in lengths) / 4000 < 360
    assert max(one.prompt + one.answer for one in lengths) <= 2048
    assert draw_lengths(4, 3) == draw_lengths(4, 3) != draw_lengths(4, 4)


def test_weights_that_an_iteration_reads_leave_out_what_is_only_looked_up() -> None:
    untied = random_model("llama-2-7b", "cpu", small=True, dtype=torch.bfloat16, seed=1)
    tied = random_model("opt-6.7b", "cpu", small=True, dtype=torch.bfloat16, seed=1)
    table = untied.model.get_input_embeddings().weight.nbytes
    assert read_weight_bytes(untied) == untied.info.weight_bytes - table
    positions = next(p for name, p in tied.model.named_parameters() if "embed_positions" in name)
    assert read_weight_bytes(tied) == tied.info.weight_bytes - positions.nbytes


# ---- the engine alone


def test_the_engine_alone_gives_generates_tokens_with_more_requests_than_fit_at_once(tmp_path: Path) -> None:
    loaded = random_model("llama-2-7b", "cpu", small=True, dtype=torch.float32, seed=3)
    prompts = [[(7 * i + n) % 500 + 2 for i in range(n)] for n in (5, 40, 17, 1, 23)]
    jobs = [Job(prompt, wanted) for prompt, wanted in zip(prompts, (9, 4, 1, 12, 6), strict=True)]
    runner = ModelRunner(loaded, allocate_cache(loaded.info.geometry(16), 6, "cpu"))
    engine = decode_engine(runner, 4)
    Offline(runner, engine, max_running=3, chunk_tokens=16).run(jobs)
    with pytest.raises(ValueError, match="does not fit"):
        Offline(runner, engine).run([Job([2] * 200, 4)])
    loaded.model.set_attn_implementation("sdpa")
    expected = [greedy(loaded.model, job.prompt, job.new_tokens) for job in jobs]
    assert [job.tokens for job in jobs] == expected
    found = agreement(loaded.model, prompts, [job.tokens for job in jobs], expected)
    assert (found.equal_answers, found.wrong) == (5, [])
    expected[1] = [*expected[1][:2], (expected[1][2] + 1) % 500, expected[1][3]]
    assert agreement(loaded.model, prompts, [job.tokens for job in jobs], expected).equal_answers == 4


def test_rounding_is_what_lower_precision_is_off_by() -> None:
    loaded = random_model("llama-2-7b", "cpu", small=True, dtype=torch.bfloat16, seed=3)
    loaded.model.set_attn_implementation("sdpa")
    prompts = [[3 + i for i in range(12)], [9, 8, 7]]
    answers = [greedy(loaded.model, prompt, 12) for prompt in prompts]
    found = agreement(loaded.model, prompts, answers, answers)
    assert (found.equal_answers, found.same_before) == (2, found.before)
    assert 0 < found.before <= found.tokens == 24
    wrong = [[(token + 1) % 500 for token in answer] for answer in answers]
    other = agreement(loaded.model, prompts, wrong, answers)
    assert other.same_before == 0
    assert other.before == found.before
    total = Agreement()
    total.add(found)
    total.add(other)
    assert (total.answers, total.share) == (4, found.share)


# ---- each group at toy size


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_can_have_the_shape_that_a_gpu_compares(kind: str, tmp_path: Path) -> None:
    make_model(kind, tmp_path, seed=1, **{**tokens.SHAPE, "hidden_size": 64, "head_dim": 16, "intermediate_size": 32})
    made = AutoConfig.from_pretrained(tmp_path, local_files_only=True)
    assert made.num_hidden_layers == tokens.SHAPE["num_hidden_layers"]


def test_models_tokens_are_compared_with_transformers(tmp_path: Path) -> None:
    of, total = context(tmp_path), Agreement()
    tokens._compare_kind(of, "llama", torch.float32, total)
    tokens.report(of, "tokens-fp32", "llama", total, torch.float32)
    assert figures(of)["llama, answers equal (fp32)"]["met"] is True


def test_tokens_of_ranks_are_compared_with_transformers(tmp_path: Path) -> None:
    of = context(tmp_path)
    for name, degrees in ranks.WAYS.items():
        total = Agreement(wrong=[])
        ranks._compare(of, "llama" if degrees.experts == 1 else "mixtral", degrees, degrees, ["cpu"], total)
        tokens.report(of, ranks.ROW, name, total, torch.float32)
        assert figures(of)[f"{name}, answers equal (fp32)"]["met"] is True


@pytest.mark.slow
def test_ranks_are_timed_against_one_and_copies_of_unequal_degrees_against_equal_ones(tmp_path: Path) -> None:
    of = context(tmp_path)
    rank_times.run(of)
    found = figures(of)
    for name, degrees in rank_times.WAYS.items():
        if degrees.tensor <= 2:  # the toy has two heads
            assert found[f"{name}, an iteration over one rank's"]["value"] > 0
            assert found[f"{name}, a prompt over one rank's"]["value"] > 0
    assert found["2 ranks to 2 stages, over 2 ranks to 2"]["value"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode"), ranks.HANDED_OVER, ids=["stages decode", "stages prefill"])
def test_an_instance_continues_prompts_that_one_of_another_degree_computed(
    prefill: Degrees, decode: Degrees, tmp_path: Path
) -> None:
    of, total = context(tmp_path), Agreement(wrong=[])
    ranks._compare(of, "llama", prefill, decode, ["cpu"], total)
    tokens.report(of, ranks.ROW, "another degree", total, torch.float32)
    assert total.answers == 2
    assert figures(of)["another degree, answers equal (fp32)"]["met"] is True


def test_iterations_and_prefills_are_set_against_rates_of_the_same_run(tmp_path: Path) -> None:
    of = context(tmp_path)
    iteration.run(of)
    prefill.run(of)
    found = figures(of)
    assert found["llama-2-7b, 4 x 32"]["detail"]["bytes"] > 0
    assert found["opt-6.7b, iterations in the trace"]["value"] == iteration.TRACED
    assert found["opt-6.7b, 2 x 48"]["value"] > 0
    assert set(found["llama-2-7b, 2 x 48"]["detail"]["matrix_rate"]) == {"before", "after", "change"}


def test_both_sides_of_the_throughput_answer_the_same_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exact_model(*given: Any, **named: Any) -> LoadedModel:
        return random_model(*given, **named | {"dtype": torch.float32})

    monkeypatch.setattr(throughput, "random_model", exact_model)
    of = context(tmp_path)
    throughput.run(of)
    found = figures(of)
    ours, theirs = (found[name]["detail"] for name in ("our engine", "transformers"))
    assert (theirs["answered"], ours["answers_equal"]) == (6, 1.0)
    tokens = sum(one.answer for one in draw_lengths(6, of.seed, 0.02))
    assert found["6 requests, ours over transformers'"]["detail"]["output_tokens"] == ours["output_tokens"] == tokens


def test_transformers_that_has_not_answered_in_time_is_ended_and_counts_as_answered_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throughput, "THEIRS_S", 0.0)
    of = context(tmp_path)
    throughput.run(of)
    found = figures(of)
    assert found["transformers, at most"]["detail"]["answered"] == 0
    assert found["6 requests, ours over transformers', at least"]["value"] < 10.0


def test_a_kernel_that_there_was_no_time_for_is_no_kernel_that_was_right(tmp_path: Path) -> None:
    of = context(tmp_path)
    of.ends_s = 0.0
    kernels._kernels_of(of, kernels.SMALL[0])
    (failed,) = [record for record in read_records(of.work / "test.jsonl") if "error" in record]
    assert failed["row"] == "kernels"
    assert "torch torch.float16" in failed["error"]


def test_copies_of_the_pool_are_set_against_a_large_one(tmp_path: Path) -> None:
    of = context(tmp_path)
    pool.run(of)
    judged = [record for record in figures(of).values() if record["row"] == "pool-copies"]
    assert [record["figure"].split(",")[0] for record in judged] == ["to HBM", "back"]
    assert BY_KEY["pool-copies"].met(0.91) is True


def test_a_block_that_differs_after_a_hand_over_is_counted(tmp_path: Path) -> None:
    of = context(tmp_path)
    with transfers._shared_memory(of) as ways:
        transfers.hand_over(of, "sound", ways)
        copy = ways[0][0].copy

        def lying(source_ids: Any, destination_ids: Any, **options: Any) -> Any:
            return copy([source_ids[0], *source_ids[:-1]], destination_ids, **options)

        ways[0][0].copy = lying  # type: ignore[method-assign]
        transfers.hand_over(of, "lying", [ways[0]])
    found = figures(of)
    assert found["sound, blocks that differ"]["met"] is True
    assert found["lying, blocks that differ"]["value"] > 100
    assert found["lying, blocks that differ"]["met"] is False


def test_what_a_thread_block_reads_is_run_in_the_interpreter(tmp_path: Path) -> None:
    of = context(tmp_path)
    bandwidth.run(of)
    assert figures(of)["sums of two programs"]["value"] < 1.0
