"""Measures passes and rates of a GPU. Decodes run as they are served."""

from __future__ import annotations

import random
import statistics
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from alignedserve.config import Config
from alignedserve.engine.backends.choice import AUTO, refusals
from alignedserve.engine.batch import ForwardItem
from alignedserve.engine.decode_engine import decode_engine
from alignedserve.engine.decoding import DecodeEngine, DecodeItem, DecodeStep
from alignedserve.engine.model.loader import LoadedModel
from alignedserve.engine.profile.passes import (
    BLOCK_SIZE,
    LEAST_BLOCKS,
    MOST_SHIFT,
    Grid,
    Measurement,
    PassShape,
    lanes_of,
    measure,
    plan_measurements,
)
from alignedserve.engine.runner import ModelRunner, allocate_cache
from alignedserve.engine.sampling.sampler import Sampler, SampleRow
from alignedserve.request import SamplingParams
from alignedserve.scheduler.cost.step import KERNEL_MODES

# The paper's: 60 short requests and 4 of 4096 tokens, including the new one, and lengths spread from 10 to 3790.
MIXES = ((512,) * 60 + (4095,) * 4, tuple(10 + 60 * number for number in range(64)))
GPU_GRID = Grid(
    requests=(1, 2, 4, 8, 16, 32, 64, 128, 192, 256),
    lengths=(16, 128, 512, 1024, 2047, 4095, 8191, 16383, 32767),
    chunks=(16, 61, 125, 250, 509, 1021, 2039, 4089, 8181),
    cached=(0, 1024, 4096, 16384),
    skews=tuple(
        (count, short, far)
        for count in (4, 16, 64, 256)
        for short, far in ((128, 1024), (128, 4095), (512, 8191), (1024, 32767))
    ),
    held_out_requests=(1, 3, 12, 48, 100, 200),
    most_tokens=1 << 20,
    bends=(512.0, 4096.0),
    bounds={"requests": [8.0, 32.0, 128.0], "long_share": [0.15, 0.4], "longest": [4096.0]},
    mixes=MIXES,
)

NO_SPLIT = "triton_no_split"
SPLIT_SHARE = 0.65  # of the time for passes; the rest is for `no_split`, which measures no prompts
LEAST_SHARE = 0.25  # of the whole time, at least, for passes; the rest is for compiling and capturing
LAUNCHES = 4  # of each timed pass, in sequence
COPIED_BYTES = 1 << 30
SQUARE = 8192  # rows and columns of the multiplied matrices
RATE_REPEATS = 8
WARM_REPEATS = 40


class Timer(ABC):
    """Measures the seconds of work on a device."""

    @abstractmethod
    def begin(self) -> None:
        """Start after all work submitted so far."""

    @abstractmethod
    def seconds(self) -> float:
        """Seconds from there to the end of all work submitted by now; waits for that."""


