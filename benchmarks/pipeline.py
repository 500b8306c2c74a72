"""Decode over two stages of a pipeline (CPU, Gloo): lanes of equal cost against unequal ones, and one process.

`--rows` requests whose prefix lengths are spread evenly up to `--context` tokens run in two lanes. `balanced`: those
that a decode instance forms. `unbalanced`: a share of `--unequal` of the requests in one lane. `one`: all of them in a
process with one thread, like each stage. By turns; medians of a round, in which each request gets a token. `idle`: the
share of a round in which the first stage waits for the second. `predicted`: from the lanes' measured times alone.

    python benchmarks/pipeline.py --rounds 12 --json pipeline.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from alignedserve.engine.batch import ForwardItem
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.model.loader import load_model
from alignedserve.engine.parallel.processes import RankProcesses
from alignedserve.engine.runner import ModelRunner, allocate_cache
from alignedserve.ranks.degrees import Degrees
from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.lanes import share_of
from alignedserve.scheduler.instance.plan import RunItem
from alignedserve.testing.models import make_model

BLOCK = 16
ROUNDS_AT_ONCE = 6  # a pipeline is full from the second on
SHAPE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
         "num_key_value_heads": 12, "head_dim": 64, "vocab_size": 8000, "max_position_embeddings": 8192}  # fmt: skip

Lanes = Sequence[Sequence[RunItem]]


def lanes_of(items: list[RunItem], depth: int) -> list[list[RunItem]]:
    lanes: list[list[RunItem]] = []
    free = items
    while free:
        lanes.append(share_of(free, [[item.kv_tokens for item in lane] for lane in lanes], depth))
        free = [item for item in free if item not in lanes[-1]]
    return lanes


def forward_items(lane: Sequence[RunItem]) -> list[ForwardItem]:
    return [ForwardItem([7], item.kv_tokens, item.block_ids) for item in lane]


def timed(runner: ModelRunner, lanes: Lanes) -> tuple[float, float]:
    """Seconds of a round, and the share of it that the first stage waits."""
    before_s, begun_s = runner.waited_s, time.perf_counter()
    flying = []
    for _ in range(ROUNDS_AT_ONCE):
        for lane in lanes:
            flying.append(runner.begin(forward_items(lane)))
            if len(flying) == max(2, runner.depth):
                flying.pop(0)()
    for logits in flying:
        logits()
    took_s = time.perf_counter() - begun_s
    return took_s / ROUNDS_AT_ONCE, (runner.waited_s - before_s) / took_s


def predicted_idle(runner: ModelRunner, lanes: Lanes, rounds: int) -> float:
    """Of a stage, if each lane took as long in it as it takes alone in one process."""
    costs = []
    for lane in lanes:
        seconds = []
        for _ in range(rounds):
            begun_s = time.perf_counter()
            runner.forward(forward_items(lane))
            seconds.append(time.perf_counter() - begun_s)
        costs.append(statistics.median(seconds))
    return 1 - sum(costs) / (len(costs) * max(costs))


def measure(
    one: ModelRunner, stages: ModelRunner, layouts: dict[str, Lanes], rounds: int
) -> dict[str, dict[str, float]]:
    whole = [[item for lane in layouts["balanced"] for item in lane]]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ("one", *layouts)}
    for turn in range(rounds + 1):
        for name, lanes in (("one", whole), *layouts.items()):
            took = timed(one if name == "one" else stages, lanes)
            if turn:  # the first turn is slower
                times[name].append(took)
    found = {}
    for name, lanes in layouts.items():
        ratio = statistics.median(alone[0] / own[0] for alone, own in zip(times["one"], times[name], strict=True))
        found[name] = {
            "round_ms": 1e3 * statistics.median(own[0] for own in times[name]),
            "speedup": ratio,
            "idle": statistics.median(own[1] for own in times[name]),
            "predicted": predicted_idle(one, lanes, rounds),
        }
    found["one"] = {"round_ms": 1e3 * statistics.median(own[0] for own in times["one"])}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--unequal", type=float, default=0.75, help="share of the requests in one of the unequal lanes")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lengths = [options.context * (number + 1) // options.rows for number in range(options.rows)]
    items, blocks = [], 0
    for number, length in enumerate(lengths):
        own = -(-(length + 1) // BLOCK)
        items.append(RunItem(RequestKey(str(number)), length, list(range(blocks, blocks + own))))
        blocks += own
    cut = round(options.rows * options.unequal)
    layouts: dict[str, Lanes] = {"balanced": lanes_of(items, 2), "unbalanced": [items[-cut:], items[:-cut]]}
    with tempfile.TemporaryDirectory() as folder:
        path = make_model("llama", Path(folder) / "model", seed=1, **SHAPE)
        info = inspect_model("stages", path, "float32", "cpu")
        geometry = info.geometry(BLOCK)
        one = ModelRunner(load_model(info, "cpu"), allocate_cache(geometry, blocks, "cpu"), "torch")
        ranks = RankProcesses(info, Degrees(1, 2), trust_remote_code=False, threads=1, backend="torch")
        try:
            loaded = ranks.load()
            _, cache = ranks.store("stages", geometry, blocks)
            found: dict[str, Any] = measure(one, ranks.runner(loaded, cache), layouts, options.rounds)
        finally:
            ranks.close()
    for name, values in found.items():
        print(f"{name}: " + ", ".join(f"{key} {value:.3g}" for key, value in values.items()))
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": options.rows, "context": options.context, **found}, indent=1))


if __name__ == "__main__":
    main()
