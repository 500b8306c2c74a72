"""benchmarks/paper: what the scripts share, and the quick path of each on small data."""

from __future__ import annotations

import csv
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from alignedserve.scheduler.instance.iteration import IterationScheduler
from alignedserve.simulator.report.summary import Objectives
from alignedserve.simulator.traces import Load, read_trace
from support.paper_scripts import RTX, figure, report, rows_of, script, simulated, small_data

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks/paper"))

from evaluation import figures, tables, workloads
from evaluation.grid import BALANCED, DECODE_BOUND, Case, Grid
from evaluation.runner import Runner
from evaluation.runs import (
    ALIGNED,
    ALIGNED_COST,
    FCFS,
    FCFS_10_MS,
    Machine,
    Outcome,
    Run,
    Topology,
    Variant,
    code_digest,
    execute,
)

pytestmark = pytest.mark.slow
MIX = workloads.mix("a mix", 12, short=0.75, output_max=80)
ONE_SEED = ("--topology", "2:1", "--kernel-modes", "split_kv", "--seeds", "1", "--limit", "20")
ONE = Run(MIX, FCFS, Machine(RTX), Topology(1, 1), None, 0)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return small_data(tmp_path)


# what they share


def test_figures_have_the_interval_over_the_seeds() -> None:
    assert tables.with_interval([1.0, 3.0]) == "2.00 ± 12.71"
    assert tables.with_interval([1234.5]) == "1,234"
    assert tables.with_interval([0.0251, 0.0251], scale=1e3) == "25.1 ± 0.0"
    assert tables.gain([1.1, 1.1]) == "1.100 ± 0.000"
    assert tables.percent([0.14733]) == "14.73 %"
    assert tables.with_interval([1.0, float("nan")]) == tables.gain([float("nan")]) == tables.NOTHING
    assert tables.ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    shown = tables.claims("what", ["a"], ["1.5"], [("here", ["1.2"])]).splitlines()
    assert shown == ["| what | a |", "| --- | ---: |", "| the paper's text | 1.5 |", "| ours: here | 1.2 |"]


def test_each_seed_has_a_window_of_a_trace_of_its_own_and_its_lengths_at_once(data: Path) -> None:
    (mooncake,), left_out = workloads.applications(data, (workloads.MOONCAKE,))
    assert not left_out
    source = mooncake.sized(1.0, 10)
    assert source.requests == 10
    rows = read_trace(mooncake.text).rows  # type: ignore[attr-defined]
    for seed in (0, 1):
        timed = source.trace(seed, at_once=False).workload(Load(2.0), seed).arrivals
        assert [one.input_tokens for one in timed] == [row.input_tokens for row in rows[10 * seed : 10 * seed + 10]]
        assert timed[-1].arrival_s == pytest.approx(9 / 2.0)
        at_once = source.trace(seed, at_once=True).workload(Load(), seed).arrivals
        assert {one.arrival_s for one in at_once} == {0.0}
        assert sorted(one.input_tokens for one in at_once) == sorted(one.input_tokens for one in timed)


def test_a_workload_is_scaled_as_far_as_its_file_goes(data: Path) -> None:
    (sharegpt,), _ = workloads.applications(data, (workloads.SHAREGPT,))
    assert [sharegpt.sized(scale, None).requests for scale in (0.01, 2.0)] == [12, 30]
    for scale, limit, expected in ((2.0, None, 24), (2.0, 13, 13), (0.5, None, 6), (1.0, 5, 5)):
        run = replace(ONE, source=MIX.sized(scale, limit))
        assert run.source.requests == expected
        assert len(run.plan().workload(None, 0).arrivals) == expected


def test_what_the_data_folder_lacks_is_left_out_and_said(tmp_path: Path) -> None:
    found, left_out = workloads.applications(tmp_path, (workloads.SHAREGPT,))
    assert not found
    assert left_out == ["ShareGPT-8k is left out: no lengths/sharegpt_8k_lengths.csv in --data"]
    assert "it needs --data DIR" in workloads.applications(None, (workloads.SHAREGPT,))[1][0]


