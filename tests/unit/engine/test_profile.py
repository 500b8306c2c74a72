"""`alignedserve profile`: a short profile of the tiny model gives a file that loads; the fit recovers known costs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
import torch

from alignedserve.cluster.cli.main import main
from alignedserve.cluster.launch.preflight import cost_model_note
from alignedserve.cluster.runtime_dir import new_token
from alignedserve.config_sources import from_tree
from alignedserve.control.echo import measure_message_s
from alignedserve.decode_worker import loop_overhead
from alignedserve.decode_worker.loop_overhead import loop_overhead_s
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.model.loader import load_model
from alignedserve.engine.profile import other_work
from alignedserve.engine.profile.fit import Profiled, fit_profile
from alignedserve.engine.profile.other_work import QUIET_SHARE
from alignedserve.engine.profile.passes import (
    THREAD_CLOCK,
    WALL_CLOCK,
    Measurement,
    PassBench,
    PassShape,
    measure,
    plan_measurements,
)
from alignedserve.engine.runner import ModelRunner, allocate_cache
from alignedserve.errors import AlignedServeError
from alignedserve.model import resolve_model
from alignedserve.ranks.degrees import Degrees
from alignedserve.scheduler.cost.load import default_hardware, load_step_cost
from alignedserve.scheduler.cost.parts import ModelShape
from alignedserve.scheduler.cost.step import ChunkShape
from alignedserve.simulator.hardware import Hardware
from alignedserve.testing.models import make_model

SHAPE = ModelShape(layers=4, heads=8, kv_heads=4, head_dim=16, itemsize=4)


def machine(shape: PassShape) -> float:
    """A machine of known speed, whose kernel takes 0.2 of the cost of padding to the longest."""
    tokens = sum(chunk.tokens for chunk in shape.chunks) + len(shape.lengths)
    pairs = sum(chunk.tokens * (chunk.cached_tokens + chunk.tokens / 2) for chunk in shape.chunks)
    count, total, longest = len(shape.lengths), sum(shape.lengths), max(shape.lengths, default=0)
    again = sum(chunk.cached_tokens for chunk in shape.chunks)
    read = total + 0.2 * (count * longest - total)
    return 2e-3 + 1e-5 * tokens + 2e-9 * pairs + 1e-8 * again + 5e-8 * read


def fitted(plan: list[Measurement]) -> dict[str, object]:
    return fit_profile(Profiled("made-up", "made-up", "none", SHAPE, 4, plan, {"kv_tokens": 4096.0}, "", {}))


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


def test_a_decode_follows_one_as_large_and_a_prompt_has_a_length_of_its_own() -> None:
    ran: list[PassShape] = []
    now = [0.0]

    def run(shape: PassShape) -> float:
        ran.append(shape)
        now[0] += 0.001
        return float(len(ran))

    plan = [Measurement(PassShape(lengths=(40,) * 4), "decode"), Measurement(PassShape((ChunkShape(80, 16),)), "chunk")]
    measure(run, plan, 0.1, lambda: now[0])
    decode, chunk = plan
    timed = {int(number) - 1 for number in decode.seconds}
    assert all(ran[place - 1] == ran[place] == decode.shape for place in timed)
    chunks = [ran[int(number) - 1].chunks[0] for number in chunk.seconds]
    assert [one.tokens for one in chunks[:5]] == [80, 81, 79, 82, 78]
    assert {one.tokens for one in chunks} == set(range(74, 87))
    assert {one.cached_tokens for one in chunks} == {16}
    assert PassShape((ChunkShape(2),)).shifted(7) == PassShape((ChunkShape(2),))


def test_a_slow_machine_leaves_out_the_largest_passes_and_still_gets_a_model(tmp_path: Path) -> None:
    plan, clock = plan_measurements(8192), Clock()
    assert measure(clock.run, plan, 0.03, lambda: clock.now_s) == 0
    measured = [measurement for measurement in plan if measurement.seconds]
    assert 6 <= len(measured) < len(plan)
    (tmp_path / "made-up.json").write_text(json.dumps(fitted(plan)))
    cost = load_step_cost(tmp_path / "made-up.json")
    assert cost.step_s((), [16]) == pytest.approx(machine(PassShape(lengths=(16,))), rel=0.05)


def test_what_an_engine_adds_is_an_overhead_of_every_pass_and_one_of_each_request(tmp_path: Path) -> None:
    plan, clock = plan_measurements(8192), Clock()
    measure(clock.run, plan, 5.0, lambda: clock.now_s)
    host_s = {count: 2e-4 + 1e-5 * count for count in (1, 4, 16, 64)}
    alone = fit_profile(Profiled("made-up", "made-up", "none", SHAPE, 4, plan, {}, "", {}))
    both = fit_profile(Profiled("made-up", "made-up", "none", SHAPE, 4, plan, {}, "", host_s))
    assert both["hardware"]["host_overhead_s"] == pytest.approx(2e-4, rel=0.01)
    assert both["fit"] == alone["fit"]
    for name, content in (("alone", alone), ("both", both)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    without, cost = (load_step_cost(tmp_path / f"{name}.json") for name in ("alone", "both"))
    for requests in (1, 16, 40):
        added = cost.step_s((), [100] * requests) - without.step_s((), [100] * requests)
        assert added == pytest.approx(1e-5 * requests, rel=0.02)


def test_long_prefixes_cost_on_as_measured_at_fewer_tokens_where_nothing_longer_was(tmp_path: Path) -> None:
    plan, clock = plan_measurements(8192), Clock()
    measure(clock.run, plan, 5.0, lambda: clock.now_s)
    (tmp_path / "made-up.json").write_text(json.dumps(fitted(plan)))
    cost = load_step_cost(tmp_path / "made-up.json")
    most = PassShape(lengths=(3000,) * 64)  # 32,768 tokens are measured at most
    assert cost.step_s((), most.lengths) == pytest.approx(machine(most), rel=0.06)


def test_a_pass_of_one_thread_is_timed_by_its_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        plan = [Measurement(PassShape(lengths=(32, 16)), "decode")]
        bench = PassBench(load_model(inspect_model("tiny", resolve_model("tiny"), "auto", "cpu"), "cpu"), plan)
        monkeypatch.setattr("time.perf_counter", lambda: pytest.fail("the wall clock was asked"))
        assert 0.0 < bench.run(plan[0].shape) < 5.0
        assert bench.clocks == {THREAD_CLOCK: 1}
        monkeypatch.setattr(bench.runner, "threads", lambda items: 2)
        monkeypatch.setattr("time.perf_counter", iter((10.0, 12.5)).__next__)
        assert bench.run(plan[0].shape) == 2.5
        assert bench.clocks == {THREAD_CLOCK: 1, WALL_CLOCK: 1}
    finally:
        torch.set_num_threads(before)


def test_other_work_is_what_was_neither_idle_nor_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat, now, own = tmp_path / "stat", [100.0], [1.0, 0.0, 0.0, 0.0, 0.0]
    monkeypatch.setattr(other_work, "STAT", stat)
    monkeypatch.setattr(other_work.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(other_work.os, "times", lambda: own)
    monkeypatch.setattr(other_work.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(other_work.os, "sysconf", lambda name: 100)
    stat.write_text("cpu 1000 0 0 5000 0 0 0 0 0 0\ncpu0 1 1 1 1\n")
    work = other_work.OtherWork()
    now[0], own[0] = 110.0, 5.0  # ten seconds, four of them ours
    stat.write_text("cpu 1500 100 100 6200 50 25 25 100 777 0\n")  # 8.5 s busy, including stolen time, excluding guests
    assert work.share() == pytest.approx((8.5 - 4.0) / 20.0)


def test_the_loop_is_measured_by_what_it_computes_between_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(inspect_model("tiny", resolve_model("tiny"), "auto", "cpu"), "cpu")
    runner = ModelRunner(loaded, allocate_cache(loaded.info.geometry(16), 128, "cpu"))
    one, many = (loop_overhead_s(runner, 128, requests) for requests in (1, 24))
    assert 1e-5 < one < many < 0.05
    monkeypatch.setattr(loop_overhead, "LONGEST_S", 0.3)
    with pytest.raises(AlignedServeError, match="did not end"):
        loop_overhead_s(runner, 3, 1)  # no room for it to grow


async def test_a_message_takes_a_while_to_another_process() -> None:
    assert 1e-5 < await measure_message_s(new_token()) < 0.5


async def test_the_other_process_ends_where_no_process_waits_for_its_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    started: asyncio.Queue[asyncio.subprocess.Process] = asyncio.Queue()

    async def start(*arguments: str, **options: int) -> asyncio.subprocess.Process:
        process = await create(*arguments, **options)
        started.put_nowait(process)
        return process

    create = asyncio.create_subprocess_exec
    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    measuring = asyncio.create_task(measure_message_s(new_token()))
    process = await started.get()
    measuring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await measuring
    assert process.returncode == -signal.SIGKILL


def test_profile_writes_a_file_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, waiting = tmp_path / "mine.json", os.environ.get("OMP_WAIT_POLICY")
    assert main(["profile", "--device", "cpu", "--seconds", "0.1", "--no-cluster", "--out", str(out)]) == 0
    assert "decode_fitted: mean error" in capsys.readouterr().out
    cost = load_step_cost(out)
    assert cost.describe()["source"]["model"] == "tiny"
    assert 0.0 < cost.step_s((), [100] * 4) < 10.0
    assert cost.step_s([ChunkShape(64)], ()) > 0.0
    hardware = Hardware(**default_hardware(out))
    assert hardware.kv_bytes_per_token == 6 * 4 * 2 * 32 * 4
    assert min(hardware.host_overhead_s, hardware.message_s, hardware.copy_latency_s) > 0.0
    assert os.environ.get("OMP_WAIT_POLICY") == waiting  # the worker's environment is set during the measurement only
    fit = json.loads(out.read_text())["fit"]
    assert sum(fit["passes_by_clock"].values()) > 0
    assert fit["quiet"] == (fit["other_work_share"] <= QUIET_SHARE)
    assert load_step_cost(out, "no_split").step_s((), [100] * 4) > 0.0


@pytest.mark.parametrize(
    ("flags", "prefill", "decode"),
    [(("--decode-tp", "2"), Degrees(), Degrees(2)), (("--pipeline-parallel-size", "2"), *[Degrees(1, 2)] * 2)],
)
def test_a_profile_is_of_as_many_ranks_as_instances_have(
    tmp_path: Path, flags: tuple[str, ...], prefill: Degrees, decode: Degrees
) -> None:
    out = tmp_path / "ranks.json"
    assert main(["profile", "--device", "cpu", "--seconds", "0.1", "--no-cluster", "--out", str(out), *flags]) == 0
    written = json.loads(out.read_text())
    assert written["degrees"] == {"prefill": asdict(prefill), "decode": asdict(decode)}
    assert WALL_CLOCK in written["fit"]["passes_by_clock"]
    assert load_step_cost(out).step_s((), [100] * 4) > 0.0
    assert not [child for child in psutil.Process().children() if "ranks.start" in " ".join(child.cmdline())]

    def note(**section: int) -> str:
        return cost_model_note(from_tree({"scheduler": {"cost_model": str(out)}, "decode": section}))

    assert "decode instances than this cluster has" in note(tensor_parallel=4)
    same = {"cluster": {"pipeline_parallel": prefill.stages}, "decode": {"tensor_parallel": decode.tensor}}
    assert cost_model_note(from_tree({"scheduler": {"cost_model": str(out)}, **same})) == ""


def test_a_profile_of_ranks_that_share_experts(tmp_path: Path) -> None:
    model, out = make_model("mixtral", tmp_path / "mixture", seed=1), tmp_path / "experts.json"
    arguments = ("--model", str(model), "--dtype", "float32", "--device", "cpu", "--seconds", "0.1", "--out", str(out))
    assert main(["profile", "--no-cluster", "--decode-ep", "2", *arguments]) == 0
    assert json.loads(out.read_text())["degrees"]["decode"]["experts"] == 2


def test_a_model_of_few_positions_is_profiled(tmp_path: Path) -> None:
    model, out = make_model("llama", tmp_path / "short", seed=1, max_position_embeddings=96), tmp_path / "short.json"
    arguments = ("--model", str(model), "--dtype", "float32", "--device", "cpu", "--seconds", "0.1", "--out", str(out))
    assert main(["profile", "--no-cluster", *arguments]) == 0
    assert load_step_cost(out).step_s((), [90] * 64) > 0.0


def test_where_nothing_can_be_written_nothing_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--device", "cpu", "--out", str(tmp_path / "no/such/file.json")]) == 2
    assert "give a file in an existing, writable folder" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-3", "nan", "inf", "0.01"])
def test_a_time_in_which_nothing_can_be_measured_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seconds: str
) -> None:
    out = tmp_path / "cost.json"
    assert main(["profile", "--device", "cpu", "--seconds", seconds, "--out", str(out)]) == 2
    assert "--seconds must be at least 0.1" in capsys.readouterr().err
    assert not out.exists()


def test_cuda_where_torch_has_none_is_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["profile", "--device", "cuda", "--out", str(tmp_path / "cost.json")]) == 2
    assert "finds no CUDA device; use --device cpu" in capsys.readouterr().err
