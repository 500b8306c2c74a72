"""Decode over two ranks that share a mixture's experts (CPU, Gloo): what each placement leaves idle at the barriers.

`--rows` requests of mixed prefix lengths (a share of `--short` has 64 tokens, the others up to `--context`) come and
go: after each iteration a request ends with probability `--ends`, and another one takes its place. Tokens are drawn, so
that the experts have like numbers of rows. All placements see the same requests, by turns. `idle`: the share of the
ranks' time in which they wait for the last one's attention in each layer, which placements even out. `experts`: the
share in which they wait for results of each other's experts, which the router decides. `spread`: by how much the
greatest load in tokens of KV exceeds the mean, as a share of it. `same`: each rank has the same requests, for what the
machine itself leaves idle.

The ranks share one store, or, with `--own`, have a cache each, as on GPUs: then the cluster's scheduler fills them from
one buffer and moves requests. No KV is copied, since its content does not matter here.

    python benchmarks/experts.py --rounds 6 --json experts.json
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from alignedserve.config_sources import from_tree
from alignedserve.decode_worker.rank_placer import RankPlacer
from alignedserve.engine.batch import ForwardItem
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.parallel.processes import RankProcesses
from alignedserve.engine.runner import ModelRunner
from alignedserve.ranks.degrees import PLACEMENTS, Degrees
from alignedserve.ranks.now import BARRIERS
from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.plan import BufferKind, Candidate, RunItem
from alignedserve.scheduler.instance.ranged_allocator import RangedAllocator
from alignedserve.scheduler.ranks.group_scheduler import GroupScheduler
from alignedserve.scheduler.ranks.names import placement_class
from alignedserve.testing.models import make_model
from alignedserve.transfer.ranged import RangedStore

BLOCK = 16
RANKS = 2
SAME = "same"
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
         "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 4000, "num_local_experts": 4,
         "max_position_embeddings": 8192}  # fmt: skip


def length_of(draw: random.Random, options: argparse.Namespace) -> int:
    return 64 if draw.random() < options.short else draw.randrange(64, options.context)


def run(runner: ModelRunner, name: str, options: argparse.Namespace, seed: int) -> dict[str, float]:
    """One placement's iterations over the same requests, whatever it does with them."""
    draw, placer = random.Random(seed), RankPlacer(placement_class(name)(RANKS))
    per_row = -(-(options.context + options.iterations + 1) // BLOCK)
    rows = [list(range(row * per_row, (row + 1) * per_row)) for row in range(options.rows)]
    running = [RunItem(RequestKey(str(row)), length_of(draw, options), rows[row]) for row in range(options.rows)]
    before_s, spreads, begun_s = _idle_s(runner), [], time.perf_counter()
    for turn in range(options.iterations):
        ranks = placer.place(running)
        loads = [
            sum(one.kv_tokens for one, rank in zip(running, ranks, strict=True) if rank == each)
            for each in range(RANKS)
        ]
        spreads.append(max(loads) * RANKS / max(1, sum(loads)) - 1)
        runner.forward(
            [
                ForwardItem([draw.randrange(SHAPE["vocab_size"])], one.kv_tokens, one.block_ids, "last", rank)
                for one, rank in zip(running, ranks, strict=True)
            ]
        )
        for row, one in enumerate(running):
            one.kv_tokens += 1
            if draw.random() < options.ends:
                running[row] = RunItem(RequestKey(f"{row}/{turn}"), length_of(draw, options), rows[row])
    took_s = time.perf_counter() - begun_s
    return {
        "iteration_ms": 1e3 * took_s / options.iterations,
        **_shares(runner, before_s, took_s),
        "spread": statistics.mean(spreads),
    }


def run_own(runner: ModelRunner, name: str, options: argparse.Namespace, seed: int) -> dict[str, float]:
    """As `run`, where each rank has a cache: a candidate that any rank may take replaces a request that ends.

    It runs after an iteration, in which it is copied, and so does a request that moves.
    """
    draw = random.Random(seed)
    books = RangedAllocator(RANKS, runner.cache.shape[0], "experts")
    config = from_tree({"decode": {"max_running": options.rows, "join_iterations": 1}}).decode
    scheduler = GroupScheduler(config, books, BLOCK, placement_class(name)(RANKS))
    most, offered = options.context + options.iterations + 1, 0
    left: dict[RequestKey, float] = {}  # tokens of each answer
    before_s, spreads, begun_s = _idle_s(runner), [], time.perf_counter()
    for turn in range(options.iterations):
        while len(left) < options.rows:
            key, own = RequestKey(str(offered)), random.Random(seed * 1_000_003 + offered)
            scheduler.offer(Candidate(key, length_of(own, options), most, None, BufferKind.BATCH, 1), float(turn))
            left[key] = _answer_tokens(own, options.ends)
            offered += 1
        plan = scheduler.plan(float(turn))
        if plan.joins and not plan.run:  # the first ones
            for join in plan.joins:
                scheduler.copied_in(join.key)
            plan = scheduler.plan(float(turn))
        ranks = [books.range_of(one.block_ids[0]) for one in plan.run]
        loads = [
            sum(one.kv_tokens for one, rank in zip(plan.run, ranks, strict=True) if rank == each)
            for each in range(RANKS)
        ]
        spreads.append(max(loads) * RANKS / max(1, sum(loads)) - 1)
        runner.forward(
            [
                ForwardItem([draw.randrange(SHAPE["vocab_size"])], one.kv_tokens, one.block_ids, "last", rank)
                for one, rank in zip(plan.run, ranks, strict=True)
            ]
        )
        for copied in (*plan.joins, *plan.moves):  # their copies took as long as the iteration
            scheduler.copied_in(copied.key)
        for one in plan.run:
            left[one.key] -= 1
        scheduler.advance([(one.key, not left[one.key]) for one in plan.run])
        left = {key: count for key, count in left.items() if count}
    took_s = time.perf_counter() - begun_s
    return {
        "iteration_ms": 1e3 * took_s / options.iterations,
        **_shares(runner, before_s, took_s),
        "spread": statistics.mean(spreads),
        "moves": scheduler.status().moves / options.iterations,
    }


def _answer_tokens(draw: random.Random, ends: float) -> float:
    """Until an answer ends, which it does after each token with probability `ends`."""
    return 1 + int(math.log(1.0 - draw.random()) / math.log(1.0 - ends)) if ends else math.inf


def run_same(runner: ModelRunner, options: argparse.Namespace, seed: int) -> dict[str, float]:
    """Each rank has half of the requests, of the same lengths."""
    draw = random.Random(seed)
    per_row = -(-(options.context + options.iterations + 1) // BLOCK)
    lengths = [length_of(draw, options) for _ in range(options.rows // RANKS)]
    first = [row % RANKS * runner.cache.shape[0] if options.own else 0 for row in range(options.rows)]
    before_s, begun_s = _idle_s(runner), time.perf_counter()
    for turn in range(options.iterations):
        runner.forward(
            [
                ForwardItem(
                    [draw.randrange(SHAPE["vocab_size"])],
                    lengths[row // RANKS] + turn,
                    list(range(first[row] + row * per_row, first[row] + (row + 1) * per_row)),
                    "last",
                    row % RANKS,
                )
                for row in range(len(lengths) * RANKS)
            ]
        )
    took_s = time.perf_counter() - begun_s
    return {
        "iteration_ms": 1e3 * took_s / options.iterations,
        **_shares(runner, before_s, took_s),
        "spread": 0.0,
    }


def _idle_s(runner: ModelRunner) -> dict[str, float]:
    runner.forward([ForwardItem([7], 0, [0])])  # ranks tell each other in the layers of a pass
    return dict(runner.barrier_idle_s)


def _shares(runner: ModelRunner, before_s: dict[str, float], took_s: float) -> dict[str, float]:
    now_s = _idle_s(runner)
    attention, experts = ((now_s[barrier] - before_s[barrier]) / (RANKS * took_s) for barrier in BARRIERS)
    return {"idle": attention, "experts": experts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--short", type=float, default=0.8, help="share of requests with 64 tokens")
    parser.add_argument("--ends", type=float, default=0.02)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--own", action="store_true", help="each rank has a cache of its own")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    blocks = options.rows * -(-(options.context + options.iterations + 1) // BLOCK)
    with tempfile.TemporaryDirectory() as folder:
        path = make_model("mixtral", Path(folder) / "model", seed=1, **SHAPE)
        info = inspect_model("experts", path, "float32", "cpu")
        ranks = RankProcesses(
            info,
            Degrees(experts=RANKS),
            trust_remote_code=False,
            threads=1,
            backend="torch",
            own_stores=options.own,
        )
        try:
            loaded = ranks.load()
            store, cache = ranks.store("experts", info.geometry(BLOCK), blocks * ranks.ranges)
            for part in store.ranges if isinstance(store, RangedStore) else [store]:
                part.blocks[:] = 0  # type: ignore[attr-defined]  # so that no placement is the first to touch a page
            runner = ranks.runner(loaded, cache)
            names = (*PLACEMENTS, SAME)
            found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
            for seed in range(options.rounds + 1):
                turn = seed % len(names)
                for name in (*names[turn:], *names[:turn]):
                    same = name == SAME
                    placed = run_own if options.own else run
                    measured = run_same(runner, options, seed) if same else placed(runner, name, options, seed)
                    if seed:  # the first round is slower
                        found[name].append(measured)
        finally:
            ranks.close()
    told: dict[str, Any] = {}
    for name, rounds in found.items():
        told[name] = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        told[name]["idle_of_round_robin"] = statistics.median(
            one["idle"] / other["idle"] for one, other in zip(rounds, found["round-robin"], strict=True)
        )
        print(f"{name}: " + ", ".join(f"{key} {value:.3g}" for key, value in told[name].items()))
    if options.json is not None:
        options.json.write_text(json.dumps({**vars(options), "json": None, **told}, indent=1))


if __name__ == "__main__":
    main()
