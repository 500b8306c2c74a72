"""A scheduler core in virtual time, with instances whose times come from a formula, for tests of admission.

One prefill and one decode instance, without candidate buffers. For behaviour over time (which requests are accepted
when, which objectives are kept), not for races: `small_cell` tests those.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from alignedserve.config import ClusterConfig, Config, DecodeConfig, KvPoolConfig, SchedulerConfig
from alignedserve.request import RequestKey
from alignedserve.scheduler.core import actions as act
from alignedserve.scheduler.core import events as ev
from alignedserve.scheduler.core.scheduler_core import SchedulerCore
from alignedserve.scheduler.cost.pass_model import Passes

BLOCK = 16
REPORT_EVERY_S = 0.1


@dataclass(slots=True)
class Pace:
    """The times of passes. `shared`: how much slower a pass is while the other instance works too. `noise`: the largest
    random factor of a pass."""

    prefill_s: float = 0.002
    prefill_token_s: float = 1e-4
    iteration_s: float = 0.004
    row_s: float = 2e-4
    shared: float = 1.0
    noise: float = 0.0


@dataclass(slots=True)
class Life:
    """One request as its client sees it. Times are in seconds of the virtual clock."""

    arrived_s: float
    tokens: int
    left: int
    first_s: float = 0.0
    ended_s: float = 0.0
    retry_after_s: float | None = None  # if it was refused

    def ttft_s(self) -> float:
        return self.first_s - self.arrived_s

    def tpot_s(self, new_tokens: int) -> float:
        return (self.ended_s - self.first_s) / (new_tokens - 1)


@dataclass(slots=True)
class _Meter:
    """Sums that are reported at intervals, as workers measure them."""

    sums: Passes = field(default_factory=lambda: Passes(0, 0, 0, 0.0))
    taken_s: float = 0.0

    def add(self, tokens: int, cached: int, seconds: float) -> None:
        s = self.sums
        self.sums = Passes(s.passes + 1, s.tokens + tokens, s.cached_tokens + cached, s.seconds + seconds)

    def take(self, now_s: float) -> Passes | None:
        if not self.sums.passes or now_s - self.taken_s < REPORT_EVERY_S:
            return None
        sums, self.sums, self.taken_s = self.sums, Passes(0, 0, 0, 0.0), now_s
        return sums


class PacedCell:
    """`submit` requests, and let time pass with `run_until`. `lives` has every request by its name."""

    def __init__(
        self,
        pace: Pace,
        *,
        new_tokens: int = 32,
        pool_blocks: int = 100_000,
        cache_blocks: int = 10_000,
        max_running: int = 256,
        chunk_tokens: int = 512,
        seed: int = 0,
        **scheduler: float,
    ) -> None:
        config = Config(
            cluster=ClusterConfig(prefetch=False),
            kv_pool=KvPoolConfig(block_size=BLOCK),
            decode=DecodeConfig(max_running=max_running),
            scheduler=SchedulerConfig(**scheduler),  # type: ignore[arg-type]
        )
        self.core = SchedulerCore(config, BLOCK)
        self.pace = pace
        self.now_s = 0.0
        self.lives: dict[str, Life] = {}
        self._new_tokens = new_tokens
        self._cache_blocks = cache_blocks
        self._chunk_tokens = chunk_tokens
        self._draw = random.Random(seed)
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._prompts: list[tuple[RequestKey, int]] = []  # tokens of each prompt that are not computed yet
        self._offered: list[RequestKey] = []
        self._running: list[RequestKey] = []
        self._prefill_busy = self._decode_busy = False
        self._prefill_meter, self._decode_meter = _Meter(), _Meter()
        for role, name in ("prefill", "p0"), ("decode", "d0"), ("kv_pool", "pool"):
            self._do(ev.InstanceJoined(role, name))
        self._do(ev.PairsChanged((("d0", ()),)))
        self._do(ev.PoolReported("pool", pool_blocks, pool_blocks))
        self._report_prefill()
        self._report_decode()

    # ---- called by tests

    def submit(self, name: object, tokens: int, epoch: int = 0) -> Life:
        life = Life(self.now_s, tokens, self._new_tokens)
        self.lives[str(name)] = life
        key = RequestKey(str(name), epoch)
        meta = ev.RequestMeta(key, tokens, tokens + self._new_tokens, str(name), "gateway")
        self._do(ev.Submitted((meta,)))
        return life

    def offer(self, rate: float, seconds: float, tokens: int = 64) -> list[Life]:
        """Poisson arrivals from now on. Returns after the last arrival."""
        lives, due_s, end_s = [], self.now_s, self.now_s + seconds
        while (due_s := due_s + self._draw.expovariate(rate)) < end_s:
            self.run_until(due_s)
            lives.append(self.submit(len(self.lives), tokens))
        self.run_until(end_s)
        return lives

    def run_until(self, end_s: float) -> None:
        while self._agenda and self._agenda[0][0] <= end_s:
            self.now_s, _, step = heapq.heappop(self._agenda)
            step()
        self.now_s = max(self.now_s, end_s)

    def drain(self) -> None:
        """Run until all accepted requests have ended."""
        while self._agenda:
            self.run_until(self._agenda[0][0])

    # ---- the core and its actions

    def _do(self, event: ev.Event) -> None:
        for action in self.core.handle(event, self.now_s):
            match action:
                case act.StartPrefill():
                    self._prompts += [(key, self.lives[key.request_id].tokens) for key in action.keys]
                    self._start_prefill()
                case act.Prefetch():
                    self._offered += action.keys
                    self._start_decode()
                case act.Reject():
                    for key in action.keys:
                        self.lives[key.request_id].retry_after_s = getattr(action.error, "retry_after_s", 0.0)

    def _after(self, seconds: float, step: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now_s + seconds, next(self._order), step))

    def _seconds(self, alone_s: float, *, other_busy: bool) -> float:
        return alone_s * (self.pace.shared if other_busy else 1.0) * (1.0 + self._draw.random() * self.pace.noise)

    # ---- prefill

    def _start_prefill(self) -> None:
        if self._prefill_busy or not self._prompts:
            return
        self._prefill_busy = True
        budget, chunks = self._chunk_tokens, []
        while self._prompts and budget:
            key, left = self._prompts[0]
            count = min(left, budget)
            budget -= count
            chunks.append((key, count == left))
            self._prompts[0] = (key, left - count)
            if count == left:
                self._prompts.pop(0)
        tokens = self._chunk_tokens - budget
        alone_s = self.pace.prefill_s + self.pace.prefill_token_s * tokens
        seconds = self._seconds(alone_s, other_busy=self._decode_busy)
        self._prefill_meter.add(tokens, 0, seconds)
        self._after(seconds, lambda: self._end_prefill(chunks))

    def _end_prefill(self, chunks: list[tuple[RequestKey, bool]]) -> None:
        self._prefill_busy = False
        for key, complete in chunks:
            if complete:
                life = self.lives[key.request_id]
                life.first_s = self.now_s
                life.left -= 1
                blocks = -(-life.tokens // BLOCK)
                self._do(ev.Prefilled(key, life.tokens, blocks, blocks))
        self._report_prefill()
        self._start_prefill()

    def _report_prefill(self) -> None:
        measured = self._prefill_meter.take(self.now_s)
        self._do(ev.PrefillReported("p0", 0, self._cache_blocks, 0, 0, 0, 0, measured=measured))

    # ---- decode

    def _start_decode(self) -> None:
        if self._decode_busy or not (self._running or self._offered):
            return
        self._decode_busy = True
        room = self.core._state.config.decode.max_running - len(self._running)
        joined, self._offered = self._offered[:room], self._offered[room:]
        self._running += joined
        if joined:
            self._do(ev.Joined("d0", tuple(joined)))
        alone_s = self.pace.iteration_s + self.pace.row_s * len(self._running)
        seconds = self._seconds(alone_s, other_busy=self._prefill_busy)
        cached = sum(self._length(key) for key in self._running)
        self._decode_meter.add(len(self._running), cached, seconds)
        self._after(seconds, self._end_iteration)

    def _end_iteration(self) -> None:
        self._decode_busy = False
        ended = []
        for key in self._running:
            life = self.lives[key.request_id]
            life.left -= 1
            if life.left <= 0:
                life.ended_s = self.now_s
                ended.append(key)
        self._running = [key for key in self._running if not self.lives[key.request_id].ended_s]
        if ended:
            self._do(ev.Finished(tuple(ended)))
        self._report_decode()
        self._start_decode()

    def _length(self, key: RequestKey) -> int:
        life = self.lives[key.request_id]
        return life.tokens + self._new_tokens - life.left

    def _report_decode(self) -> None:
        lengths = [self._length(key) for key in self._running] or [0]
        used = sum(-(-length // BLOCK) for length in lengths)
        measured = self._decode_meter.take(self.now_s)
        free = self._cache_blocks - used
        running = len(self._running)
        self._do(
            ev.DecodeReported(
                "d0", self._cache_blocks, free, running, min(lengths), max(lengths), 1, 0, 0, measured=measured
            )
        )