def test_a_run_has_the_simulator_s_figures_and_the_iterations_with_what_was_charged() -> None:
    outcome = execute(ONE)
    found = simulated(MIX.text, "fcfs", 1, 0)
    assert {name: outcome.metrics[name] for name in found if name.startswith("decode_")} == {
        name: value for name, value in found.items() if name.startswith("decode_")
    }
    assert outcome.metrics["charged_p99_s"] == pytest.approx(found["iteration_p99_s"])
    assert outcome.iterations_s[-1] == pytest.approx(found["iteration_max_s"])
    assert outcome.share_within(found["iteration_p50_s"]) == pytest.approx(0.5, abs=0.01)
    assert outcome.share_within(0.0) == 0.0
    assert outcome.share_within(1e9) == 1.0
    charged = execute(replace(ONE, variant=FCFS_10_MS))
    assert charged.value("charged_mean_s") == pytest.approx(charged.value("iteration_mean_s") + 0.01)


def test_the_objective_that_goodput_counts_by_is_the_one_that_aligned_cost_keeps_to() -> None:
    run = replace(ONE, variant=ALIGNED_COST, source=replace(MIX, objectives=Objectives(1.0, 0.07)))
    (candidate,) = run.plan().candidates
    assert candidate.config.scheduler.tpot_objective_s == 0.07
    for variant in (ALIGNED, FCFS):  # with their defaults
        (candidate,) = replace(run, variant=variant).plan().candidates
        assert candidate.config.scheduler.tpot_objective_s == 0.0
    assert execute(run).metrics["refused"] == 0


def test_no_run_has_a_prefix_cache_unless_it_is_asked_for() -> None:
    cached = Variant("fcfs, cached", "fcfs", (("kv_pool.prefix_cache", "true"),))
    variants = (ALIGNED, ALIGNED_COST, FCFS_10_MS, Variant("Mooncake's", "mooncake"), cached)
    found = [candidate for one in variants for candidate in replace(ONE, variant=one).plan().candidates]
    assert [candidate.config.kv_pool.prefix_cache for candidate in found] == [False, False, False, True, True]


def test_an_interrupted_evaluation_goes_on_and_other_code_or_another_configuration_begins_anew(tmp_path: Path) -> None:
    runs = [ONE, replace(ONE, seed=1)]

    def evaluated(code: str, *wanted: Run) -> tuple[int, int, list[float]]:
        runner = Runner(tmp_path, 1, "a commit", quiet=True, code=code)
        before, seconds = runner.estimate(wanted)
        outcomes = runner.outcomes(wanted)
        assert runner.outcomes(wanted) == outcomes  # from memory
        assert before == runner.executed
        assert (seconds > 0) is (0 < runner.executed < len(wanted))  # from what others of the workload took
        assert runner.estimate(wanted) == (0, 0)
        return runner.executed, runner.read, [outcome.value("makespan_s") for outcome in outcomes.values()]

    executed, read, first = evaluated("c1", runs[0])
    assert (executed, read) == (1, 0)
    executed, read, both = evaluated("c1", *runs)
    assert (executed, read) == (1, 1)
    assert both[0] == first[0]
    assert evaluated("c1", *runs) == (0, 2, both)
    assert evaluated("c2", *runs) == (2, 0, both)
    assert evaluated("", *runs) == (2, 0, both)  # that of this checkout
    assert evaluated(code_digest(), *runs) == (0, 2, both)
    for other in (
        replace(ONE, source=MIX.sized(1.0, 11)),
        replace(ONE, machine=Machine(RTX, "no_split", 5.0)),
        replace(ONE, topology=Topology(2, 1)),
        replace(ONE, variant=replace(FCFS, settings=(("decode.max_running", "3"),))),
        replace(ONE, rate_per_s=3.0),
        replace(ONE, clients=3),
        replace(ONE, source=replace(MIX, objectives=workloads.DOCUMENTS)),
    ):
        assert evaluated("c1", other)[:2] == (1, 0), other


def test_processes_beside_each_other_give_what_one_gives() -> None:
    runs = [ONE, replace(ONE, variant=ALIGNED), replace(ONE, machine=Machine(RTX, "no_split", 10.0))]
    with Runner(None, 2, "c", quiet=True) as several, Runner(None, 1, "c", quiet=True) as one:
        assert several.outcomes(runs) == one.outcomes(runs)


