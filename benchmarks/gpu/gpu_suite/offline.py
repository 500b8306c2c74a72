"""Runs the engine without a cluster: prompts in, tokens out, with as many requests at once as the cache holds."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from alignedserve.config import Config, DecodeConfig, EngineConfig
from alignedserve.engine.decode_engine import decode_engine as worker_engine
from alignedserve.engine.decoding import DecodeEngine, DecodeItem, DecodeStep
from alignedserve.engine.model.loader import LoadedModel
from alignedserve.engine.runner import ForwardItem, ModelRunner
from alignedserve.engine.sampling.sampler import Sampler, SampleRow
from alignedserve.request import SamplingParams

MOST_TOKENS = 1 << 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=MOST_TOKENS, ignore_eos=True)


@dataclass(slots=True)
class Job:
    """One request. At the end `tokens`, its answer, has exactly `new_tokens` tokens."""

    prompt: list[int]
    new_tokens: int
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    rank: int = 0
    launched: int = 0
    """Tokens of the answer that are known, or will be once the launched iterations end. With one at the beginning, the
    prompt was computed elsewhere."""
    row: SampleRow = field(init=False)

    def __post_init__(self) -> None:
        self.row = SampleRow(GREEDY, self.prompt, self.tokens)

    @property
    def cached(self) -> int:
        """Tokens in the cache once all launched iterations have ended."""
        return len(self.prompt) + self.launched - 1


@dataclass(slots=True)
class _Flight:
    step: DecodeStep
    jobs: list[Job]


class Offline:
    """Serves requests first come, first served. A request gets all its blocks when it joins."""

    def __init__(
        self,
        runner: ModelRunner,
        engine: DecodeEngine,
        *,
        max_running: int = 256,
        token_budget: int = 8192,
        chunk_tokens: int = 0,
        seed: int = 0,
        ranks: int = 1,
    ) -> None:
        """`chunk_tokens`: size of prefill chunks; 0: prompts are computed whole. `ranks`: that share experts, each with
        a cache as large as the runner's.
        """
        self._runner, self._engine, self._sampler = runner, engine, Sampler()
        self._max_running, self._budget, self._chunk = max_running, token_budget, chunk_tokens
        each, draw = runner.cache.shape[0], random.Random(seed)
        self._free = [list(range(rank * each or 1, (rank + 1) * each)) for rank in range(ranks)]
        for free in self._free:  # of each rank; warming up writes to block 0
            draw.shuffle(free)
        self._fetch: Callable[[Job], None] | None = None
        self.iterations = 0

    def run(self, jobs: Sequence[Job], fetch: Callable[[Job], None] | None = None) -> None:
        """Returns when every job has all its tokens. Raises the error of a failed iteration or token.

        `fetch`: puts the KV of a prompt that was computed elsewhere into the job's blocks.
        """
        self._fetch = fetch
        waiting, running = deque(jobs), list[Job]()
        flight: _Flight | None = None
        while waiting or running or flight:
            # Joining jobs take part in the next launch; the iteration in flight is not affected.
            joined = self._join(waiting, len(running))
            running += [job for job in joined if job.launched < job.new_tokens]
            if self._runner.depth > 1:
                self._run_lanes(running)
                running = [job for job in running if job.launched < job.new_tokens]
                continue
            after = self._launch(running, flight)
            if flight is not None:
                self._land(flight)
            running = [job for job in running if job.launched < job.new_tokens]
            if after is not None and not self._engine.overlaps:
                self._land(after)
                after = None
            flight = after

    def _run_lanes(self, running: Sequence[Job]) -> None:
        """An iteration of each lane of a pipeline: all are under way before the tokens of the first are taken."""
        lanes = [running[number :: self._runner.depth] for number in range(self._runner.depth)]
        for flight in [self._launch(lane, None) for lane in lanes]:
            if flight is not None:
                self._land(flight)

    def _join(self, waiting: deque[Job], running: int) -> list[Job]:
        joined: list[Job] = []
        tokens = 0
        while waiting and running + len(joined) < self._max_running:
            job = waiting[0]
            needed = -(-(len(job.prompt) + job.new_tokens) // self._runner.block_size)
            rank, free = max(enumerate(self._free), key=lambda one: len(one[1]))
            if needed > len(free):
                if not running and not joined:
                    raise ValueError(f"a request of {needed} blocks does not fit in a cache of {len(free)} free")
                break
            if joined and tokens + len(job.prompt) > self._budget:
                break
            job.rank, job.blocks = rank, [free.pop() for _ in range(needed)]
            tokens += len(job.prompt)
            joined.append(waiting.popleft())
        for job in joined:
            if job.launched:
                assert self._fetch is not None
                self._fetch(job)
        if new := [job for job in joined if not job.launched]:
            self._prefill(new)
        return joined

    def _prefill(self, jobs: Sequence[Job]) -> None:
        if self._chunk:
            for job in jobs:
                last = (len(job.prompt) - 1) // self._chunk * self._chunk
                for begin in range(0, last, self._chunk):
                    part = job.prompt[begin : begin + self._chunk]
                    self._runner.forward([ForwardItem(part, begin, job.blocks, "none", job.rank)])
            items = [self._rest(job) for job in jobs]
        else:
            items = [ForwardItem(job.prompt, 0, job.blocks, rank=job.rank) for job in jobs]
        logits = self._runner.forward(items)
        for job, token in zip(jobs, self._sampler.sample(logits, [job.row for job in jobs]), strict=True):
            job.tokens.append(token.token_id)
            job.launched = 1
            self._release(job)

    def _rest(self, job: Job) -> ForwardItem:
        begin = (len(job.prompt) - 1) // self._chunk * self._chunk
        return ForwardItem(job.prompt[begin:], begin, job.blocks, rank=job.rank)

    def _launch(self, running: Sequence[Job], before: _Flight | None) -> _Flight | None:
        if not running:
            return None
        place = {id(job): index for index, job in enumerate(before.jobs)} if before is not None else {}
        items = []
        for job in running:
            known = len(job.tokens) == job.launched
            token = job.tokens[-1] if known else None
            previous = -1 if known else place[id(job)]
            items.append(DecodeItem(job.row, token, previous, job.cached, job.blocks, job.launched, job.rank))
        for job in running:
            job.launched += 1
        self.iterations += 1
        return _Flight(self._engine.launch(items), list(running))

    def _land(self, flight: _Flight) -> None:
        for job, token in zip(flight.jobs, flight.step.tokens(), strict=True):
            if isinstance(token, Exception):
                raise token
            job.tokens.append(token.token_id)
            self._release(job)

    def _release(self, job: Job) -> None:
        if len(job.tokens) == job.new_tokens:
            self._free[job.rank] += job.blocks


def new_runner(loaded: LoadedModel, cache: torch.Tensor, backend: str = "auto") -> ModelRunner:
    """A runner as a worker creates it, by default with the fastest attention backend that serves the model here.

    It overwrites the content of `cache`.
    """
    return ModelRunner(loaded, cache, backend)


def decode_engine(runner: ModelRunner, most_rows: int, *, compiles: bool = True) -> DecodeEngine:
    """A decode worker's engine on this device for `most_rows` rows, warmed up. It overwrites block 0.

    `compiles`: compile parts of the model, such as norms, where that is faster. This takes seconds and changes the
    model.
    """
    engine_config = EngineConfig(compile="auto" if compiles else "off")
    config = Config(decode=DecodeConfig(max_running=most_rows), engine=engine_config)
    engine = worker_engine(runner, config, lambda done, of: None)
    engine.warm_up()
    return engine


def fill(cache: torch.Tensor, seed: int) -> None:
    """Fill the cache with random keys and values: timings on zeros would not be representative."""
    generator = torch.Generator(cache.device).manual_seed(seed)
    for begin in range(0, cache.shape[0], 64):  # in parts: no temporary as large as the cache
        cache[begin : begin + 64].normal_(0.0, 1.0, generator=generator)