class CudaTimer(Timer):
    """Uses the device's own clock, on its current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: Any = None

    def begin(self) -> None:
        with torch.cuda.device(self._device):
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._events[0].record()

    def seconds(self) -> float:
        with torch.cuda.device(self._device):
            self._events[1].record()
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) * 1e-3


class DevicePassBench:
    """Runs passes of one runner, every request in its own blocks. `run` is what `profile.measure` calls.

    Decodes go through `engine`. Each is launched before the tokens of the previous one are requested, so a pass takes
    the time of the device, or of the host if that is longer. In a pipeline a pass is a round of lanes: each is launched
    when its last tokens are known, while the others are under way. Prompts are computed one pass at a time.
    """

    def __init__(
        self, runner: ModelRunner, engine: DecodeEngine, timer: Timer, ranges: int = 1, held: object = None
    ) -> None:
        """`ranges`: of the instance's blocks, of which the runner's store is the first; requests take them by turns.
        `held`: what must live as long as the store.
        """
        self.runner, self.engine, self._timer, self._held = runner, engine, timer, held
        self.blocks, self._ranges = runner.cache.shape[0], ranges
        self._sampler = Sampler()
        self._row = SampleRow(SamplingParams(temperature=0.0), [1], [])
        self._order = list(range(self.blocks))
        random.Random(0).shuffle(self._order)

    def run(self, shape: PassShape) -> float:
        """Seconds of one pass, including the choice of tokens."""
        return self._run_pass(shape) if shape.chunks else self._run_decodes(shape)

    def _run_decodes(self, shape: PassShape) -> float:
        places = self._places([length + 1 for length in shape.lengths])
        items = [
            DecodeItem(self._row, 1, 0, length, blocks, 0, rank)
            for length, (blocks, rank) in zip(shape.lengths, places, strict=True)
        ]
        depth = self.runner.depth
        lanes = deque([items[at] for at in lane] for lane in lanes_of(shape.lengths, depth))
        steps = deque(self.engine.launch(lane) for lane in lanes)  # keep devices busy while the host prepares the next
        self._timer.begin()
        for _ in range(LAUNCHES * len(lanes)):
            if depth > 1:  # until then the lane's requests are under way
                _require_tokens(steps.popleft())
            steps.append(self.engine.launch(lanes[0]))
            lanes.rotate(-1)
            if depth == 1:
                _require_tokens(steps.popleft())
        seconds = self._timer.seconds() / LAUNCHES
        for step in steps:
            _require_tokens(step)
        return seconds

    def _run_pass(self, shape: PassShape) -> float:
        chunks = [(chunk.tokens, chunk.cached_tokens) for chunk in shape.chunks]
        passed = [*chunks, *((1, length) for length in shape.lengths)]
        places = self._places([tokens + start for tokens, start in passed])
        items = [
            ForwardItem([1] * tokens, start, blocks, rank=rank)
            for (tokens, start), (blocks, rank) in zip(passed, places, strict=True)
        ]
        rows = [self._row] * len(items)
        self._sampler.sample(self.runner.forward(items), rows)  # one-time compilation for such a pass is not measured
        self._timer.begin()
        self._sampler.sample(self.runner.forward(items), rows)
        return self._timer.seconds()

    def _places(self, widths: Sequence[int]) -> list[tuple[list[int], int]]:
        """Blocks for so many tokens of each request, and the rank that has them."""
        used, found = [0] * self._ranges, []
        for number, tokens in enumerate(widths):
            rank, count = number % self._ranges, -(-tokens // BLOCK_SIZE)
            own = self._order[used[rank] : used[rank] + count]
            used[rank] += count
            found.append(([rank * self.blocks + block for block in own], rank))
        return found


def _require_tokens(step: DecodeStep) -> None:
    """Raise the error of an item without a token: such a pass would not be served."""
    for result in step.tokens():
        if isinstance(result, Exception):
            raise result


def blocks_needed(shapes: Iterable[PassShape]) -> int:
    """Number of blocks with which a store has room for each pass, with chunks a few tokens longer."""
    return max(
        sum(-(-(chunk.tokens + MOST_SHIFT + chunk.cached_tokens) // BLOCK_SIZE) for chunk in shape.chunks)
        + sum(-(-(length + 1) // BLOCK_SIZE) for length in shape.lengths)
        for shape in shapes
    )


@dataclass(slots=True)
class DevicePasses:
    """Passes measured in both kernel modes, `backends` by mode; `no_split` is empty if there is no such kernel."""

    plan: list[Measurement]
    no_split: list[Measurement]
    rounds: int
    backends: dict[str, str]
    host_s: dict[int, float]
    waits_for_host: bool = False
    """Whether a pass begins only after what the engine adds to the one before."""


def measure_passes(
    loaded: LoadedModel,
    grid: Grid,
    limit_s: float,
    benches: Mapping[str, Callable[[torch.Tensor], DevicePassBench]],
    host_overhead_s: Callable[[ModelRunner, int, int], float],
    host_requests: Sequence[int],
) -> DevicePasses:
    """Fill a store with noise, and run the plan's passes over it by each of `benches`, created by backend name.

    The first bench uses the splitting kernel and runs all kinds of passes; a second one runs decodes only.
    `host_overhead_s` of each of `host_requests` is measured last, on the first. The time for creating benches is part
    of `limit_s`.
    """
    begun_s = time.monotonic()
    plan = plan_measurements(loaded.info.max_positions, grid=grid)
    store = allocate_cache(
        loaded.info.geometry(BLOCK_SIZE),
        max(LEAST_BLOCKS, blocks_needed(measurement.shape for measurement in plan)),
        loaded.device,
    )
    store.normal_()
    (split, make_split), *others = benches.items()
    bench = make_split(store)
    runner = bench.runner
    found = DevicePasses(plan, [], 0, {KERNEL_MODES[0]: split}, {})
    made_s = time.monotonic() - begun_s
    passes_s = max(LEAST_SHARE * limit_s, limit_s - made_s * (1 + len(others)))  # another bench takes as long to create
    found.rounds = measure(bench.run, plan, passes_s * (SPLIT_SHARE if others else 1.0), time.monotonic)
    for name, make in others:
        found.backends[KERNEL_MODES[1]] = name
        found.no_split = [replace(one, seconds=[]) for one in plan if not one.shape.chunks]
        other = make(store)
        left_s = max((1.0 - SPLIT_SHARE) * LEAST_SHARE * limit_s, limit_s - (time.monotonic() - begun_s))
        measure(other.run, found.no_split, left_s, time.monotonic)
    found.host_s = {count: host_overhead_s(runner, store.shape[0], count) for count in host_requests}
    return found


def gpu_benches(
    loaded: LoadedModel, config: Config, sizes: Sequence[int]
) -> dict[str, Callable[[torch.Tensor], DevicePassBench]]:
    """Benches of the configured attention backend, and of the one that does not split KV if it can serve `loaded`.

    Decodes run as they are served, from CUDA graphs of these sizes if the backend's passes can be captured.
    """
    as_served = as_captured(config, sizes)

    def bench(store: torch.Tensor, name: str) -> DevicePassBench:
        runner = ModelRunner(loaded, store, name)
        # Parts of the model worth compiling are compiled when the first bench is created.
        engine_config = as_served.engine if name == split else replace(as_served.engine, compile="off")
        engine = decode_engine(runner, replace(as_served, engine=engine_config), lambda done, total: None)
        engine.warm_up()
        return DevicePassBench(runner, engine, CudaTimer(runner.loaded.device))

    needs = replace(loaded.needs, block_size=BLOCK_SIZE)  # the model's own have the probe's block size
    refused = {candidate.name: candidate.refusal for candidate in refusals(needs)}
    split = config.engine.attention if config.engine.attention != NO_SPLIT else AUTO
    names = [split] if refused[NO_SPLIT] else [split, NO_SPLIT]
    return {name: partial(bench, name=name) for name in names}


def as_captured(config: Config, sizes: Sequence[int]) -> Config:
    """`config` with CUDA graphs of these sizes."""
    graphs = replace(config.decode, graph_sizes=",".join(map(str, sizes)), max_running=sizes[-1])
    return replace(config, decode=graphs)


def device_rates(
    device: torch.device, timer: Timer, copied: int = COPIED_BYTES, square: int = SQUARE
) -> dict[str, float]:
    """Reference rates; also brings the clocks to their level under load, before anything else is timed.

    `matmul_flops`: of bf16 matrices, a second; `copy_bytes_s`: bytes read and written, a second.
    """
    left, right = (torch.randn(square, square, device=device).to(torch.bfloat16) for _ in range(2))
    source = torch.randint(256, (copied,), dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    for _ in range(WARM_REPEATS):
        left @ right
    multiply_s = _median_s(lambda: left @ right, timer)
    copy_s = _median_s(lambda: destination.copy_(source), timer)
    return {"matmul_flops": 2.0 * square**3 / multiply_s, "copy_bytes_s": 2.0 * copied / copy_s}


def _median_s(work: Callable[[], object], timer: Timer) -> float:
    taken = []
    for _ in range(RATE_REPEATS):
        timer.begin()
        work()
        taken.append(timer.seconds())
    return statistics.median(taken)