def test_topologies_are_chosen_by_what_is_served() -> None:
    with Runner(None, 1, "c", quiet=True) as runner:
        grid = Grid(runner, (0,), decode=2)
        chosen = grid._choose({1: 10.0, 2: 19.0, 4: 20.0, 8: 20.1})
        assert chosen == {DECODE_BOUND: Topology(16, 2), BALANCED: Topology(4, 2)}
        case = Case(MIX, Machine(RTX), "3:2", None)
        assert grid.topology(case) == Topology(3, 2)
        runs = grid._runs(replace(case, load=0.5), FCFS)
        served = execute(replace(ONE, topology=Topology(3, 2))).value("throughput_requests_per_s")
        assert [run.rate_per_s for run in runs] == [pytest.approx(served / 2)]


# the scripts


def test_figure_7_has_the_simulator_s_throughput_beside_the_paper_s(capsys: pytest.CaptureFixture[str]) -> None:
    text = report(capsys, "figure07", "--topology", "2:1", "--loads", "at-once", "--seeds", "1")
    rows = rows_of(text, "workload")
    assert [row["workload"] for row in rows] == [f"{share} % short" for share in (70, 75, 80, 85, 90, 95)]
    for policy, column in (("aligned", "aligned"), ("fcfs", "fcfs"), ("vllm", "vllm"), ("fastgen", "fastgen")):
        expected = simulated("mix:short=0.95,requests=40", policy, 2, 0)["decode_throughput_tokens_per_s"]
        assert figure(rows[-1][column]) == pytest.approx(expected, rel=1e-3), policy
    last = rows[-1]
    assert figure(last["aligned / vllm"]) == pytest.approx(figure(last["aligned"]) / figure(last["vllm"]), abs=2e-3)
    assert figure(last["fcfs + 10 ms"]) < figure(last["fcfs"])
    stated, split, no_split = rows_of(text, "aligned over …, 95 % short")
    assert (stated["vllm"], stated["fcfs + 10 ms"], stated["fastgen"]) == ("1.32", "1.35 (DistServe)", "1.85")
    assert split["vllm"] == last["aligned / vllm"]
    assert no_split["aligned over …, 95 % short (OPT-2.7B in the paper)"].startswith("ours: no_split, 25 GB/s a block")
    expected = [
        simulated("mix:short=0.95,requests=40", policy, 2, 0, kernel_mode="no_split", block_bandwidth=25e9)
        for policy in ("aligned", "vllm")
    ]
    ratio = expected[0]["decode_throughput_tokens_per_s"] / expected[1]["decode_throughput_tokens_per_s"]
    assert figure(no_split["vllm"]) == pytest.approx(ratio, abs=1e-3)


@pytest.mark.parametrize("name", ["figure08", "figure10"])
def test_figures_8_and_10_have_each_application_s_largest_gain(
    capsys: pytest.CaptureFixture[str], data: Path, name: str
) -> None:
    arguments = ("--data", str(data), "--limit", "15", "--topology", "2:1", "--loads", "at-once", "--seeds", "2")
    text = report(capsys, name, *arguments, "--kernel-modes", "split_kv")
    rows = rows_of(text, "workload")
    stated, ours = rows_of(text, "aligned over any" if name == "figure08" else "times lower than any other")
    columns = ["fcfs", "fcfs + 10 ms", "vllm", "fastgen"]
    for row in rows:
        gains = [row[f"aligned / {other}" if name == "figure08" else f"{other} / aligned"] for other in columns]
        best = max(range(4), key=lambda number: figure(gains[number]))
        assert ours[row["workload"]] == f"{gains[best]} ({columns[best]})"
    assert stated["Mooncake"] == tables.NOT_STATED
    assert stated["ShareGPT-8k"] == ("1.35" if name == "figure08" else tables.NOT_STATED)
    assert "arXiv summarization stands for LongBench" in text


