"""A simulation's output can be read again, names its source, and is identical byte for byte."""

from __future__ import annotations

import csv
import json
import re
import shlex
from array import array
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from alignedserve.cluster.cli.main import main
from alignedserve.simulator.report.outputs import ITERATIONS, METADATA_KEY, REPORT, REQUESTS, SUMMARY, OutputFolder
from alignedserve.simulator.report.page import make_report
from alignedserve.simulator.report.plots import Drawn
from alignedserve.simulator.report.provenance import Provenance, own_commit
from alignedserve.simulator.report.results import RequestResult, RunResult, StepColumns
from alignedserve.simulator.report.seeds import over_seeds
from alignedserve.simulator.report.summary import Objectives, measure
from alignedserve.simulator.workload import Arrival

PROVENANCE = Provenance(
    command="alignedserve simulate --trace 'mix:requests=4' --out <here>",
    commit="0123abc",
    configuration={"seeds": [0]},
    trace={"source": "mix:requests=4", "sha256": "t" * 64},
    cost_model={"name": "made-up", "kernel_mode": "split_kv", "sha256": "c" * 64},
    notes=("prefix hits are not simulated",),
)


def made_up(policy: str, slow: float = 1.0) -> RunResult:
    """Twelve requests of growing length, one after the other, and a refused one."""
    steps = StepColumns()
    requests = []
    for number in range(12):
        stamps = array("d", [number + slow * 0.1 * (token + 1) for token in range(5)])
        arrival = Arrival(f"r{number}", float(number), 50 * (number + 1), 5)
        requests.append(RequestResult(arrival, stamps, pool_wait_s=0.01, stages_s={"queue": 0.1}))
        for token, stamp in enumerate(stamps):
            decodes, prompt = (1, 0) if token else (0, 50)
            row = (0, stamp - 0.05, 0.05 * slow, 0.04, 0.001, decodes, prompt, 50, 60, 55, int(token == 2))
            for column, value in zip(StepColumns.__slots__, row, strict=True):
                getattr(steps, column).append(value)
    requests.append(RequestResult(Arrival("r12", 12.0, 10**6, 5), refused="larger than any store"))
    return RunResult(policy, requests, steps, ("decode-0",), 12.0, [(0.0, 0), (3.0, 40), (9.0, 5)], {"switches": 3.0})


def write(folder: Path) -> dict[str, object]:
    objectives = Objectives(ttft_s=1.0, tpot_s=0.15)
    summary: dict[str, object] = {}
    drawn = []
    with OutputFolder(folder, PROVENANCE) as out:
        for policy, slow in (("aligned", 1.0), ("fcfs", 2.0)):
            run = made_up(policy, slow)
            measured = measure(run, objectives)
            row = {"rate_per_s": 1.0, **over_seeds({0: {"arrival_rate_per_s": 1.0, **measured.metrics}})}
            summary[policy] = {**row, "by_rate": [row]}
            drawn.append(Drawn.of(run, measured))
            out.add(run, 1.0, 0)
        out.write_summary({**summary, "run": PROVENANCE.describe()})
        out.write_report(make_report(summary, ["aligned", "fcfs"], drawn, PROVENANCE, objectives, 100, {}))
    return summary


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs")
    write(folder)
    return folder


def test_requests_are_a_csv_with_its_provenance_in_the_first_line(written: Path) -> None:
    first, *rest = (written / REQUESTS).read_text().splitlines()
    assert json.loads(first.removeprefix("# ")) == PROVENANCE.describe()
    rows = list(csv.DictReader(rest))
    assert len(rows) == 26
    assert [rows[0][name] for name in ("policy", "seed", "request_id", "input_tokens")] == ["aligned", "0", "r0", "50"]
    assert float(rows[0]["ttft_s"]) == pytest.approx(0.1)
    assert float(rows[13]["tpot_s"]) == pytest.approx(0.2)
    assert json.loads(rows[0]["stages_s"]) == {"queue": 0.1}
    assert (rows[12]["refused"], rows[12]["ttft_s"]) == ("larger than any store", "")


def test_iterations_are_a_parquet_file_with_its_provenance(written: Path) -> None:
    table = pq.read_table(written / ITERATIONS)
    assert json.loads(table.schema.metadata[METADATA_KEY]) == PROVENANCE.describe()
    assert table.num_rows == 120
    row = table.slice(62, 1).to_pylist()[0]
    assert (row["policy"], row["instance"], row["decodes"], row["switching"]) == ("fcfs", "decode-0", 1, True)
    assert row["bubble_s"] == pytest.approx(0.06)
    assert (row["shortest_tokens"], row["mean_tokens"], row["longest_tokens"]) == (50, 55.0, 60)


def test_the_report_needs_nothing_but_itself(written: Path) -> None:
    page = (written / "report.html").read_text()
    addresses = set(re.findall(r"""(?:https?:)?//[^"'\s<>)]+""", re.sub(r"base64,[^\"]*", "", page)))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # names, never fetched
    assert not re.search(r"<(script|link|iframe|img)\b|@import|url\((?!#)", page)
    for reference in re.findall(r"""(?:href|src)="([^"]*)""", page):
        assert reference.startswith(("#", "data:")), reference
    for title in (
        "Throughput and goodput",
        "SLO attainment",
        "TTFT",
        "TPOT in every",
        "bubble",
        "CDF",
        "heat map",
        "Pool occ",
    ):
        assert title in page, title
    assert "Batch lengths over time" in page
    assert "--out &lt;here&gt;" in page
    assert page.count("<svg") >= 7
    assert "prefix hits are not simulated" in page


def test_two_runs_write_the_same_bytes(written: Path, tmp_path: Path) -> None:
    write(tmp_path)
    names = sorted(file.name for file in written.iterdir())
    assert names == ["iterations.parquet", "report.html", "requests.csv", "summary.json"]
    for name in names:
        assert (written / name).read_bytes() == (tmp_path / name).read_bytes(), name


def test_a_run_in_which_nothing_was_served_still_has_a_report(tmp_path: Path) -> None:
    run = RunResult("aligned", [RequestResult(Arrival("r", 0.0, 9, 9), refused="no room")], StepColumns(), (), 0.0)
    measured = measure(run, Objectives())
    row = over_seeds({0: {"arrival_rate_per_s": None, **measured.metrics}})
    summary = {"aligned": {**row, "by_rate": [row]}}
    page = make_report(summary, ["aligned"], [Drawn.of(run, measured)], PROVENANCE, Objectives(), 1, {})
    assert "No objective was given" in page
    with OutputFolder(tmp_path, PROVENANCE) as out:
        out.add(run, None, 0)
    assert pq.read_table(tmp_path / ITERATIONS).num_rows == 0


def test_the_commit_is_that_of_the_checkout_or_said_to_be_unknown() -> None:
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown", own_commit())


def test_the_same_run_has_the_same_bytes_in_any_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["simulate", "--trace", "mix:requests=5", "--rate", "4", "--policy", "aligned,vllm"]
    for out in (["--out", str(tmp_path / "a")], [f"--out={tmp_path / 'b'}"], ["--out", str(tmp_path / "c")]):
        assert main([*common, *out]) == 0
    for name in (REQUESTS, ITERATIONS, SUMMARY, REPORT):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "c" / name).read_bytes(), name
    commands = [json.loads((tmp_path / out / SUMMARY).read_text())["run"]["command"] for out in "abc"]
    assert commands[0] == commands[2] == shlex.join(["alignedserve", *common, "--out", "DIR"])
    assert commands[1] == shlex.join(["alignedserve", *common, "--out=DIR"])
