"""`alignedserve profile`: a short one on the tiny model gives a file that loads; the fit finds what is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alignedserve.cluster.cli import main
from alignedserve.engine.profile import Measurement, PassShape, measure, plan_measurements
from alignedserve.engine.profile_fit import Profiled, fit_profile
from alignedserve.scheduler.cost.load import default_hardware, load_step_cost
from alignedserve.scheduler.cost.parts import ModelShape
from alignedserve.scheduler.cost.step import ChunkShape
from alignedserve.simulator.hardware import Hardware

SHAPE = ModelShape(layers=4, heads=8, kv_heads=4, head_dim=16, itemsize=4)


def machine(shape: PassShape) -> float:
    """A machine of known speed, whose kernel goes 0.2 of the way to the longest."""
    tokens = sum(chunk.tokens for chunk in shape.chunks) + len(shape.lengths)
    pairs = sum(chunk.tokens * (chunk.cached_tokens + chunk.tokens / 2) for chunk in shape.chunks)
    count, total, longest = len(shape.lengths), sum(shape.lengths), max(shape.lengths, default=0)
    again = sum(chunk.cached_tokens for chunk in shape.chunks)
    read = total + 0.2 * (count * longest - total)
    return 2e-3 + 1e-5 * tokens + 2e-9 * pairs + 1e-8 * again + 5e-8 * read


def fitted(plan: list[Measurement]) -> dict[str, object]:
    return fit_profile(Profiled("made-up", "made-up", "none", SHAPE, 4, plan, {"kv_tokens": 4096.0}, ""))


class Clock:
    """Time passes with every pass."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def run(self, shape: PassShape) -> float:
        seconds = machine(shape)
        self.now_s += seconds
        return seconds


def test_the_fit_finds_the_machine(tmp_path: Path) -> None:
    plan, clock = plan_measurements(8192), Clock()
    rounds = measure(clock.run, plan, 5.0, lambda: clock.now_s)
    assert rounds >= 2
    assert 5.0 <= clock.now_s < 5.2
    (tmp_path / "made-up.json").write_text(json.dumps(fitted(plan)))
    cost = load_step_cost(tmp_path / "made-up.json")
    for shape in (
        PassShape(lengths=(300,) * 16),
        PassShape((ChunkShape(200, 700),)),
        PassShape(lengths=(1000, *[100] * 15)),
        PassShape((ChunkShape(128),), (256,) * 8),
    ):
        assert cost.step_s(shape.chunks, shape.lengths) == pytest.approx(machine(shape), rel=0.06)


def test_a_slow_machine_leaves_out_the_largest_passes_and_still_gets_a_model(tmp_path: Path) -> None:
    plan, clock = plan_measurements(8192), Clock()
    assert measure(clock.run, plan, 0.03, lambda: clock.now_s) == 0
    measured = [measurement for measurement in plan if measurement.seconds]
    assert 6 <= len(measured) < len(plan)
    (tmp_path / "made-up.json").write_text(json.dumps(fitted(plan)))
    cost = load_step_cost(tmp_path / "made-up.json")
    assert cost.step_s((), [16]) == pytest.approx(machine(PassShape(lengths=(16,))), rel=0.05)


def test_profile_writes_a_file_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.json"
    assert main(["profile", "--device", "cpu", "--seconds", "0.1", "--out", str(out)]) == 0
    assert "decode_fitted: mean error" in capsys.readouterr().out
    cost = load_step_cost(out)
    assert cost.describe()["source"]["model"] == "tiny"
    assert 0.0 < cost.step_s((), [100] * 4) < 10.0
    assert cost.step_s([ChunkShape(64)], ()) > 0.0
    hardware = Hardware(**default_hardware(out))
    assert hardware.kv_bytes_per_token == 6 * 4 * 2 * 32 * 4
    assert load_step_cost(out, "no_split").step_s((), [100] * 4) > 0.0


def test_where_nothing_can_be_written_nothing_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--device", "cpu", "--out", str(tmp_path / "no/such/file.json")]) == 2
    assert "give a file in a folder that exists" in capsys.readouterr().err
