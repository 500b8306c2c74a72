"""The scheduler at scale: a million waiting requests in the quad-tree, a full running batch, and the core.

Every figure is printed with its bound from issue 5, batches also against ten thousand waiting requests. Times are CPU
times of the thread, because the machine may be shared; `--wall` measures the wall clock instead. All random values
depend on `--seed`.

    python benchmarks/scheduler_scale.py --requests 1000000 --json scheduler_scale.json
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path

from alignedserve.config import Config, DecodeConfig, KvPoolConfig, PrefillConfig, SchedulerConfig
from alignedserve.prefix_marks import LEAST_TOKENS, MARK_BYTES, MARK_LENGTHS
from alignedserve.request import RequestKey
from alignedserve.scheduler.batch_generator import BatchGenerator, BatchLimits
from alignedserve.scheduler.core import actions, events
from alignedserve.scheduler.core.scheduler_core import SchedulerCore
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.iteration import IterationScheduler
from alignedserve.scheduler.instance.plan import BufferKind, Candidate
from alignedserve.scheduler.quad_tree import Entry, QuadTree
from alignedserve.scheduler.systems import WAITING_RULES, make_policy

BLOCK = 16
BATCH = 256
FEW = 10_000
HINT_ROUNDS = 4
SESSIONS = 997  # that half of the prompts with hints belong to
LIMITS = {"short": BatchLimits(60_000, BATCH, BATCH), "no range is enough": BatchLimits(1650, BATCH, BATCH)}


@dataclass(frozen=True, slots=True)
class Figure:
    """`bound`: the largest allowed value (with `least`: the smallest); None: the value is only reported."""

    name: str
    value: float
    unit: str
    bound: float | None = None
    least: bool = False

    def __str__(self) -> str:
        text = f"{self.name:<62} {self.value:>12.4g} {self.unit:<10}"
        if self.bound is None:
            return text
        kept = self.value >= self.bound if self.least else self.value <= self.bound
        return f"{text} {'>=' if self.least else '<='} {self.bound:g} {'ok' if kept else 'MISSED'}"


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def draw_length(rng: random.Random) -> int:
    """Mostly short prefix lengths with a long tail: a million requests use every leaf."""
    return min(65536, int(rng.lognormvariate(6.5, 1.4)) + 1) if rng.random() < 0.7 else rng.randint(1, 65536)


def draw_entry(number: int, rng: random.Random) -> Entry:
    tokens = draw_length(rng)
    return Entry(RequestKey(f"request-{number}"), tokens, -(-tokens // BLOCK), number * 1e-4)


def fill(tree: QuadTree, requests: int, rng: random.Random) -> list[Entry]:
    entries = []
    for number in range(requests):
        entry = draw_entry(number, rng)
        tree.insert(entry)
        entries.append(entry)
    return entries


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def measure_tree(requests: int, seed: int, clock: Callable[[], int]) -> list[Figure]:
    rng = random.Random(seed)
    gc.collect()
    before = resident_bytes()
    tree = QuadTree(65536, 16)
    entries = fill(tree, requests, rng)
    held = (resident_bytes() - before) / requests
    moves = [entries[rng.randrange(requests)] for _ in range(20_000)]
    begun = clock()
    for entry in moves:
        tree.remove(entry.key)
        tree.insert(entry)
    mean_us = (clock() - begun) / len(moves) / 1e3
    figures = [
        Figure(f"remove and insert, {requests} in the tree, mean", mean_us, "us", 20.0),
        Figure(f"memory of a waiting request in the tree ({requests})", held, "bytes"),
    ]
    begun = clock()
    gc.collect()
    figures.append(Figure(f"full garbage collection, {requests} in the tree", (clock() - begun) / 1e6, "ms"))
    small = QuadTree(65536, 16)
    fill(small, FEW, rng)
    for name, limits in LIMITS.items():
        many, batch = time_batches(tree, limits, clock)
        few, _ = time_batches(small, limits, clock)
        figures += [
            Figure(f"batch of {batch} of {requests}, P99 ({name})", percentile(many, 0.99) / 1e6, "ms", 1.0),
            Figure(f"  against {FEW} in the tree ({name})", percentile(many, 0.99) / percentile(few, 0.99), "x", 2.0),
        ]
        scan = time_scan(list(entries), limits, clock)
        figures.append(Figure(f"  faster than sort and scan ({name})", scan / percentile(many, 0.5), "x", 100.0, True))
    return figures


def time_batches(
    tree: QuadTree, limits: BatchLimits, clock: Callable[[], int], rounds: int = 400
) -> tuple[list[float], int]:
    """Nanoseconds to form each of `rounds` batches. Each batch is put back as if it had just arrived."""
    generator = BatchGenerator(tree, cut_sibling=True)
    seconds = []
    batch: list[Entry] = []
    for number in range(rounds):
        batch = []  # free the last batch's replaced entries here, not while the next is formed
        begun = clock()
        selection = generator.select(limits)
        tree.stamp(chain(selection.leaves, selection.cut), float(number))
        batch = generator.entries(selection)
        seconds.append(float(clock() - begun))
        for entry in batch:
            tree.remove(entry.key)
        for entry in batch:
            tree.insert(Entry(entry.key, entry.tokens, entry.blocks, 1000.0 + number))
    return seconds, len(batch)


def measure_rules(requests: int, seed: int, clock: Callable[[], int]) -> list[Figure]:
    """Batches and late matches of each waiting rule. Only the number of requests limits them: all have the same."""
    rng = random.Random(seed)
    many, few = ([draw_entry(number, rng) for number in range(count)] for count in (requests, FEW))
    figures = []
    for rule in WAITING_RULES:
        times = time_rule(rule, many, clock), time_rule(rule, few, clock)
        for what, of_many, of_few in zip(("batch", "late matches"), *times, strict=True):
            p99_ms = percentile(of_many, 0.99) / 1e6
            figures.append(Figure(f"{what}, {BATCH} of {requests}, P99 ({rule})", p99_ms, "ms", 1.0))
            for name, share in ("P50", 0.5), ("P99", 0.99):
                ratio = percentile(of_many, share) / percentile(of_few, share)
                figures.append(Figure(f"  {what} against {FEW} waiting, {name} ({rule})", ratio, "x", 2.0))
    return figures


def time_rule(
    rule: str, entries: Sequence[Entry], clock: Callable[[], int], rounds: int = 400
) -> tuple[list[float], list[float]]:
    """Nanoseconds of each batch, and of late matches to a running batch of some length.

    All return at once. Under `overdue` every second batch is formed around an overdue request; under `paper` no subtree
    is overdue.
    """
    policy = make_policy(SchedulerConfig(waiting_rule=rule, starvation_after_s=1e6))
    for entry in entries:
        policy.insert(entry)
    rng = random.Random(len(entries))
    limits = BatchLimits(1 << 22, BATCH, BATCH)
    times: tuple[list[float], list[float]] = ([], [])
    taken: list[Entry] = []
    for number in range(2 * rounds):
        tokens, now_s = draw_length(rng), 1000.0 + number
        seed = rng.choice(entries).key if policy.OVERDUE and number % 4 else None
        taken = []  # free the last ones' replaced entries here, not while the next are chosen
        begun = clock()
        if number % 2:
            taken = policy.matching(tokens * 3 // 4, tokens * 5 // 4, limits)
        else:
            taken = policy.form(limits, seed, now_s)
        times[number % 2].append(float(clock() - begun))
        for entry in taken:
            policy.remove(entry.key)
        for entry in taken:
            policy.insert(Entry(entry.key, entry.tokens, entry.blocks, now_s))
    policy.check_integrity()
    return times


def time_scan(entries: list[Entry], limits: BatchLimits, clock: Callable[[], int]) -> float:
    """Nanoseconds to sort the requests by prefix length and find the densest window that fits."""
    begun = clock()
    entries.sort(key=lambda entry: entry.tokens)
    first = total = 0
    best = (0, 0, 0)
    for last, entry in enumerate(entries):
        total += entry.blocks
        while first <= last and (total > limits.max_blocks or last - first >= limits.max_requests):
            total -= entries[first].blocks
            first += 1
        if first <= last:
            best = max(best, (last - first + 1, entries[first].tokens - entry.tokens, first))
    return float(clock() - begun)


def candidate(number: int, tokens: int, batch_id: int, kind: BufferKind = BufferKind.BATCH) -> Candidate:
    return Candidate(RequestKey(f"request-{number}"), tokens, tokens + 512, None, kind, batch_id)


def measure_plan(cache_blocks: int, name: str, seed: int, clock: Callable[[], int], rounds: int = 3000) -> list[Figure]:
    """A running batch of 256 requests that end after 64 to 512 tokens, and always 512 candidates."""
    rng = random.Random(seed)
    scheduler = IterationScheduler(DecodeConfig(), BlockAllocator(cache_blocks, "cache"), BLOCK, join_window=0.25)
    left: dict[RequestKey, int] = {}
    number = 0
    nanoseconds: list[float] = []
    running = []
    for step in range(rounds):
        status = scheduler.status()
        for _ in range(2 * BATCH - status.batch_buffer_requests - status.requests_buffer_requests):
            number += 1
            kind = BufferKind.REQUESTS if number % 2 else BufferKind.BATCH
            one = candidate(number, rng.randint(900, 1100), number // 512, kind)
            left[one.key] = rng.randint(64, 512)
            scheduler.offer(one, float(step))
        begun = clock()
        plan = scheduler.plan(step * 0.02)
        nanoseconds.append(float(clock() - begun))
        running.append(len(plan.run))
        for join in plan.joins:
            scheduler.copied_in(join.key)
        for evict in plan.evictions:
            scheduler.copied_out(evict.key)
        tokens = []
        for item in plan.run:
            left[item.key] -= 1
            tokens.append((item.key, left[item.key] <= 0))
        scheduler.advance(tokens)
    steady = nanoseconds[rounds // 5 :]
    mean = sum(running[rounds // 5 :]) / len(steady)
    return [
        Figure(f"plan, {mean:.0f} running, 512 candidates, P95 ({name})", percentile(steady, 0.95) / 1e6, "ms", 0.2),
        Figure(f"plan, {mean:.0f} running, 512 candidates, P50 ({name})", percentile(steady, 0.5) / 1e6, "ms"),
    ]


class CoreLoad:
    """Plays all workers without delay: prefills, joins and finishes the core's requests, with `waiting` others.

    Only the time in the core is counted. With `hints` half of the prompts begin like others of the pool's cache.
    """

    def __init__(
        self,
        requests: int,
        waiting: int,
        seed: int,
        clock: Callable[[], int],
        prefills: int = 4,
        decodes: int = 4,
        *,
        hints: bool = False,
    ) -> None:
        config = Config(
            kv_pool=KvPoolConfig(block_size=BLOCK),
            prefill=PrefillConfig(queue_tokens=1 << 20),
            scheduler=SchedulerConfig(max_queue=1 << 20, starvation_after_s=1e6, max_wait_s=1e9),
        )
        self.core = SchedulerCore(config, BLOCK)
        self.rng = random.Random(seed)
        self.requests, self.waiting, self.hints = requests, waiting, hints
        self.now_s = 0.0
        self.finished = self.nanoseconds = 0
        self.clock = clock
        self.outbox: list[events.Event] = []
        self.running: dict[str, list[RequestKey]] = {f"d{i}": [] for i in range(decodes)}
        self.candidates: dict[str, list[RequestKey]] = {name: [] for name in self.running}
        prefill_ids = tuple(f"p{i}" for i in range(prefills))
        for role, names in (("prefill", prefill_ids), ("decode", tuple(self.running)), ("kv_pool", ("pool",))):
            for name in names:
                self.core.handle(events.InstanceJoined(role, name), 0.0)
        for name in prefill_ids:
            self.core.handle(events.PrefillReported(name, 0, 1 << 20, 8000, 8000, 4000, 4000), 0.0)
        self.core.handle(events.PairsChanged(tuple((name, prefill_ids) for name in self.running)), 0.0)
        self.core.handle(events.PoolReported("pool", 1 << 30, 1 << 30), 0.0)
        self.lengths: dict[RequestKey, int] = {}
        for name in self.running:
            self.report(name)

    def submit(self, number: int) -> None:
        tokens = min(4096, draw_length(self.rng))
        key = RequestKey(f"request-{number}")
        self.lengths[key] = tokens
        meta = events.RequestMeta(key, tokens, tokens + 512, f"group-{number}", "gateway")
        if self.hints:
            known = number % 2 and tokens > LEAST_TOKENS
            first = number % SESSIONS if known else number
            marks = first.to_bytes(MARK_BYTES, "little") * sum(length < tokens for length in MARK_LENGTHS)
            meta = replace(meta, cached=(("pool", tokens * 3 // 4),) if known else (), marks=marks)
        self.handle(events.Submitted((meta,)))

    def handle(self, event: events.Event) -> None:
        self.now_s += 1e-5
        begun = self.clock()
        following = self.core.handle(event, self.now_s)
        self.nanoseconds += self.clock() - begun
        for action in following:
            match action:
                case actions.StartPrefill():
                    for key in action.keys:
                        blocks = -(-self.lengths[key] // BLOCK)
                        self.outbox.append(events.Prefilled(key, self.lengths[key], blocks, blocks))
                case actions.Prefetch():
                    self.candidates[action.decode_id] += action.keys
                case actions.Recall():
                    raise RuntimeError(f"no request waits for room elsewhere, but got: {action}")

    def settle(self) -> None:
        while self.outbox:
            self.handle(self.outbox.pop())

    def iterate(self, decode_id: str) -> None:
        """Some requests finish, candidates join instead, and the instance reports."""
        running, candidates = self.running[decode_id], self.candidates[decode_id]
        done = tuple(running[:4]) if len(running) == BATCH else ()
        joining = tuple(candidates[: BATCH - len(running) + len(done)])
        self.running[decode_id] = running[len(done) :] + list(joining)
        del candidates[: len(joining)]
        if done:
            self.finished += len(done)
            self.handle(events.Finished(done))
        for key in done:
            del self.lengths[key]
        if joining:
            self.handle(events.Joined(decode_id, joining))
        self.report(decode_id)

    def report(self, decode_id: str) -> None:
        held = self.running[decode_id]
        lengths = [self.lengths[key] for key in held]
        blocks = sum(-(-tokens // BLOCK) + 4 for tokens in lengths)
        shortest, longest = min(lengths, default=0), max(lengths, default=0)
        of_all = decode_id, 1 << 16, (1 << 16) - blocks, len(held), shortest, longest, 1, 0, 0, 0
        report = events.DecodeReported(*of_all, batch_shortest_tokens=shortest, batch_longest_tokens=longest)
        self.handle(report)

    def run(self) -> float:
        """Requests per second from submission to retirement, with about `waiting` others in the pool all the time."""
        for number in range(self.waiting):
            self.submit(number)
            self.settle()
        for number in range(4 * BATCH):
            self.iterate(f"d{number % len(self.running)}")
            self.settle()
        self.finished = self.nanoseconds = 0
        for number in range(self.waiting, self.waiting + self.requests):
            self.submit(number)
            self.settle()
            if number % 4 == 0:  # an iteration's end: some requests have finished
                self.iterate(f"d{number // 4 % len(self.running)}")
                self.settle()
        return self.finished / (self.nanoseconds / 1e9)


def measure_hints(requests: int, waiting: int, seed: int, clock: Callable[[], int]) -> list[Figure]:
    """By turns, since a machine's speed drifts."""
    ratios = []
    for number in range(HINT_ROUNDS):
        rates = {}
        for hints in (False, True) if number % 2 else (True, False):
            rates[hints] = CoreLoad(requests, waiting, seed + number, clock, hints=hints).run()
        ratios.append(rates[True] / rates[False])
    return [Figure("core: requests a second, with prefix hints over without", statistics.median(ratios), "")]


