"""benchmarks/paper: the sweeps over load and over one thread block's bandwidth, on small data."""

from __future__ import annotations

import csv
import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from support.paper_scripts import RTX, figure, report, rows_of, script, simulated, small_data

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks/paper"))

from evaluation import workloads
from evaluation.grid import CLOSED, Case, Grid
from evaluation.runner import Runner
from evaluation.runs import ALIGNED, FCFS, Machine, Run, Topology, execute

pytestmark = pytest.mark.slow
MIX = workloads.mix("a mix", 12, short=0.75, output_max=80)
ONE = Run(MIX, FCFS, Machine(RTX), Topology(1, 1), None, 0)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return small_data(tmp_path)


def test_the_load_sweep_has_every_rule_load_and_metric(
    capsys: pytest.CaptureFixture[str], data: Path, tmp_path: Path
) -> None:
    file = tmp_path / "figures.csv"
    arguments = ("--data", str(data), "--limit", "12", "--loads", "0.9,closed,at-once", "--csv", str(file))
    text = report(capsys, "load_sweep", *arguments)
    ours = ["fcfs", "aligned, overdue", "aligned, paper", "aligned, rounds"]
    others = ["vllm", "vllm, 1024", "fastgen", "sarathi", "orca", "static"]
    names = ["95 % short", "uniform, 500", "ShareGPT-8k", "Azure conversation", "Mooncake"]
    with file.open(encoding="utf-8", newline="") as lines:
        figures = list(csv.DictReader(lines))
    expected = [(load, name, one) for load in ("0.9", "closed", "at-once") for name in names for one in ours]
    expected += [("0.9", name, one) for name in names for one in others]
    assert [(row["load"], row["workload"], row["policy"]) for row in figures] == expected
    metric = "decode_throughput_tokens_per_s"
    assert all(float(row[metric]) > 0 for row in figures)
    assert all((row[f"{metric} / fcfs"] == "") is (row["policy"] in others) for row in figures)
    shown = rows_of(text, "workload | prefill:decode | fcfs")
    assert [row["workload"] for row in shown] == names
    assert figure(shown[0]["fcfs"]) == pytest.approx(float(figures[0][metric]), rel=1e-3)
    assert figure(shown[0]["aligned, rounds / fcfs"]) == pytest.approx(float(figures[3][f"{metric} / fcfs"]), abs=1e-3)
    assert figure(shown[0]["ceiling"]) == pytest.approx(1 / (1 - float(figures[0]["bubble_share"])), abs=5e-3)
    for row in rows_of(text, "policy"):
        better_is_more = row["figure"] == "decode throughput"
        assert figure(row["/ fcfs"]) < 1 if better_is_more else figure(row["/ fcfs"]) > 1


def test_every_part_of_rounds_that_the_ablation_takes_out_changes_what_happens(
    capsys: pytest.CaptureFixture[str], data: Path
) -> None:
    variants = script("ablation").VARIANTS
    crowds = [(workloads.mix("a crowd", 300, short=short), rate) for short, rate in ((0.95, 8.0), (0.8, 4.0))]
    machine = Machine("a100-opt-13b"), Topology(2, 1)
    runs = [[Run(crowd, variant, *machine, rate, 0) for crowd, rate in crowds] for variant in variants]
    whole, *without = [[execute(run).value("second_token_mean_s") for run in each] for each in runs]
    assert all(found != whole for found in without)
    shown = rows_of(report(capsys, "ablation", "--data", str(data), "--limit", "12", "--loads", "1"), "workload | load")
    assert [row["policy"] for row in shown if row["workload"] == "95 % short"] == [one.label for one in variants]


def test_the_plots_over_load_have_a_line_for_each_rule(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "tools/docs")
    plots = importlib.import_module("plot_results")
    monkeypatch.setattr(plots, "DOCS", tmp_path)
    file = tmp_path / "measurements/data/load-sweep-1.csv"
    file.parent.mkdir(parents=True)
    report(
        capsys, "load_sweep", "--limit", "12", "--workloads", "95 %", "--loads", "0.9,1.2,closed", "--csv", str(file)
    )
    rows = plots.sweep(plots.PANELS[0], "aligned, rounds")
    assert [row["load"] for row in rows] == ["0.9", "1.2", "closed"]
    for name in ("plot-load-throughput", "plot-load-tpot", "plot-load-second-token", "plot-trade"):
        drawn = plots.svg(name)
        assert all(rule in drawn for rule in plots.RULES[name == "plot-trade" :])
        assert "var(--md-typeset-color" in drawn  # the colours of the page, in both themes


