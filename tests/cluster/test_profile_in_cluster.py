"""`alignedserve profile` as a user runs it: passes alone, then the same in a small cluster that serves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alignedserve.cluster.cli.main import main
from alignedserve.cluster.cli.profile_cluster import _lengths
from alignedserve.model import resolve_model
from alignedserve.scheduler.cost.load import default_hardware, load_step_cost
from alignedserve.scheduler.cost.step import ChunkShape
from alignedserve.simulator.hardware import Hardware

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

POSITIONS = int(json.loads((resolve_model("tiny") / "config.json").read_text())["max_position_embeddings"])


def test_a_profile_says_what_processes_take_from_each_other(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.json"
    settings = ("--device", "cpu", "--set", "cluster.threads=1", "--set", "kv_pool.size_gib=0.1")
    assert main(["profile", *settings, "--seconds", "2", "--out", str(out)]) == 0
    assert "prefill passes take" in capfd.readouterr().out
    hardware, cost = Hardware(**default_hardware(out)), load_step_cost(out)
    found = json.loads(out.read_text())["fit"]["cluster"]
    # Alone, requests came one after the other: a pass took what the model says of one request, times the slowdown.
    lengths = _lengths(POSITIONS)
    prompts, whole = [prompt for prompt, _ in lengths], [prompt + answer for prompt, answer in lengths]
    passes = {
        "prefill": (hardware.prefill_slowdown, [cost.step_s([ChunkShape(tokens)], []) for tokens in prompts]),
        "decode": (hardware.decode_slowdown, [cost.step_s([], [tokens]) for tokens in (*prompts, *whole)]),
    }
    for role, (slowdown, predicted_s) in passes.items():
        alone = found[f"{role}_alone"]
        pass_s = alone["seconds"] / alone["passes"] - hardware.host_overhead_s
        assert min(predicted_s) * 0.99 <= pass_s / slowdown <= max(predicted_s) * 1.01
    assert 1e-5 < hardware.message_s < 1.0
    assert (
        min(found[f"{role}_{load}"]["passes"] for role in ("prefill", "decode") for load in ("alone", "together")) > 0
    )
    assert found["decode_together"]["busy"] > found["prefill_alone"]["busy"]
    assert [file.name for file in tmp_path.iterdir()] == ["mine.json"]
