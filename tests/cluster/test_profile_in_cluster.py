"""`alignedserve profile` as a user runs it: passes alone, then the same in a small cluster that serves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alignedserve.cluster.cli.main import main
from alignedserve.scheduler.cost.load import default_hardware
from alignedserve.simulator.hardware import Hardware

pytestmark = pytest.mark.cluster


def test_a_profile_says_what_processes_take_from_each_other(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.json"
    settings = ("--device", "cpu", "--set", "cluster.threads=1", "--set", "kv_pool.size_gib=0.1")
    assert main(["profile", *settings, "--seconds", "2", "--out", str(out)]) == 0
    assert "prefill passes take" in capfd.readouterr().out
    hardware = Hardware(**default_hardware(out))
    assert 0.5 < hardware.prefill_slowdown <= hardware.prefill_slowdown_beside < 50.0
    assert 0.5 < hardware.decode_slowdown <= hardware.decode_slowdown_beside < 50.0
    assert 1e-5 < hardware.message_s < 1.0
    found = json.loads(out.read_text())["fit"]["cluster"]
    assert (
        min(found[f"{role}_{load}"]["passes"] for role in ("prefill", "decode") for load in ("alone", "together")) > 0
    )
    assert found["decode_together"]["busy"] > found["prefill_alone"]["busy"]
    assert [file.name for file in tmp_path.iterdir()] == ["mine.json"]
