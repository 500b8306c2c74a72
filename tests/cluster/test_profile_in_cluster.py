"""`alignedserve profile` as a user runs it: passes alone, then the same in a small cluster that serves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alignedserve.cluster.cli.main import main
from alignedserve.cluster.cli.serve_process import ServeProcess
from alignedserve.control.samples import value
from alignedserve.scheduler.cost.load import default_hardware, load_step_cost
from alignedserve.scheduler.cost.step import ChunkShape
from alignedserve.simulator.hardware import Hardware

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT, ANSWER, REQUESTS = 128, 64, 5
FACTOR = 5.0  # the machine may be busier now than it was then


def test_a_profile_says_what_processes_take_from_each_other(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.json"
    settings = ("--device", "cpu", "--set", "cluster.threads=1", "--set", "kv_pool.size_gib=0.1")
    assert main(["profile", *settings, "--seconds", "2", "--out", str(out)]) == 0
    assert "prefill passes take" in capfd.readouterr().out
    hardware, cost = Hardware(**default_hardware(out)), load_step_cost(out)
    found = json.loads(out.read_text())["fit"]["cluster"]
    # Another cluster's passes, of requests one after the other, take about what the file says of them.
    body = {"prompt": [5] * PROMPT, "max_tokens": ANSWER, "ignore_eos": True}
    with ServeProcess(*settings) as server:
        for _ in range(REQUESTS):
            server.post("/v1/completions", body)
        metrics = server.metrics()
    prefill_s = cost.step_s([ChunkShape(PROMPT)], []) * hardware.prefill_slowdown + hardware.host_overhead_s
    decode_s = cost.step_s([], [PROMPT + ANSWER // 2]) * hardware.decode_slowdown + hardware.host_overhead_s
    for predicted_s, seconds, passes in (
        (prefill_s, "prefill_seconds_total", "prefill_passes_total"),
        (decode_s, "decode_seconds_total", "decode_iterations_total"),
    ):
        measured_s = value(metrics, f"alignedserve_{seconds}") / value(metrics, f"alignedserve_{passes}")
        assert measured_s / FACTOR < predicted_s < measured_s * FACTOR
    assert 1e-5 < hardware.message_s < 1.0
    assert (
        min(found[f"{role}_{load}"]["passes"] for role in ("prefill", "decode") for load in ("alone", "together")) > 0
    )
    assert found["decode_together"]["busy"] > found["prefill_alone"]["busy"]
    assert [file.name for file in tmp_path.iterdir()] == ["mine.json"]
