"""`alignedserve profile` with a pretended GPU: the fit finds both kernels, and the bench reports correct times."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from alignedserve.cluster.cli.main import main
from alignedserve.config import SchedulerConfig
from alignedserve.config_sources import from_tree
from alignedserve.engine.decoding import DecodeEngine, DecodeItem, DecodeStep
from alignedserve.engine.eager import EagerDecode
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.model.loader import LoadedModel, load_model
from alignedserve.engine.profile import profiler_gpu
from alignedserve.engine.profile.copies import device_copies
from alignedserve.engine.profile.device_passes import (
    GPU_GRID,
    LAUNCHES,
    DevicePassBench,
    Timer,
    blocks_needed,
    device_rates,
    gpu_benches,
    measure_passes,
)
from alignedserve.engine.profile.fit import Profiled, fit_profile
from alignedserve.engine.profile.passes import (
    Grid,
    PassShape,
    measure,
    plan_measurements,
)
from alignedserve.engine.runner import ModelRunner, allocate_cache
from alignedserve.engine.sampling.sampler import SampledToken
from alignedserve.errors import NumericsError, ResourceError
from alignedserve.geometry import KvGeometry
from alignedserve.model import resolve_model
from alignedserve.scheduler.cost.load import configured_cost, default_hardware, load_step_cost
from alignedserve.scheduler.cost.makespan import makespan
from alignedserve.scheduler.cost.parts import ModelShape
from alignedserve.scheduler.cost.step import ChunkShape
from alignedserve.simulator.hardware import Hardware
from support.pretended_gpus import pretend_gpus

SHAPE = ModelShape(layers=32, heads=32, kv_heads=32, head_dim=128)
SMS, BANDWIDTH, BLOCK_BANDWIDTH, ALPHA = 132, 4.0e12, 40.0e9, 0.12
GRID = replace(GPU_GRID, most_tokens=200_000)


class PretendedGpu:
    """4 TB/s and 700 TFLOP/s. The split kernel has 0.12 of the padding cost; one block reads 40 GB/s."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def split(self, shape: PassShape) -> float:
        count, total, longest = len(shape.lengths), sum(shape.lengths), max(shape.lengths, default=0)
        read = total + ALPHA * (count * longest - total)
        return self._pass(shape, read * SHAPE.kv_bytes_per_token / BANDWIDTH)

    def no_split(self, shape: PassShape) -> float:
        """One thread block computes each (request, head) job, and all blocks share the memory bandwidth."""
        jobs = makespan(shape.lengths, SHAPE.heads, SMS) * SHAPE.head_bytes_per_token / BLOCK_BANDWIDTH
        memory = sum(shape.lengths) * SHAPE.head_bytes_per_token * SHAPE.heads / BANDWIDTH
        return self._pass(shape, SHAPE.layers * max(jobs, memory))

    def _pass(self, shape: PassShape, reading_s: float) -> float:
        tokens = sum(chunk.tokens for chunk in shape.chunks) + len(shape.lengths)
        pairs = sum(chunk.tokens * (chunk.cached_tokens + chunk.tokens / 2) for chunk in shape.chunks)
        seconds = max(3.4e-3, 2e-5 * tokens) + 1e-6 * tokens + 4 * SHAPE.layers * 4096 * pairs / 400e12 + reading_s
        self.now_s += seconds
        return seconds


