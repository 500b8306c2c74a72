"""Replays a workload through colocated instances: the real instance schedulers and allocator, in virtual time.

An instance plans as many passes ahead as its scheduler allows (`depth`), and runs them one after the other through the
stages of its pipeline. While nothing is decided, passes are run in one leap (`StepCost.run_s`), with exactly the
results of single steps.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from alignedserve.errors import AccountingError, ConfigError
from alignedserve.request import RequestKey
from alignedserve.scheduler.colocated.base import InstanceScheduler, MixedPlan, MixedRequest, PlannedDecode
from alignedserve.scheduler.cost.step import ChunkShape, StepCost
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.systems import Option, System, scheduler_class, with_options
from alignedserve.simulator.hardware import Hardware
from alignedserve.simulator.prefix.groups import group_by_prefix
from alignedserve.simulator.prefix.ideal import ideal_hit_tokens
from alignedserve.simulator.report.results import RequestResult, RunResult
from alignedserve.simulator.report.steps import StepRecorder, merge
from alignedserve.simulator.slowed import SlowedCost
from alignedserve.simulator.workload import Workload

ROUTINGS = ("least-loaded", "round-robin", "random")
LEAST_LENGTH_STEP = 16  # tokens
MOST_LEAP = 4096  # passes in one leap
SHORTEST_S = 1e-6  # of a pass, to estimate how many passes precede the next arrival


@dataclass(slots=True)
class _Pass:
    """A planned pass and its times. Seconds of the virtual clock."""

    plan: MixedPlan
    start_s: float
    seconds: float
    balanced_s: float
    end_s: float
    gap_s: float


@dataclass(slots=True)
class _Instance:
    number: int
    scheduler: InstanceScheduler
    passes: deque[_Pass] = field(default_factory=deque)
    stage_free_s: list[float] = field(default_factory=list)
    steps: StepRecorder = field(default_factory=StepRecorder)
    armed: bool = False  # the end of its oldest pass is in the event queue


def simulate_colocated(
    workload: Workload,
    system: System,
    options: Mapping[str, Option],
    hardware: Hardware,
    cost: StepCost,
    *,
    instances: int = 1,
    seed: int = 0,
    routing: str = "least-loaded",
    leap: bool = True,
    pinned_lengths: bool = False,
) -> RunResult:
    """Every arrival ends with all of its tokens, or is refused. `options`: changes to the system's options.

    `pinned_lengths`: each request asks for exactly the tokens that it gets (`ignore_eos` and `max_tokens`, as vLLM's
    benchmarks do), so that the scheduler knows its end. Otherwise all may ask for as many as the longest.

    Raises ConfigError for options that the system does not have, and for workloads that cannot be simulated.
    """
    if routing not in ROUTINGS:
        raise ConfigError(f"unknown routing {routing!r}; choose one of: {', '.join(ROUTINGS)}")
    if instances < 1:
        raise ConfigError(f"a colocated system needs at least one instance, not {instances}")
    return _Simulation(
        workload, system, with_options(system, options), hardware, cost, instances, seed, routing, leap, pinned_lengths
    ).run()


class _Simulation:
    def __init__(
        self,
        workload: Workload,
        system: System,
        options: dict[str, Option],
        hardware: Hardware,
        cost: StepCost,
        instances: int,
        seed: int,
        routing: str,
        leap: bool,
        pinned_lengths: bool,
    ) -> None:
        self._hardware, self._leap, self._routing = hardware, leap, routing
        self._pinned_lengths = pinned_lengths
        # With several instances, two share a machine, as a prefill and a decode instance do, and mostly both compute.
        self._cost = SlowedCost.of(
            cost, hardware.decode_slowdown if instances == 1 else hardware.decode_slowdown_beside
        )
        self._random = random.Random(seed)
        self._turn = 0
        self._system, self._options, self._seed = system, options, seed
        self._arrivals = list(workload.arrivals)
        self._ideal_tokens = ideal_hit_tokens(workload, answers=False)
        self._clients = workload.clients
        self._released = len(self._arrivals)  # the arrivals whose time is known
        if self._clients:
            self._released = min(self._clients, self._released)
            self._leap = leap and instances == 1  # an end at one instance may be an arrival within another's leap
        self._next = 0  # index of the first arrival that has not been routed
        self._results = {RequestKey(arrival.request_id): RequestResult(arrival) for arrival in workload.arrivals}
        self._unused_tokens = 0
        blocks = hardware.kv_tokens // hardware.block_size
        self._cache_tokens = blocks * hardware.block_size
        totals = [arrival.input_tokens + arrival.output_tokens for arrival in workload.arrivals]
        longest = max((total for total in totals if total <= self._cache_tokens), default=0)
        # The maximum length of all requests, as it is configured. Rounded up, since the exact value would reveal an
        # output length.
        step = max(LEAST_LENGTH_STEP, (1 << longest.bit_length()) // 16)
        self._max_total = min(self._cache_tokens, (longest // step + 1) * step)
        make = scheduler_class(system)
        self._groups = group_by_prefix(workload) if make.WHOLE_FILE else {}
        self._instances = []
        for number in range(instances):
            allocator = BlockAllocator(blocks, f"instance {number}")
            instance = _Instance(number, make(options, allocator, hardware.block_size))
            instance.stage_free_s = [0.0] * instance.scheduler.stages
            self._instances.append(instance)
        self._ends: list[tuple[float, int]] = []  # end time and number of each instance's oldest pass

    def run(self) -> RunResult:
        now_s = 0.0
        while self._ends or self._next < len(self._arrivals):
            if self._ends and self._ends[0][0] < self._next_arrival_s():
                now_s, number = heapq.heappop(self._ends)
                instance = self._instances[number]
                instance.armed = False
                self._complete(instance)
                self._go_on(instance, now_s)
            elif self._next == self._released:  # the policy plans no more passes
                break
            else:
                now_s = self._next_arrival_s()
                for instance in self._arrive(now_s):
                    if not instance.passes or len(instance.stage_free_s) > 1:  # else it plans when its pass has run
                        self._go_on(instance, now_s)
        return self._result(now_s)

    # requests

    def _next_arrival_s(self) -> float:
        return self._arrivals[self._next].arrival_s if self._next < self._released else float("inf")

    def _release(self, now_s: float) -> None:
        """A request has ended: in a closed loop, its client sends the next one."""
        if self._released < len(self._arrivals):
            arrival = replace(self._arrivals[self._released], arrival_s=now_s)
            self._arrivals[self._released] = self._results[RequestKey(arrival.request_id)].arrival = arrival
            self._released += 1

    def _arrive(self, now_s: float) -> list[_Instance]:
        """Route all requests that arrive at this moment. Returns the instances that got any, in order."""
        reached = {}
        while self._next_arrival_s() == now_s:
            arrival = self._arrivals[self._next]
            self._next += 1
            key = RequestKey(arrival.request_id)
            total = arrival.input_tokens + arrival.output_tokens
            if total > self._cache_tokens:
                self._results[key].refused = f"{total} tokens do not fit in a cache of {self._hardware.kv_tokens}"
                self._release(now_s)
                continue
            instance = self._route()
            most = total if self._pinned_lengths else self._max_total
            grouped = self._groups.get(arrival.request_id, (0, 0))
            instance.scheduler.add(MixedRequest(key, arrival.arrival_s, arrival.input_tokens, most, *grouped))
            reached[instance.number] = instance
        return [reached[number] for number in sorted(reached)]

    def _route(self) -> _Instance:
        if len(self._instances) == 1:
            return self._instances[0]
        if self._routing == "random":
            return self._random.choice(self._instances)
        if self._routing == "round-robin":
            self._turn += 1
            return self._instances[(self._turn - 1) % len(self._instances)]
        return min(self._instances, key=lambda instance: (instance.scheduler.load(), instance.number))

    # passes

    def _complete(self, instance: _Instance) -> None:
        """The oldest pass has run: its requests get their tokens."""
        done = instance.passes.popleft()
        finished = []
        for key in done.plan.sampling():
            result = self._results[key]
            left = result.arrival.output_tokens - len(result.token_s)
            if not left:  # planned ahead, before its end was known
                self._unused_tokens += 1
                continue
            result.token_s.append(done.end_s)
            if left == 1:
                finished.append(key)
                self._release(done.end_s)
        instance.scheduler.done(done.plan, finished)
        self._record(instance, done)

    def _go_on(self, instance: _Instance, now_s: float) -> None:
        """Plan as far ahead as the scheduler allows, and leap over passes without decisions."""
        scheduler = instance.scheduler
        while len(instance.passes) < scheduler.depth:
            plan = scheduler.plan(now_s)
            for key in plan.preempted:
                self._results[key].preemptions += 1
            if plan:
                self._start(instance, plan, now_s, *self._price(plan))
            elif not plan.preempted:
                break
        if self._leap and len(instance.passes) == scheduler.depth and len(instance.stage_free_s) == 1:
            self._leap_ahead(instance)
        if instance.passes and not instance.armed:
            instance.armed = True
            heapq.heappush(self._ends, (instance.passes[0].end_s, instance.number))

    def _price(self, plan: MixedPlan) -> tuple[float, float]:
        """Seconds of the pass, and of a pass over the same bytes at equal lengths."""
        chunks = [ChunkShape(chunk.tokens, chunk.cached_tokens) for chunk in plan.chunks]
        lengths = [decode.kv_tokens for decode in plan.decodes]
        return self._cost.step_s(chunks, lengths), self._cost.balanced_step_s(chunks, lengths)

    def _start(self, instance: _Instance, plan: MixedPlan, now_s: float, seconds: float, balanced_s: float) -> None:
        """Start a pass after the previous one: on each stage of the pipeline as soon as that is free."""
        free_s = instance.stage_free_s
        gap_s = self._hardware.host_overhead_s
        start_s = max(now_s, free_s[0]) + gap_s
        end_s = start_s
        for stage in range(len(free_s)):
            end_s = free_s[stage] = max(end_s, free_s[stage]) + seconds / len(free_s)
        instance.passes.append(_Pass(plan, start_s, seconds, balanced_s, end_s, gap_s))
        for chunk in plan.chunks:
            stages = self._results[chunk.key].stages_s
            if "queue_s" not in stages:
                stages["queue_s"] = start_s - self._results[chunk.key].arrival.arrival_s

    def _leap_ahead(self, instance: _Instance) -> None:
        """Run passes of the same decodes until a request may end, arrive, or need room.

        The last one becomes the oldest. `ahead` passes complete here. `repeat` does what single steps would have
        planned at the end of each.
        """
        passes, scheduler = instance.passes, instance.scheduler
        last = passes[-1].plan
        keys = [decode.key for decode in last.decodes]
        if any(one.plan.chunks or [decode.key for decode in one.plan.decodes] != keys for one in passes):
            return
        quiet = min(scheduler.quiet_passes(last), MOST_LEAP)
        results = [self._results[key] for key in keys]
        quiet = min(quiet, min(result.arrival.output_tokens - len(result.token_s) for result in results) - 1)
        until_arrival = (self._next_arrival_s() - passes[0].end_s) / max(passes[-1].seconds, SHORTEST_S)
        quiet = int(min(quiet, until_arrival + 2.0))
        if quiet < 1:
            return
        lengths = [decode.kv_tokens for decode in last.decodes]
        ends_s, seconds, gap_s = [one.end_s for one in passes], [one.seconds for one in passes], passes[-1].gap_s
        for more in self._cost.run_s([length + 1 for length in lengths], quiet):
            seconds.append(more)
            ends_s.append(ends_s[-1] + gap_s + more)
        ahead = min(quiet, bisect_left(ends_s, self._next_arrival_s()))
        if ahead < 1:
            return
        scheduler.repeat(last, ahead)
        for result in results:
            result.token_s.extend(ends_s[:ahead])
        self._replace(instance, ahead, seconds, ends_s)

    def _replace(self, instance: _Instance, ahead: int, seconds: list[float], ends_s: list[float]) -> None:
        """The first `ahead` passes of a leap have run; plan as many passes as were planned before."""
        passes, oldest = instance.passes, instance.passes[0]
        depth, gap_s = len(passes), oldest.gap_s
        lengths = [decode.kv_tokens + depth for decode in oldest.plan.decodes]
        balanced_s = self._cost.balanced_run_s(lengths, ahead)
        for _ in range(min(ahead, depth)):
            self._record(instance, passes.popleft())
        if ahead > depth:
            starts_s = [end_s + gap_s for end_s in ends_s[depth - 1 : ahead - 1]]
            run_s = seconds[depth:ahead], balanced_s[: ahead - depth]
            instance.steps.add_decodes(starts_s, *run_s, _extent(lengths), switching=False)
        for number in range(max(ahead, depth), ahead + depth):
            times = ends_s[number - 1] + gap_s, seconds[number], balanced_s[number - depth], ends_s[number], gap_s
            passes.append(_Pass(_later(oldest.plan, number), *times))
        instance.stage_free_s[0] = passes[-1].end_s

    def _record(self, instance: _Instance, one: _Pass) -> None:
        prefill_tokens = sum(chunk.tokens for chunk in one.plan.chunks)
        extent = _extent([decode.kv_tokens for decode in one.plan.decodes])
        instance.steps.add_mixed(one.start_s, one.seconds, one.balanced_s, prefill_tokens, extent)

    # results

    def _result(self, end_s: float) -> RunResult:
        for instance in self._instances:
            instance.scheduler.check_integrity()
        for key, one in self._results.items():
            if not one.refused and len(one.token_s) < one.arrival.output_tokens:
                raise AccountingError(f"policy {self._system.name!r} plans no more passes, but {key} has not ended")
        recorders = [instance.steps for instance in self._instances]
        steps = merge(recorders, [self._hardware.host_overhead_s] * len(recorders))
        results = list(self._results.values())
        counters: dict[str, float] = {
            "preemptions": sum(result.preemptions for result in results),
            "refused": sum(bool(result.refused) for result in results),
            "unused_tokens": self._unused_tokens,
        }
        if self._groups:
            counters["prefix_queried_tokens"] = sum(arrival.input_tokens for arrival in self._arrivals)
            counters["prefix_hit_tokens"] = sum(instance.scheduler.hit_tokens for instance in self._instances)
            counters["prefix_ideal_tokens"] = self._ideal_tokens
        names = tuple(f"colocated-{instance.number}" for instance in self._instances)
        configuration = {
            "policy": self._system.name,
            "options": self._options,
            "instances": len(names),
            "routing": self._routing,
            "seed": self._seed,
            "hardware": asdict(self._hardware),
            "cost_model": self._cost.describe(),
        }
        last_s = max((result.token_s[-1] for result in results if result.token_s), default=end_s)
        return RunResult(self._system.name, results, steps, names, last_s, [], counters, configuration)


def _later(plan: MixedPlan, passes: int) -> MixedPlan:
    """The same decodes, `passes` passes later."""
    return MixedPlan((), tuple(PlannedDecode(decode.key, decode.kv_tokens + passes) for decode in plan.decodes))


def _extent(lengths: list[int]) -> tuple[int, int, int, int]:
    """(number, shortest, longest, sum) of the lengths."""
    return (len(lengths), min(lengths), max(lengths), sum(lengths)) if lengths else (0, 0, 0, 0)