def test_a_part_of_the_load_sweep_and_what_it_takes(
    capsys: pytest.CaptureFixture[str], data: Path, tmp_path: Path
) -> None:
    kept = ("--out", str(tmp_path), "--data", str(data), "--limit", "12", "--workloads", "azure,uniform")
    part = (*kept, "--loads", "0.9,1.2,at-once", "--variants", "aligned, rounds")
    assert script("load_sweep").main(["--quick", "--jobs", "1", *part, "--estimate"]) == 0
    assert "20 of 24 runs are left" in capsys.readouterr().err  # fcfs at once is there: two workloads, two seeds
    rows = rows_of(report(capsys, "load_sweep", *part), "workload | prefill:decode | fcfs")
    assert [row["workload"] for row in rows] == ["uniform, 500", "Azure conversation"]
    assert list(rows[0])[2:] == ["fcfs", "aligned, rounds / fcfs", "ceiling"]
    assert script("load_sweep").main(["--quick", "--jobs", "1", *part, "--estimate"]) == 0
    assert "0 of 24 runs are left" in capsys.readouterr().err


def test_loads_of_the_sweep_are_shares_of_what_each_system_can_do_and_a_closed_loop_has_clients() -> None:
    load_sweep = script("load_sweep")
    with Runner(None, 1, "c", quiet=True) as runner:
        grid = Grid(runner, (0,), own={"vllm"}, capacity="sustained_requests_per_s")
        case = Case(MIX, Machine(RTX), "1:1", 0.5)
        for variant, by in ((ALIGNED, FCFS), (load_sweep.VLLM, load_sweep.VLLM)):
            (run,) = grid.runs([case], [variant])
            sustained = execute(replace(ONE, variant=by)).value("sustained_requests_per_s")
            assert run.rate_per_s == pytest.approx(sustained / 2)
        (run,) = grid.runs([replace(case, load=CLOSED)], [ALIGNED])
        assert run.clients == round(2 * execute(ONE).value("batch_mean_requests"))
        assert run.rate_per_s is None
        assert len({one.arrival_s for one in run.plan().workload(None, 0).arrivals}) == 1


def test_a_workload_that_does_not_fit_the_model_is_named(data: Path) -> None:
    load_sweep = script("load_sweep")
    long = workloads.mix("long", 10, short=0.5, long_min=40_000, long_max=40_000)
    assert load_sweep.too_long(long, Machine("a100-opt-13b"), (0,)) == (0.5, 33088)
    assert load_sweep.too_long(long, Machine(RTX), (0,)) == (0.0, 131_072)


def test_no_split_has_both_orders_and_each_bandwidth(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "figures.csv"
    text = report(capsys, "no_split", "--limit", "12", "--seeds", "1", "--loads", "at-once", "--csv", str(file))
    modes = ["split_kv", *(f"{mode}, {at} GB/s" for mode in ("no_split", "no_split_longest_first") for at in (5, 100))]
    shown = rows_of(text, "machine | workload | load | figure")
    assert list(shown[0])[4:] == modes
    assert len(shown) == 2 * 2 * 3  # machines, workloads, the bubble and two rules
    with file.open(encoding="utf-8", newline="") as lines:
        figures = list(csv.DictReader(lines))
    assert len(figures) == 2 * 2 * 5 * 3
    source = "mix:short=0.8,requests=12"
    expected = simulated(source, "fcfs", 6, 0, kernel_mode="no_split", block_bandwidth=5e9)
    (found,) = [
        float(row["decode_throughput_tokens_per_s"])
        for row in figures
        if (row["machine"], row["workload"], row["policy"]) == (RTX, "80 % short", "fcfs")
        and (row["kernel_mode"], row["block_bandwidth_gb_s"]) == ("no_split", "5")
    ]
    assert found == pytest.approx(expected["decode_throughput_tokens_per_s"], rel=1e-4)
