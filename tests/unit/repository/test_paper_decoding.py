"""benchmarks/paper/figure01.py and figure03.py: with the cost model's own figures, and on the engine at small sizes."""

from __future__ import annotations

import importlib
import re
import statistics
import sys
from pathlib import Path

import pytest
import torch

from alignedserve.engine.profile.passes import PassBench, PassShape
from alignedserve.scheduler.cost.load import load_step_cost

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks/paper"))

from evaluation.tables import NOT_STATED

pytestmark = pytest.mark.slow
RTX = "rtxpro6000-llama-3.1-8b"
SMALL_ENGINE = ("--engine", "--repeats", "1", "--points", "1")


@pytest.fixture(autouse=True)
def threads_as_before() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def report(capsys: pytest.CaptureFixture[str], name: str, *arguments: str) -> str:
    assert importlib.import_module(name).main(arguments) == 0
    return capsys.readouterr().out


def cells(text: str, first: str) -> list[list[str]]:
    """The other cells of each row whose first cell is `first`."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [row[1:] for row in rows if row[0] == first]


def figures(row: list[str]) -> list[float]:
    return [float(cell.replace(",", "")) for cell in row]


@pytest.mark.parametrize(
    ("mode", "name", "options"),
    [("split_kv", "split_kv", {}), ("no_split", "no_split, 10 GB/s a block", {"block_bandwidth": 10e9})],
)
def test_figure_1_has_the_cost_of_each_batch_as_it_grows(
    capsys: pytest.CaptureFixture[str], mode: str, name: str, options: dict[str, float]
) -> None:
    text = report(capsys, "figure01", "--kernel-modes", "split_kv,no_split:10", "--at", "500", "--generated", "0")
    cost = load_step_cost(RTX, mode, **options)
    expected = [1e3 * cost.step_s((), [4596] * long + [532] * (64 - long)) for long in (0, 1, 2, 4)]
    at, rise = cells(text, f"ours: {name}")
    assert figures(at) == pytest.approx(expected, rel=5e-3)
    assert figures(rise) == pytest.approx([one / expected[0] for one in expected], abs=1e-3)
    assert cells(text, "the paper's text") == [[NOT_STATED] * 4] * 2
    curve = text.split(f"### Iteration latency, ms: {name}\n")[1]
    assert figures(cells(curve, "500")[0]) == figures(at)
    assert figures(cells(curve, "0")[0])[0] == pytest.approx(1e3 * cost.step_s((), [32] * 64), rel=5e-3)


def test_figure_3_has_the_mean_of_the_aligned_batches_and_the_mixed_one(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--kernel-modes", "split_kv", "--groups", "8", "--step", "400", "--answer", "20")
    text = report(capsys, "figure03", *arguments)
    cost = load_step_cost(RTX)
    lengths = [10 + 400 * group for group in range(8)]
    each = [1e3 * statistics.fmean(cost.run_s([length] * 8, 20)) for length in lengths]
    mixed = 1e3 * statistics.fmean(cost.run_s(lengths, 20))
    mean, ours, ratio = figures(cells(text, "ours: split_kv")[0])
    assert (mean, ours) == pytest.approx((statistics.fmean(each), mixed), rel=5e-3)
    assert ratio == pytest.approx(mixed / statistics.fmean(each), abs=1e-3)
    assert [figures(cells(text, f"{length:,}")[0])[0] for length in lengths] == pytest.approx(each, rel=5e-3)


def test_figures_1_and_3_are_drawn_from_the_csv_that_they_write(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "tools/docs")
    results, plots = (importlib.import_module(name) for name in ("plot_results", "plot_paper"))
    monkeypatch.setattr(results, "DOCS", tmp_path)
    (tmp_path / "measurements/data").mkdir(parents=True)
    for number in ("01", "03"):
        file = tmp_path / f"measurements/data/paper-figure-{number}.csv"
        file.write_text("")
        with pytest.raises(ValueError, match=f"paper-figure-{number}.csv has no row"):
            plots.svg(f"paper-figure-{number}")
        file.unlink()
        for machine in plots.MACHINES:
            report(capsys, f"figure{number}", "--cost-model", machine, "--kernel-modes", "split_kv", "--csv", str(file))
        drawn = plots.svg(f"paper-figure-{number}")
        assert all(name in drawn for name in (*plots.MACHINES.values(), "60+4" if number == "01" else "mixed"))
    found = plots.ours("01", machine=RTX, system="63+1", x="600")
    expected = 1e3 * load_step_cost(RTX).step_s((), [4696] + [632] * 63)
    assert plots.values(found) == pytest.approx([expected], rel=1e-4)


def test_every_figure_can_be_drawn_from_its_measured_data_and_is_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "tools/docs")
    plots = importlib.import_module("plot_paper")
    docs = Path(__file__).parents[3] / "docs"
    page = (docs / "measurements/paper-figures.md").read_text(encoding="utf-8")
    for name in plots.PLOTS:
        assert len(plots.svg(name)) < 60_000
        assert f"(../images/{name}.svg)" in page
        assert (docs / f"images/{name}.svg").is_file()


def test_figure_1_on_the_engine_names_its_clock_and_grows_with_the_long_prompts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = ("--batch", "4", "--short", "8", "--long", "2000", "--longs", "3", "--at", "2", "--generated", "2")
    text = report(capsys, "figure01", *SMALL_ENGINE, "--repeats", "5", *sizes)
    assert re.search(r"tiny \(6 layers.* 1 threads at most.*median of 5 iterations, by processor time", text)
    short, long = figures(cells(text, "ours: engine, cpu")[0])
    assert 0.0 < short < long


def test_figure_3_on_the_engine_measures_every_batch(capsys: pytest.CaptureFixture[str]) -> None:
    text = report(capsys, "figure03", *SMALL_ENGINE, "--groups", "3", "--step", "30", "--answer", "4")
    assert all(value > 0.0 for length in (10, 40, 70) for value in figures(cells(text, str(length))[0]))
    mean, mixed, ratio = figures(cells(text, "ours: engine, cpu")[0])
    assert ratio == pytest.approx(mixed / mean, rel=0.02)


def test_the_engine_is_measured_at_the_lengths_that_the_cost_model_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, found = PassBench.run, set()

    def noted(self: PassBench, shape: PassShape) -> float:
        found.add(shape.lengths)
        return run(self, shape)

    monkeypatch.setattr(PassBench, "run", noted)
    report(capsys, "figure01", *SMALL_ENGINE, *("--batch", "4", "--long", "40", "--longs", "1"), "--generated", "600")
    assert found == {(632,) * 4, (640, 632, 632, 632)}


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("figure01", ("--longs", "64"), "less than the batch of 64"),
        ("figure01", ("--engine", "--long", "9000"), "tiny has 8192 positions, and 10001 are asked for"),
        ("figure01", ("--repeats", "0"), "at least 1"),
        ("figure03", ("--groups", "1"), "--groups is at least 2"),
        ("figure03", ("--kernel-modes", "half"), "unknown kernel mode"),
    ],
)
def test_options_that_cannot_be_end_with_a_message(
    capsys: pytest.CaptureFixture[str], name: str, arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
