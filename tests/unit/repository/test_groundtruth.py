"""Real vLLM runs against the simulator with the same arrivals, measured kernel times and nothing fitted."""

import importlib.util
import sys
from pathlib import Path

import pytest

from support.requirements import needs

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
spec = importlib.util.spec_from_file_location("groundtruth", ROOT / "benchmarks/groundtruth.py")
groundtruth = sys.modules["groundtruth"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(groundtruth)

DATA = groundtruth.data_folder()
RECORDED = (DATA / "groundtruth" / groundtruth.RUNS[0]).is_dir()
needs_run = needs("" if RECORDED else f"there is no recorded run in {DATA} (ALIGNEDSERVE_DATA)")


@needs_run
@pytest.mark.parametrize(("run", "cost_source"), [(run, "") for run in groundtruth.RUNS] + [(groundtruth.RUNS[0],) * 2])
def test_the_simulated_run_is_within_the_bounds_of_the_real_one(run, cost_source):
    real, ours = groundtruth.compare(DATA, run, cost_source)
    assert len(real) == len(ours) == 300
    assert [one.tokens for one in real] == [one.tokens for one in ours]
    expected, found = groundtruth.metrics(real), groundtruth.metrics(ours)
    errors = {name: abs(found[name] / expected[name] - 1) for name in groundtruth.BOUNDS[run]}
    assert {name for name, error in errors.items() if error > groundtruth.BOUNDS[run][name]} == set(), errors


def test_metrics_by_hand():
    times = [groundtruth.Times(0.0, 1.0, 3.0, 5), groundtruth.Times(1.0, 4.0, 7.0, 4)]
    found = groundtruth.metrics(times)
    assert found == pytest.approx({"ttft_mean_s": 2.0, "tpot_mean_s": 0.75, "tpot_p99_s": 0.995, "makespan_s": 7.0})