@cache
def profiled() -> dict[str, Any]:
    gpu = PretendedGpu()
    plan = plan_measurements(32768, grid=GRID)
    no_split = [replace(one, seconds=[]) for one in plan if not one.shape.chunks]
    assert measure(gpu.split, plan, 15.0, lambda: gpu.now_s) >= 1
    assert measure(gpu.no_split, no_split, 10.0, lambda: gpu.now_s) >= 1
    hardware = {"kv_tokens": 200_000.0, "kv_bytes_per_token": 524288.0, "pool_tokens": 1e6}
    return fit_profile(
        Profiled(
            name="pretended",
            model="llama-2-7b",
            device="pretended",
            shape=SHAPE,
            sm_count=SMS,
            measurements=plan,
            hardware=hardware,
            hardware_note="",
            host_s={},
            grid=GRID,
            no_split=no_split,
            block_bandwidth=60e9,
        )
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pretended.json"
    path.write_text(json.dumps(profiled()))
    return path


EQUAL = ((700,) * 64, (1500,) * 100, (30000,) * 4, (3000,) * 24, (200,) * 256)
UNEVEN = ((512,) * 60 + (4095,) * 4, tuple(10 + 60 * number for number in range(64)), (9000, *[300] * 15))


@pytest.mark.parametrize("lengths", [*EQUAL, *UNEVEN])
def test_the_fit_finds_the_kernel_that_splits(file: Path, lengths: tuple[int, ...]) -> None:
    cost = load_step_cost(file)
    assert cost.step_s((), lengths) == pytest.approx(PretendedGpu().split(PassShape(lengths=lengths)), rel=0.05)


@pytest.mark.parametrize("lengths", [*EQUAL, *UNEVEN])
def test_the_fit_finds_the_kernel_that_does_not(file: Path, lengths: tuple[int, ...]) -> None:
    cost = load_step_cost(file, "no_split")
    assert cost.step_s((), lengths) == pytest.approx(PretendedGpu().no_split(PassShape(lengths=lengths)), rel=0.08)


def test_prompts_are_predicted(file: Path) -> None:
    cost = load_step_cost(file)
    for chunk in (ChunkShape(512), ChunkShape(2048, 8192), ChunkShape(100, 3000), ChunkShape(6000)):
        assert cost.step_s((chunk,), ()) == pytest.approx(PretendedGpu().split(PassShape((chunk,))), rel=0.06)


def test_alpha_and_one_blocks_bandwidth_are_what_the_machine_has() -> None:
    found = profiled()
    alphas = [bucket[-1] for bucket in found["skew"]["buckets"]]
    assert len(alphas) >= 12
    assert max(abs(alpha - ALPHA) for alpha in alphas) < 0.03
    assert found["no_split"]["block_bandwidth"] == pytest.approx(BLOCK_BANDWIDTH, rel=0.05)
    steeper = [bucket[-1] for bucket in found["no_split"]["alpha"]]
    assert max(steeper) > 3 * ALPHA  # unequal lengths cost that kernel more
    for what in ("decode_held_out", "chunk_held_out", "skew_held_out", "no_split_decode_held_out"):
        assert found["fit"][what]["mean"] < 0.06


def test_where_lengths_hardly_tell_the_bandwidth_is_what_one_block_reads_alone() -> None:
    """A device that is otherwise so slow that attention does not show."""

    def slow(shape: PassShape) -> float:
        return 50.0 + 1e-4 * len(shape.lengths)

    plan = plan_measurements(4096, grid=GRID)
    no_split = [replace(one, seconds=[]) for one in plan if not one.shape.chunks]
    for measurement in (*plan, *no_split):
        measurement.seconds.append(slow(measurement.shape))
    found = fit_profile(
        Profiled("slow", "m", "d", SHAPE, SMS, plan, {}, "", {}, GRID, no_split=no_split, block_bandwidth=60e9)
    )
    assert found["no_split"]["block_bandwidth"] == pytest.approx(60e9)


def test_without_the_other_kernel_the_file_has_one_mode_and_the_old_default(tmp_path: Path) -> None:
    raw = {name: part for name, part in profiled().items() if name != "no_split"}
    (tmp_path / "one.json").write_text(json.dumps(raw))
    options = load_step_cost(tmp_path / "one.json", "no_split").describe()["options"]
    assert options["block_bandwidth"] == 25e9


def test_scheduler_and_simulator_read_the_file(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cost = configured_cost(SchedulerConfig(cost_model=str(file), kernel_mode="no_split"))
    assert cost is not None
    assert cost.describe()["options"]["block_bandwidth"] == profiled()["no_split"]["block_bandwidth"]
    asked = configured_cost(SchedulerConfig(cost_model=str(file), kernel_mode="no_split", block_bandwidth_gb_s=30.0))
    assert asked is not None
    assert asked.describe()["options"]["block_bandwidth"] == 30e9
    assert Hardware(**default_hardware(file)).kv_tokens == 200_000
    for mode in ("split_kv", "no_split"):
        command = ["simulate", "--trace", "mix:short=0.9,requests=30", "--rate", "20", "--cost-model", str(file)]
        assert main([*command, "--kernel-mode", mode, "--policy", "aligned", "--json"]) == 0
    assert '"kernel_mode": "no_split"' in capsys.readouterr().out


def test_the_grid_reaches_what_a_gpu_serves_and_keeps_to_its_memory() -> None:
    plan = plan_measurements(32768, grid=replace(GPU_GRID, most_tokens=1 << 20))
    shapes = [measurement.shape for measurement in plan]
    assert max(len(shape.lengths) for shape in shapes) == 256
    assert max(max(shape.lengths, default=0) for shape in shapes) == 32767
    small = [one.shape for one in plan_measurements(4096, grid=replace(GPU_GRID, most_tokens=20_000))]
    assert max(sum(shape.lengths) for shape in small) <= 20_000
    assert max(chunk.tokens + chunk.cached_tokens for shape in small for chunk in shape.chunks) <= 4096 - 6
    assert sum(measurement.held_out for measurement in plan_measurements(4096, grid=GRID)) >= 12


# ---- the bench, with the tests' timer and engines


class CountingTimer(Timer):
    """Each reading is one second longer than the one before."""

    def __init__(self) -> None:
        self.begun = 0
        self.read = 0

    def begin(self) -> None:
        self.begun += 1

    def seconds(self) -> float:
        self.read += 1
        return float(self.read)


class Scripted(DecodeEngine):
    """Records the order in which steps are launched and their results requested."""

    overlaps = True

    def __init__(self, result: SampledToken | Exception) -> None:
        self.log: list[str] = []
        self.items: Sequence[DecodeItem] = ()
        self._result = result

    def ahead(self, rows: Sequence[Any]) -> bool:
        return True

    def launch(self, items: Sequence[DecodeItem]) -> DecodeStep:
        number, outer = sum(entry.startswith("launch") for entry in self.log), self
        self.log.append(f"launch {number}")
        self.items = items

        class Step(DecodeStep):
            def tokens(self) -> list[SampledToken | Exception]:
                outer.log.append(f"tokens {number}")
                return [outer._result] * len(items)

        return Step()

    def warm_up(self) -> None:
        raise AssertionError("the bench must not warm up: the creator of the engine does")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(inspect_model("tiny", resolve_model("tiny"), "auto", "cpu"), "cpu")


def runner_of(loaded: LoadedModel, blocks: int = 64) -> ModelRunner:
    return ModelRunner(loaded, allocate_cache(loaded.info.geometry(16), blocks, "cpu"))


def test_decodes_are_launched_ahead_in_blocks_of_their_own(loaded: LoadedModel) -> None:
    engine, timer = Scripted(SampledToken(1)), CountingTimer()
    bench = DevicePassBench(runner_of(loaded), engine, timer)
    assert bench.run(PassShape(lengths=(40, 15, 16))) == 1.0 / LAUNCHES
    ahead = [entry for number in range(LAUNCHES) for entry in (f"launch {number + 1}", f"tokens {number}")]
    assert engine.log == ["launch 0", *ahead, f"tokens {LAUNCHES}"]
    assert [len(item.block_ids) for item in engine.items] == [3, 1, 2]
    blocks = [block for item in engine.items for block in item.block_ids]
    assert len(set(blocks)) == 6
    assert [item.kv_tokens for item in engine.items] == [40, 15, 16]


def test_a_pass_whose_tokens_mean_nothing_is_no_measurement(loaded: LoadedModel) -> None:
    bench = DevicePassBench(runner_of(loaded), Scripted(NumericsError("not finite", rows=[0])), CountingTimer())
    with pytest.raises(NumericsError, match="not finite"):
        bench.run(PassShape(lengths=(40,)))


def test_prompts_and_mixed_passes_run_through_the_runner(loaded: LoadedModel) -> None:
    runner = runner_of(loaded)
    timer = CountingTimer()
    bench = DevicePassBench(runner, EagerDecode(runner, overlaps=True), timer)
    shapes = [PassShape((ChunkShape(40, 16),)), PassShape((ChunkShape(20),), (30, 70))]
    assert [bench.run(shape) for shape in shapes] == [1.0, 2.0]
    assert bench.run(PassShape(lengths=(30, 70))) == 3.0 / LAUNCHES
    assert timer.begun == 3
    assert blocks_needed(shapes) == 2 + 2 + 5


def test_both_kernels_are_measured_over_one_store(loaded: LoadedModel) -> None:
    """torch stands in for the second kernel: Triton's interpreter takes seconds a pass."""
    grid = Grid((1, 2), (16,), (16,), (0,), (), (1,), 512, (), {})
    made: list[str] = []
    stores: list[int] = []

    def bench(name: str) -> Callable[[torch.Tensor], DevicePassBench]:
        def make(store: torch.Tensor) -> DevicePassBench:
            made.append(name)
            stores.append(store.data_ptr())
            runner = ModelRunner(loaded, store)
            return DevicePassBench(runner, EagerDecode(runner, overlaps=True), CountingTimer())

        return make

    benches = {name: bench(name) for name in ("torch", "triton_no_split")}
    found = measure_passes(loaded, grid, 0.0, benches, lambda runner, blocks, count: 1e-4 * count, (1, 4))
    assert made == ["torch", "triton_no_split"]
    assert stores[0] == stores[1]
    assert found.backends == {"split_kv": "torch", "no_split": "triton_no_split"}
    assert found.host_s == {1: 1e-4, 4: 4e-4}
    assert any(measurement.seconds for measurement in found.plan if measurement.kind == "chunk")
    assert any(measurement.seconds for measurement in found.no_split)
    assert not any(measurement.shape.chunks for measurement in found.no_split)


def test_on_a_gpu_both_kernels_are_measured_of_a_model_that_they_serve(loaded: LoadedModel) -> None:
    """The model's probe used blocks that Triton's kernels refuse. Only the profile's block size counts."""
    on_gpu = replace(loaded, needs=replace(loaded.needs, device="cuda"))
    assert list(gpu_benches(on_gpu, from_tree({}), (1, 8))) == ["auto", "triton_no_split"]
    odd = replace(on_gpu, needs=replace(on_gpu.needs, head_dim=84))
    assert list(gpu_benches(odd, from_tree({}), (1, 8))) == ["auto"]


def test_rates_are_of_bytes_read_and_written_and_of_two_operations_a_product() -> None:
    rates = device_rates(torch.device("cpu"), CountingTimer(), copied=1 << 12, square=8)
    assert rates["matmul_flops"] == pytest.approx(2 * 8**3 / 4.5)  # the median of 1 to 8 seconds
    assert rates["copy_bytes_s"] == pytest.approx(2 * (1 << 12) / 12.5)  # and of 9 to 16


def test_links_are_measured_both_ways_and_between_each_two_devices() -> None:
    geometry = KvGeometry("m", "bfloat16", 2, 2, 8, 16)
    links = device_copies(geometry, [torch.device("cpu"), torch.device("cpu")])
    assert [(link.source, link.destination) for link in links] == [
        ("pool", "cpu"),
        ("cpu", "pool"),
        ("cpu", "cpu too"),
        ("cpu", "cpu"),
        ("cpu", "cpu"),
    ]
    assert all(link.bandwidth > 1e6 and link.latency_s >= 0.0 for link in links)


def test_all_of_it_becomes_one_file(loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole profile of a GPU on a CPU; only the CUDA queries are pretended."""

    def bench(store: torch.Tensor) -> DevicePassBench:
        runner = ModelRunner(loaded, store)
        return DevicePassBench(runner, EagerDecode(runner, overlaps=True), CountingTimer())

    pretend_gpus(monkeypatch, 1)
    monkeypatch.setattr(profiler_gpu, "gpu_benches", lambda loaded, config, sizes: {"torch": bench})
    config = from_tree({"kv_pool": {"size_gib": 1.0}, "cluster": {"prefill": 3, "device": "cuda"}})
    shape = ModelShape(loaded.info.layers, loaded.info.heads, loaded.info.kv_heads, loaded.info.head_dim)
    content = profiler_gpu.profile_gpu(config, loaded, shape, 8 << 30, 0.1, lambda runner, blocks, count: 1e-5 * count)
    (tmp_path / "gpu.json").write_text(json.dumps(content))
    assert load_step_cost(tmp_path / "gpu.json").step_s((), [10] * 2) > 0.0
    assert content["name"].endswith("pretended-h200")
    gpu = content["gpu"]
    assert gpu["backends"] == {"split_kv": "torch"}
    assert gpu["bandwidth_by_blocks"] == {"1": 50_000_000_000, "132": 4_000_000_000_000}
    assert [(link["source"], link["destination"]) for link in gpu["links"]][:2] == [("pool", "cpu"), ("cpu", "pool")]
    assert set(gpu["versions"]) == {"torch", "cuda", "triton", "transformers"}
    assert Hardware(**default_hardware(tmp_path / "gpu.json")).pool_bandwidth > 1e6
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 141 << 30))
    with pytest.raises(ResourceError, match="too little to profile passes"):
        profiler_gpu.profile_gpu(config, loaded, shape, 8 << 30, 0.1, lambda runner, blocks, count: 0.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_profiled_in_both_modes(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = ["profile", "--device", "cuda", "--seconds", "5", "--set", "engine.compile=off", "--out", str(out)]
    assert main(command) == 0
    content = json.loads(out.read_text())
    assert content["gpu"]["backends"]["no_split"] == "triton_no_split"
    assert content["gpu"]["rates"]["copy_bytes_s"] > content["no_split"]["block_bandwidth"] > 1e9
    for mode in ("split_kv", "no_split"):
        cost = load_step_cost(out, mode)
        assert 0.0 < cost.step_s((), [1000] * 8) < 1.0
