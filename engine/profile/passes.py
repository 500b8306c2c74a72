"""Measures the time of one model's passes on this machine: prompts, decodes, both, and uneven lengths."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from alignedserve.engine.model.loader import LoadedModel
from alignedserve.engine.parallel.processes import RankProcesses
from alignedserve.engine.runner import ForwardItem, ModelRunner, allocate_cache
from alignedserve.engine.sampling.sampler import Sampler, SampleRow
from alignedserve.request import SamplingParams
from alignedserve.scheduler.cost.step import ChunkShape

BLOCK_SIZE = 16
MOST_SHIFT = 6  # tokens
LEAST_BLOCKS = 512  # of the store, so that the decode loop's requests have room to grow too
_ROUNDS = 2  # of a pipeline's lanes, for one measurement
FEWEST = 3  # passes of a kind that are measured regardless of the time limit
THREAD_CLOCK, WALL_CLOCK = "processor time of the one thread", "wall clock"


@dataclass(frozen=True, slots=True)
class Grid:
    """Which passes are measured. `skews`: (requests, tokens of the short ones, tokens of the long ones).

    `bends`: prefix lengths, in tokens, where the cost of a longer one may change. `bounds`: of the buckets of alpha.
    `mixes`: lengths of decodes on which the fit is evaluated.
    """

    requests: tuple[int, ...]
    lengths: tuple[int, ...]
    chunks: tuple[int, ...]  # prompts are rarely a multiple of anything
    cached: tuple[int, ...]
    skews: tuple[tuple[int, int, int], ...]
    held_out_requests: tuple[int, ...]
    most_tokens: int  # KV of one pass
    bends: tuple[float, ...]
    bounds: Mapping[str, Sequence[float]]
    mixes: tuple[tuple[int, ...], ...] = ()


CPU_GRID = Grid(
    requests=(1, 2, 4, 8, 16, 32, 64),
    lengths=(16, 128, 512, 1024, 4096),
    chunks=(16, 30, 61, 125, 187, 250, 379, 509),
    cached=(0, 512, 2048),
    skews=((4, 128, 1024), (16, 128, 1024)),
    held_out_requests=(1, 3, 6, 12, 24, 48),
    most_tokens=32768,
    bends=(512.0,),
    bounds={"requests": [8.0], "long_share": [0.15, 0.4]},
)


@dataclass(frozen=True, slots=True)
class PassShape:
    """The content of a pass: prompt chunks, and the KV tokens that each decode request has before it."""

    chunks: tuple[ChunkShape, ...] = ()
    lengths: tuple[int, ...] = ()

    @property
    def work(self) -> int:
        """A number that grows with the time of the pass."""
        return sum(chunk.tokens * (256 + chunk.cached_tokens) for chunk in self.chunks) + sum(self.lengths)

    def shifted(self, number: int) -> PassShape:
        """The same pass with a few tokens more or fewer in each chunk, varying around it with `number`."""

        def tokens(chunk: ChunkShape) -> int:
            most = min(MOST_SHIFT, chunk.tokens // 4)
            place = number % (2 * most + 1)
            return chunk.tokens + ((place + 1) // 2 if place % 2 else -(place // 2))

        return replace(self, chunks=tuple(replace(chunk, tokens=tokens(chunk)) for chunk in self.chunks))


@dataclass(slots=True)
class Measurement:
    """`held_out`: predicted, but not used in the fit."""

    shape: PassShape
    kind: str
    held_out: bool = False
    seconds: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def plan_measurements(longest: int, seed: int = 0, grid: Grid = CPU_GRID) -> list[Measurement]:
    """Passes to measure for a model of at most `longest` positions: grids, and random ones to evaluate the fit."""
    most = min(longest, grid.most_tokens + 1)
    lengths = [length for length in grid.lengths if length < most]  # its new token has a position too
    longest = min(longest - MOST_SHIFT, grid.most_tokens)
    chunks = [tokens for tokens in grid.chunks if tokens <= longest]
    plan = [
        Measurement(PassShape(lengths=(length,) * count), "decode")
        for count in grid.requests
        for length in lengths
        if count * length <= grid.most_tokens
    ]
    plan += [
        Measurement(PassShape((ChunkShape(tokens, cached),)), "chunk")
        for tokens in chunks
        for cached in grid.cached
        if tokens + cached <= longest
    ]
    plan += [
        Measurement(PassShape(lengths=mix), "skew", held_out=True)
        for mix in grid.mixes
        if sum(mix) <= grid.most_tokens and max(mix) < most
    ]
    for count, near, end in grid.skews:
        short, far = min(near, lengths[-1]), min(end, lengths[-1])
        for long_ones in sorted({1, count // 4, count // 2}):
            uneven = (far,) * long_ones + (short,) * (count - long_ones)
            if sum(uneven) <= grid.most_tokens:
                plan.append(Measurement(PassShape(lengths=uneven), "skew"))
    draw = random.Random(seed)
    for number in range(18):
        count = draw.choice(grid.held_out_requests)
        widest = max(1, min(lengths[-1] // 4, 3 * grid.most_tokens // (2 * count)))
        uneven = tuple(draw.randint(1, widest) for _ in range(count))
        some = (ChunkShape(draw.randint(1, chunks[-1]), draw.choice((0, 0, lengths[-1] // 8))),)
        shape = (PassShape(lengths=uneven), PassShape(some), PassShape(some, uneven[:16]))[number % 3]
        kind = ("decode", "chunk", "mixed")[number % 3]
        fits = all(chunk.tokens + chunk.cached_tokens <= longest for chunk in shape.chunks)
        if fits and sum(shape.lengths) <= grid.most_tokens:
            plan.append(Measurement(shape, kind, held_out=True))
    return plan


class PassBench:
    """Runs passes through the real runner and sampler. Every request has its own blocks, filled with noise.

    A pass that one CPU thread computes is timed by that thread's processor time, which other work on the machine hardly
    changes; any other by the wall clock. `clocks` counts the passes by clock.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        plan: Sequence[Measurement],
        attention: str = "torch",
        *,
        ranks: RankProcesses | None = None,
        experts: int = 1,
    ) -> None:
        """`loaded`: with `ranks`, rank 0's part. `experts`: ranks that take the requests of a pass by turns."""
        geometry = loaded.info.geometry(BLOCK_SIZE)
        most = max(sum(map(geometry.blocks_for, _widths(measurement.shape))) for measurement in plan)
        self.blocks = max(LEAST_BLOCKS, most)
        self.runner: ModelRunner
        if ranks is None:
            self.runner = ModelRunner(loaded, allocate_cache(geometry, self.blocks, loaded.device), attention)
        else:
            _, cache = ranks.store("profile", geometry, self.blocks)
            self.runner = ranks.runner(loaded, cache)
        self._ranks, self._experts = ranks, experts
        self.clocks: Counter[str] = Counter()
        self._geometry, self._sampler = geometry, Sampler()
        self._order = list(range(self.blocks))
        random.Random(0).shuffle(self._order)

    def run(self, shape: PassShape) -> float:
        """Seconds of one pass, including sampling: the tokens are read back, so a GPU's work is over.

        Decodes of a pipeline are one iteration: a round of as many lanes as there are stages, while it is full.
        """
        items, rows = self._build(shape)
        if self.runner.depth > 1 and not shape.chunks:
            return self._round_s(items, rows)
        alone = self._ranks is None and self.runner.threads(items) == 1
        self.clocks[THREAD_CLOCK if alone else WALL_CLOCK] += 1
        now_s = time.thread_time if alone else time.perf_counter
        begun_s = now_s()
        self._sampler.sample(self.runner.forward(items), rows)
        return now_s() - begun_s

    def _round_s(self, items: list[ForwardItem], rows: list[SampleRow]) -> float:
        """Each lane's next pass begins when its last one has ended, while the others are under way."""
        lanes = deque(
            ([items[number] for number in lane], [rows[number] for number in lane])
            for lane in lanes_of([item.start for item in items], self.runner.depth)
        )
        waits = deque(self.runner.begin(own) for own, _ in lanes)
        begun_s = 0.0
        for number in range(len(lanes) * (1 + _ROUNDS)):
            if number == len(lanes):  # the pipeline is full
                begun_s = time.perf_counter()
            own, its_rows = lanes[0]
            self._sampler.sample(waits.popleft()(), its_rows)
            waits.append(self.runner.begin(own))
            lanes.rotate(-1)
        took_s = time.perf_counter() - begun_s
        for wait in waits:
            wait()
        self.clocks[WALL_CLOCK] += 1
        return took_s / _ROUNDS

    def _build(self, shape: PassShape) -> tuple[list[ForwardItem], list[SampleRow]]:
        items: list[ForwardItem] = []
        rows: list[SampleRow] = []
        used = 0
        for tokens, start in (
            *((chunk.tokens, chunk.cached_tokens) for chunk in shape.chunks),
            *((1, length) for length in shape.lengths),
        ):
            count = self._geometry.blocks_for(tokens + start)
            rank = len(items) % self._experts
            items.append(ForwardItem([1] * tokens, start, self._order[used : used + count], rank=rank))
            rows.append(SampleRow(SamplingParams(temperature=0.0), [1], []))
            used += count
        return items, rows


