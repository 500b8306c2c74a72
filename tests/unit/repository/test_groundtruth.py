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
@pytest.mark.parametrize(
    ("run", "cost_source", "hit_share"),
    [(run, "", 0.0) for run in groundtruth.RUNS]
    + [(groundtruth.RUNS[0], groundtruth.RUNS[0], 0.0)]
    + [(run, "", share) for run, share in groundtruth.HIT_SHARE.items()],
)
def test_the_simulated_run_is_within_the_bounds_of_the_real_one(run, cost_source, hit_share):
    real, ours = groundtruth.compare(DATA, run, cost_source, {"prefix_hit_share": hit_share} if hit_share else None)
    assert len(real) == len(ours) == 300
    assert [one.tokens for one in real] == [one.tokens for one in ours]
    expected, found = groundtruth.metrics(real), groundtruth.metrics(ours)
    errors = {name: abs(found[name] / expected[name] - 1) for name in groundtruth.BOUNDS[run]}
    assert {name for name, error in errors.items() if error > groundtruth.BOUNDS[run][name]} == set(), errors


def test_the_null_block_holds_no_request(tmp_path):
    engine = '"engine_kwargs": {"max_num_seqs": 8, "max_num_batched_tokens": 64}'
    cache = '"kv_cache": {"num_gpu_blocks": 101, "block_size": 16, "enable_prefix_caching": true}'
    meta = tmp_path / "meta.json"
    meta.write_text(f"{{{engine}, {cache}}}")
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    assert groundtruth.limits_of(tmp_path) == (limits | {"prefix_caching": True}, 1600)
    meta.write_text(f"{{{engine}}}")
    assert groundtruth.limits_of(tmp_path) == (limits | {"prefix_caching": False}, 0)


def test_metrics_by_hand():
    times = [groundtruth.Times(0.0, 1.0, 3.0, 5), groundtruth.Times(1.0, 4.0, 7.0, 4)]
    found = groundtruth.metrics(times)
    assert found == pytest.approx({"ttft_mean_s": 2.0, "tpot_mean_s": 0.75, "tpot_p99_s": 0.995, "makespan_s": 7.0})
