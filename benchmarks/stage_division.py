"""Two stages of a pipeline, divided by measured times and by weights (CPU, Gloo): a model with a large vocabulary.

`--rows` requests whose prefix lengths are spread evenly up to `--context` tokens decode in two lanes of like cost, one
thread a process. Both instances load the same model, and decode by turns; medians of a round, in which each request
gets a token. `idle`: the share of a round in which the first stage waits for the second. `ratio`: the time by weights
over the time by measured times, of the same turn. `busy_0`, `busy_1`: CPU time of each stage in a round, which other
programs on the machine change less; the greater one is what a round takes on cores of its own.

    python benchmarks/stage_division.py --rounds 12 --json division.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pipeline import BLOCK, ROUNDS_AT_ONCE, Lanes, lanes_of, timed

from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.parallel.layer_times import DECODE
from alignedserve.engine.parallel.processes import RankProcesses
from alignedserve.engine.runner import ModelRunner
from alignedserve.model import ModelInfo
from alignedserve.ranks.degrees import Degrees
from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.plan import RunItem
from alignedserve.testing.models import make_model

MEASURED, WEIGHTS = "measured", "weights"


def requests(rows: int, context: int) -> tuple[list[RunItem], int]:
    """The requests, each with blocks of its own, and the number of blocks."""
    items, blocks = [], 0
    for number in range(rows):
        length = context * (number + 1) // rows
        own = -(-(length + 1) // BLOCK)
        items.append(RunItem(RequestKey(str(number)), length, list(range(blocks, blocks + own))))
        blocks += own
    return items, blocks


@dataclass
class Stages:
    """An instance of two stages. `layers`: how they are divided."""

    runner: ModelRunner
    layers: str
    pids: list[int]

    def cpu_s(self) -> list[float]:
        """Of each stage's process, since its start."""
        found = []
        for pid in self.pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
        return found


def started(info: ModelInfo, blocks: int, name: str, cleanup: ExitStack) -> Stages:
    """Two stages of the model that are divided as `name` says."""
    ranks = RankProcesses(
        info,
        Degrees(1, 2),
        trust_remote_code=False,
        threads=1,
        backend="torch",
        timed=DECODE if name == MEASURED else None,
    )
    cleanup.callback(ranks.close)
    loaded = ranks.load()
    _, cache = ranks.store(name, info.geometry(BLOCK), blocks)
    return Stages(ranks.runner(loaded, cache), loaded.stages, ranks.pids)


def measure(instances: dict[str, Stages], lanes: Lanes, rounds: int) -> dict[str, dict[str, float]]:
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in instances}
    busy_s = {name: [0.0, 0.0] for name in instances}
    for turn in range(rounds + 1):
        for name, own in instances.items():
            before = own.cpu_s()
            took = timed(own.runner, lanes)
            if turn:  # the first turn is slower
                times[name].append(took)
                for stage, (then_s, now_s) in enumerate(zip(before, own.cpu_s(), strict=True)):
                    busy_s[name][stage] += (now_s - then_s) / (rounds * ROUNDS_AT_ONCE)
    found: dict[str, dict[str, float]] = {
        name: {
            "round_ms": 1e3 * statistics.median(took_s for took_s, _ in own),
            "idle": statistics.median(idle for _, idle in own),
            "busy_0_ms": 1e3 * busy_s[name][0],
            "busy_1_ms": 1e3 * busy_s[name][1],
        }
        for name, own in times.items()
    }
    pairs = zip(times[WEIGHTS], times[MEASURED], strict=True)
    found[MEASURED]["ratio"] = statistics.median(slow[0] / own[0] for slow, own in pairs)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=65536)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    items, blocks = requests(options.rows, options.context)
    heads = options.hidden // 64
    shape: dict[str, Any] = {
        "hidden_size": options.hidden, "intermediate_size": 3 * options.hidden, "num_hidden_layers": options.layers,
        "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 64, "vocab_size": options.vocabulary,
        "max_position_embeddings": 8192,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, ExitStack() as cleanup:
        info = inspect_model("m", make_model("llama", Path(folder) / "m", seed=1, **shape), "float32", "cpu")
        found = {name: started(info, blocks, name, cleanup) for name in (MEASURED, WEIGHTS)}
        measured = measure(found, lanes_of(items, 2), options.rounds)
    for name, values in measured.items():
        print(f"{name}: {found[name].layers}; " + ", ".join(f"{key} {value:.3g}" for key, value in values.items()))
    if options.json is not None:
        written = {name: {"stages": found[name].layers, **values} for name, values in measured.items()}
        options.json.write_text(json.dumps(written, indent=1))


if __name__ == "__main__":
    main()