def lanes_of(lengths: Sequence[int], depth: int) -> list[list[int]]:
    """Requests, by number, of a pipeline's lanes: in order, of like lengths. At most `depth`, none empty."""
    order = sorted(range(len(lengths)), key=lambda number: lengths[number])
    return [lane for lane in (sorted(order[place::depth]) for place in range(depth)) if lane]


def _widths(shape: PassShape) -> list[int]:
    return [*(chunk.tokens + chunk.cached_tokens for chunk in shape.chunks), *(length + 1 for length in shape.lengths)]


def measure(
    run: Callable[[PassShape], float], plan: Sequence[Measurement], limit_s: float, now_s: Callable[[], float]
) -> int:
    """Run every pass in rounds until `limit_s` is over; returns the number of complete rounds.

    Libraries cache data for a number of rows. It is cached for a decode, which mostly follows one of equal size, but
    not for a prompt, whose number of tokens is mostly new. So a decode is run twice, and the second run counts; the
    chunks of a prompt have a few tokens more or fewer each time.

    The first round goes from the smallest pass to the largest, so that a slow machine leaves out the largest; the
    smallest of each kind are always measured. Later rounds are shuffled. A few passes are run before, so that one-time
    work of compilers and caches is not counted.
    """
    end = now_s() + limit_s
    order = sorted(plan, key=lambda measurement: measurement.shape.work)
    first = {id(measurement) for kind in ("decode", "chunk") for measurement in _of_kind(order, kind)[:FEWEST]}
    for measurement in order[: 2 * FEWEST]:
        run(measurement.shape)
    for measurement in order:
        if id(measurement) in first or now_s() < end:
            _run_once(run, measurement)
    measured = [measurement for measurement in order if measurement.seconds]
    rounds, draw = int(len(measured) == len(order)), random.Random(1)
    while now_s() < end:
        draw.shuffle(measured)
        for measurement in measured:
            if now_s() >= end:
                return rounds
            _run_once(run, measurement)
        rounds += 1
    return rounds


def _run_once(run: Callable[[PassShape], float], measurement: Measurement) -> None:
    if not measurement.shape.chunks:
        run(measurement.shape)
    measurement.seconds.append(run(measurement.shape.shifted(len(measurement.seconds))))


def _of_kind(plan: Sequence[Measurement], kind: str) -> list[Measurement]:
    return [measurement for measurement in plan if measurement.kind == kind and not measurement.held_out]