def test_requests_that_no_store_can_hold_are_told(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    trace = data / "traces/mooncake_synthetic_trace.jsonl"
    lines = trace.read_text().splitlines()
    lines[0] = json.dumps({"timestamp": 0, "input_length": 90_000, "output_length": 9, "hash_ids": [0]})
    trace.write_text("\n".join(lines) + "\n")
    arguments = ("--data", str(data), "--topology", "1:1", "--loads", "at-once", "--limit", "9", "--seeds", "1")
    modes = ("--kernel-modes", "split_kv")
    told = "requests refused over all runs, too long for a store: "
    text = report(capsys, "figure08", *arguments, *modes, "--cost-model", "a100-opt-13b")
    assert f"{told}aligned 1, fcfs 1, fcfs + 10 ms 1, vllm 1, fastgen 1" in text
    assert told not in report(capsys, "figure08", *arguments, *modes)


def test_figure_9_has_the_p99_of_iterations_and_its_extent(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--topology", "2:1", "--loads", "at-once", "--seeds", "1", "--kernel-modes", "split_kv")
    text = report(capsys, "figure09", *arguments)
    rows = rows_of(text, "workload")
    for policy in ("aligned", "fcfs", "vllm"):
        expected = simulated("mix:short=0.7,requests=40", policy, 2, 0)["iteration_p99_s"]
        assert figure(rows[0][policy]) == pytest.approx(1e3 * expected, rel=1e-3)
    gains = [figure(row[f"{other} / aligned"]) for row in rows for other in ("fcfs", "fcfs + 10 ms", "vllm", "fastgen")]
    stated, ours = rows_of(text, "times lower than any other")
    assert (stated["least"], stated["largest"]) == ("1.74", "3.05")
    assert (figure(ours["least"]), figure(ours["largest"])) == (min(gains), max(gains))


@pytest.mark.parametrize("wall", [(), ("--wall",)])
def test_figure_11_times_every_decision_and_says_what_it_did_not_measure(
    capsys: pytest.CaptureFixture[str], data: Path, wall: tuple[str, ...]
) -> None:
    plan = IterationScheduler.plan
    text = report(capsys, "figure11", "--data", str(data), "--topology", "1:1", "--limit", "6", "--seeds", "1", *wall)
    assert IterationScheduler.plan is plan
    rows = rows_of(text, "the decision alone")
    shown = ["ShareGPT-8k, aligned", "ShareGPT-8k, fcfs", "arXiv summarization, aligned", "arXiv summarization, fcfs"]
    assert [row["the decision alone"] for row in rows] == shown
    case = workloads.applications(data, (workloads.SHAREGPT,))[0][0].sized(1.0, 6)
    passes = execute(Run(case, FCFS, Machine(RTX), Topology(1, 1), None, 0)).metrics["iterations"]
    assert figure(rows[1]["iterations"]) == passes
    for row in rows:
        assert 0 < figure(row["P50, ms"]) <= figure(row["P95, ms"]) <= figure(row["P99, ms"])
    assert ("wall clock" in text) is bool(wall)
    (stated,) = rows_of(text, "the whole gap between two iterations, aligned")
    assert stated["within 5 ms"] == "more than 95 %"
    (stated,) = rows_of(text, "the whole gap between two iterations, fcfs")
    assert stated["within 10 ms"] == "less than 20 % (DistServe)"
    assert "Ours was not measured in this run" in text


def test_figure_12_has_both_readings(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--topology", "2:1", "--kernel-modes", "split_kv", "--limit", "20", "--seeds", "1")
    text = report(capsys, "figure12", *arguments, "--short-tokens", "300")
    rows = rows_of(text, "long requests, tokens")
    assert [row["long requests, tokens"] for row in rows] == ["2,000", "4,000", "6,000", "8,000", "10,000"]
    lengths = "short_min=300,short_max=300,long_min=10000,long_max=10000"
    expected = simulated(f"mix:short=0.05,requests=20,{lengths}", "fcfs", 2, 0)["iteration_mean_s"]
    assert figure(rows[-1]["fcfs"]) == pytest.approx(1e3 * expected, rel=5e-3)
    stated, long_rise, short_rise = rows_of(text, "times the latency at 10,000")
    assert stated["aligned"] == tables.NOT_STATED
    assert figure(long_rise["fcfs"]) == pytest.approx(figure(rows[-1]["fcfs"]) / figure(rows[0]["fcfs"]), rel=0.01)
    assert figure(short_rise["fcfs"]) < figure(long_rise["fcfs"])
    assert "95 % long, as printed" in text
    assert "95 % short; split_kv" in text


def test_figure_13_s_thresholds(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    figure13 = script("figure13")
    fast, slow = Outcome({}, tuple(n / 500 for n in range(501))), Outcome({}, tuple(1 + n / 500 for n in range(501)))
    assert figure13.furthest(fast, slow) == pytest.approx(1.0)
    held = figure13.held(Machine("a100-opt-13b"), 0.4)  # of 4,134 blocks
    assert (held.label, held.settings) == ("aligned, 40 % of the cache", (("decode.watermark_blocks", "2480"),))
    text = report(capsys, "figure13", "--data", str(data), "--limit", "15", "--topology", "2:1", "--loads", "at-once")
    rows = rows_of(text, "share of iterations within a threshold")
    assert list(rows[0].values())[1:] == ["30 ms", "more than 90 %", "less than 10 %"]
    assert len(rows) == 1 + 2 * 2 * 4  # workloads, kernel modes, thresholds
    assert [row["threshold"] for row in rows[1:3]] == ["30.0 ms", "49.3 ms"]
    for row in rows[3::4]:
        assert figure(row["fcfs"]) == pytest.approx(10, abs=0.3)
    for row in rows[4::4]:
        assert figure(row["aligned"]) >= figure(row["fcfs"])
    assert "facebook/opt-13b on 1 NVIDIA A100" in text
    medians = rows_of(text, "forward, ms, at percentile")
    assert len(medians) == 2 * 2 * 2
    assert all(figure(row["5"]) <= figure(row["50"]) <= figure(row["99"]) for row in medians)


def test_figure_14_has_what_each_ablation_loses(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    text = report(capsys, "figure14", "--data", str(data), *ONE_SEED, "--loads", "at-once,0.9")
    rows = rows_of(text, "decode tokens/s")
    assert len(rows) == 2
    stated, *ours = rows_of(text, "throughput lost")
    assert list(stated.values())[1:] == ["14.73 %", "28.51 %", tables.NOT_STATED]
    for row, lost in zip(rows, ours, strict=True):
        whole, no_prefetch, neither = list(row.values())[2:]
        expected = [1 - figure(no_prefetch) / figure(whole), 1 - figure(neither) / figure(no_prefetch)]
        assert [figure(cell) / 100 for cell in list(lost.values())[1:3]] == pytest.approx(expected, abs=2e-3)
    stated, *ours = rows_of(text, "aligned, ShareGPT-8k")
    assert stated["switch iterations"] == "at most 8.61 %"
    assert len(ours) == 2
    assert all(0 <= figure(row["switch iterations"]) <= 100 for row in ours)


def test_figure_15_has_starvation_handling_disabled_and_not(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    text = report(capsys, "figure15", "--data", str(data), *ONE_SEED, "--loads", "at-once,0.5")
    for name, mean in (("ShareGPT-8k", "1.49 s"), ("arXiv summarization", "2.54 s (LongBench)")):
        stated, at_once, half = rows_of(text, f"time to second token, {name}")
        assert stated["starvation handling disabled: mean, s"] == mean
        assert stated["starvation handling disabled: largest, s"] == "about 30 s"
        assert figure(half["fcfs: mean, s"]) < figure(at_once["fcfs: mean, s"])
        for row in (at_once, half):
            assert figure(row["aligned: mean, s"]) <= figure(row["aligned: largest, s"])
    variant = script("figure15").VARIANTS[0]
    scheduler = variant.candidate().config.scheduler
    assert (scheduler.waiting_rule, scheduler.starvation_after_s, scheduler.late_share) == ("paper", 1e9, 1.0)


def test_a_csv_file_has_what_is_stated_first_and_keeps_the_rows_of_other_machines(tmp_path: Path) -> None:
    file, stated = tmp_path / "figure.csv", figures.Stated(1.35, "1.35 (DistServe)", "section 4.2", system="fcfs")
    figures.write(None, (stated,), ())
    for machine, values in (("b", [2.0]), ("a", [1.0, 3.0]), ("b", [0.5])):
        row = figures.point({"machine": machine, "load": "0.9"}, "fcfs", "wait", values, "ms", x="8", scale=1e3)
        figures.write(file, (stated,), (row,))
    of_paper, *ours = figures.read(file)
    assert (of_paper["value"], of_paper["stated"]) == ("1.35", "section 4.2, text: 1.35 (DistServe)")
    shown = [(row["machine"], row["value"], row["low"], row["high"], row["seeds"], row["stated"]) for row in ours]
    assert shown == [("a", "2000", "-1.071e+04", "1.471e+04", "2", ""), ("b", "500", "", "", "1", "")]
    assert {(row["load"], row["quantity"], row["unit"], row["x"]) for row in ours} == {("0.9", "wait", "ms", "8")}
    unknown = figures.point({}, "vllm", "wait", [1.0, float("nan")])
    assert (unknown["value"], unknown["seeds"]) == ("", "2")


def test_figure_14_s_csv_has_what_its_tables_have(
    capsys: pytest.CaptureFixture[str], data: Path, tmp_path: Path
) -> None:
    file = tmp_path / "figure.csv"
    arguments = (*ONE_SEED, "--limit", "12", "--loads", "at-once", "--csv", str(file))
    text = report(capsys, "figure14", "--data", str(data), *arguments)
    assert "--csv FILE`" in text
    rows = figures.read(file)
    stated = [(row["quantity"], row["workload"], row["value"]) for row in rows if row["stated"]]
    assert stated == [
        *(("throughput lost", "Azure code", value) for value in ("0.1473", "0.2851")),
        ("switch iterations", "ShareGPT-8k", "0.0861"),
        ("switch iterations", "arXiv summarization", "0.1237"),
    ]
    ours = [row for row in rows if not row["stated"]]
    assert {tuple(row[name] for name in figures.PLACE) for row in ours} == {(RTX, "split_kv", "2:1", "at-once")}
    _, lost = rows_of(text, "throughput lost")
    found = {row["system"]: 100 * float(row["value"]) for row in ours if row["quantity"] == "throughput lost"}
    assert found == pytest.approx({name: figure(cell) for name, cell in list(lost.items())[1:]}, abs=6e-3)


def test_a_report_says_what_it_hangs_on(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("--topology", "1:1", "--kernel-modes", "split_kv", "--out", str(out), "--limit", "5", "--seeds", "1")
    text = report(capsys, "figure07", *arguments, "--loads", "at-once", "--set", "aligned.decode.max_running=2")
    assert re.search(r"- command: `python benchmarks/paper/\S+ --quick .* --out OUT --limit 5 ", text)
    assert re.search(r"- commit: \w+", text)
    assert "rtxpro6000-llama-3.1-8b (meta-llama/Llama-3.1-8B on NVIDIA RTX PRO 6000" in text
    assert "- kernel modes: split_kv\n" in text
    assert "95 % short (5 requests)" in text
    kept = [json.loads(file.read_text()) for file in out.glob("*.json")]
    assert len(kept) == 6 * 5
    limited = [run["configuration"]["plan"]["policies"].get("aligned") for run in kept]
    assert {found["config"]["decode"]["max_running"] for found in limited if found} == {2}
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--kernel-modes", "split"), "unknown kernel mode 'split'"),
        (("--topology", "0:1"), "--topology takes decode-bound, balanced or P:D"),
        (("--loads", "fast"), "--loads takes shares above 0"),
        (("--set", "vllm.x=1"), "has no option 'x'"),
        (("--set", "orca.max_batch=1"), "with a policy of --policy"),
        (("--seeds", "0"), "at least 1"),
    ],
)
def test_options_that_cannot_be_end_with_a_message(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        script("figure07").main(["--quick", "--quiet", "--jobs", "1", *arguments])
    assert problem in capsys.readouterr().err


def test_the_ranks_have_every_placement_and_metric(
    capsys: pytest.CaptureFixture[str], data: Path, tmp_path: Path
) -> None:
    file = tmp_path / "figures.csv"
    arguments = ("--data", str(data), "--ranks", "2", "--seeds", "1", "--loads", "0.9,at-once", "--csv", str(file))
    text = report(capsys, "ranks", *arguments)
    with file.open(encoding="utf-8", newline="") as lines:
        figures = list(csv.DictReader(lines))
    names = ["95 % short", "ShareGPT-8k", "Azure conversation"]
    assert [row["workload"] for row in figures if row["metric"] == "idle_share"] == 2 * names
    assert {row["ranks"] for row in figures} == {"2"}
    placements = ["round-robin", "least-requests", "least-tokens", "balance-route", "shared-pool"]
    assert all(float(row[name]) >= 0 for row in figures for name in placements)
    moved = [row for row in figures if row["metric"] == "moved_bytes"]
    assert all(float(row[name]) == 0 for row in moved for name in placements[:-1])
    shown = rows_of(text, "workload, placement")
    assert [row["workload, placement"] for row in shown] == [f"{one}, {name}" for one in names for name in placements]
    idle = [100 * float(figures[0][name]) for name in placements]
    assert [figure(row["idle"]) for row in shown[:5]] == pytest.approx(idle, abs=6e-3)


def test_worth_it_has_every_workload_policy_and_metric(
    capsys: pytest.CaptureFixture[str], data: Path, tmp_path: Path
) -> None:
    file = tmp_path / "figures.csv"
    arguments = ("--data", str(data), "--limit", "12", "--topology", "1:1", "--csv", str(file))
    text = report(capsys, "worth_it", *arguments)
    assert "--csv FILE`" in text
    names = ["95 % short", "ShareGPT-8k", "arXiv summarization", "Azure code", "Azure conversation", "Mooncake"]
    names.append("uniform, 500")
    policies = ["aligned", "aligned, 60 s", "aligned-cost", "fcfs", "fcfs + 10 ms", "vllm", "fastgen"]
    with file.open(encoding="utf-8", newline="") as lines:
        figures = [
            row for row in csv.DictReader(lines) if row["kernel_mode"] == "split_kv" and row["topology"] == "1:1"
        ]
    at_load = ("goodput_requests_per_s", "ttft_mean_s", "ttft_p99_s", "second_token_mean_s", "tpot_p99_s")
    both = ("charged_p99_s", "bubble_share", "switch_iteration_share", "refused")
    for load, metrics in (("0", ("decode_throughput_tokens_per_s", "aligned_over", *both)), ("0.9", (*at_load, *both))):
        for metric in metrics:
            rows = [row for row in figures if (row["load"], row["metric"]) == (load, metric)]
            assert [row["workload"] for row in rows] == names, metric
            for row in rows:
                without = [policy for policy in policies if not row[policy] or not row[f"{policy} ±"]]
                assert without == (["vllm", "fastgen"] if metric == "switch_iteration_share" else []), (metric, row)
    throughput, gains = rows_of(text, "workload | prefill:decode | aligned, tokens/s"), iter(figures)
    for shown in throughput:
        row = next(row for row in gains if row["metric"] == "decode_throughput_tokens_per_s")
        assert figure(shown["aligned, tokens/s"]) == pytest.approx(float(row["aligned"]), rel=1e-3)
    latency = rows_of(text, "workload | prefill:decode | capacity")
    assert [row["workload"] for row in (*throughput, *latency)] == 2 * names
    capacity = next(row for row in figures if row["metric"] == "capacity_requests_per_s")
    assert figure(latency[0]["capacity, requests/s"]) == pytest.approx(float(capacity["fcfs"]), rel=5e-3)
    assert len(latency[0]["P99 TPOT, ms: aligned, fcfs, vllm, fastgen"].split(", ")) == 4
    curve = rows_of(text, "95 % short: aligned over …")
    modes = [row["95 % short: aligned over …"] for row in curve]
    assert modes == ["no_split, 5 GB/s a block", "no_split, 200 GB/s a block", "split_kv"]
    assert all(figure(row["fcfs + 10 ms"]) > figure(row["fcfs"]) for row in curve)
    (uniform,) = rows_of(text, "workload | condition | decode throughput lost")
    lost = -(figure(throughput[-1]["aligned / fcfs"]) - 1)
    assert figure(uniform["decode throughput lost against fcfs"]) == pytest.approx(100 * lost, abs=0.06)
    assert uniform["at most 1 %"] == "yes"
    assert "objectives, for goodput and aligned-cost: TTFT 2 s, TPOT 0.1 s (95 % short, ShareGPT-8k" in text