def measure_core(requests: int, waiting: int, seed: int, clock: Callable[[], int]) -> list[Figure]:
    load = CoreLoad(requests, waiting, seed, clock)
    gc.collect()
    before = resident_bytes()
    rate = load.run()
    held = (resident_bytes() - before) / max(1, len(load.lengths))
    load.core.check_integrity()
    return [
        Figure(f"core: requests retired a second, {waiting} waiting", rate, "/s", 5000.0, True),
        Figure("  of those that were submitted meanwhile, retired", load.finished / requests, "share"),
        Figure("  memory of an open request in the core", held, "bytes"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000, help="in the tree")
    parser.add_argument("--core-requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--wall", action="store_true", help="wall clock, not the thread's processor time")
    parser.add_argument("--only", choices=("tree", "plan", "core", "hints", "rules"))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    clock = time.perf_counter_ns if given.wall else time.thread_time_ns
    parts: dict[str, Callable[[], list[Figure]]] = {
        "core": lambda: measure_core(given.core_requests, 10_000, given.seed, clock),
        "hints": lambda: measure_hints(given.core_requests, 10_000, given.seed, clock),
        "plan": lambda: [
            *measure_plan(40_000, "room", given.seed, clock),
            *measure_plan(19_500, "cache full", given.seed, clock),
        ],
        "tree": lambda: measure_tree(given.requests, given.seed, clock),
        "rules": lambda: measure_rules(given.requests, given.seed, clock),
    }
    figures: list[Figure] = []
    for name, part in parts.items():
        if given.only in (None, name):
            for figure in part():
                print(figure, flush=True)
                figures.append(figure)
    if given.json:
        given.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
