"""Decode and prefill passes of an instance of several ranks, against one rank, with one thread each (CPU, Gloo).

Both compute the same passes by turns over stores of their own: decode of `--rows` requests with `--context` tokens, and
a chunk of `--chunk` tokens. Times are medians of a pass in milliseconds; the share of collectives is of rank 0's time.

    python benchmarks/tensor_parallel.py --degree 2 --rounds 12 --json tp.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from alignedserve.engine.batch import ForwardItem
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.model.loader import load_model
from alignedserve.engine.parallel.processes import RankProcesses
from alignedserve.engine.runner import ModelRunner, allocate_cache
from alignedserve.geometry import KvGeometry
from alignedserve.model import ModelInfo
from alignedserve.ranks.degrees import Degrees
from alignedserve.testing.models import make_model

BLOCK = 16
SHAPE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
         "num_key_value_heads": 12, "head_dim": 64, "vocab_size": 32000, "max_position_embeddings": 4096}  # fmt: skip


def with_ranks(info: ModelInfo, geometry: KvGeometry, blocks: int, degree: int) -> tuple[RankProcesses, ModelRunner]:
    ranks = RankProcesses(info, Degrees(degree), trust_remote_code=False, threads=1, backend="torch")
    loaded = ranks.load()
    _, cache = ranks.store("ranks", geometry, blocks)
    return ranks, ranks.runner(loaded, cache)


def measure(
    runners: dict[str, ModelRunner], passes: dict[str, Callable[[], list[ForwardItem]]], rounds: int
) -> dict[str, dict[str, float]]:
    """By pass: the median of each runner in ms, of the ratio, and the share of collectives."""
    found: dict[str, dict[str, float]] = {}
    for name, make in passes.items():
        times: dict[str, list[float]] = {one: [] for one in runners}
        shares = []
        for _ in range(rounds):
            for one, runner in runners.items():
                items, before_s, begun_s = make(), runner.waited_s, time.perf_counter()
                runner.forward(items)
                times[one].append(time.perf_counter() - begun_s)
                if one == "ranks":
                    shares.append((runner.waited_s - before_s) / times[one][-1])
        ratio = statistics.median(a / b for a, b in zip(times["one"], times["ranks"], strict=True))
        medians = {f"{one}_ms": 1e3 * statistics.median(own) for one, own in times.items()}
        found[name] = {**medians, "speedup": ratio, "collectives": statistics.median(shares)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--degree", type=int, default=2)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    each = -(-(options.context + 1) // BLOCK)
    chunk_blocks = -(-options.chunk // BLOCK)
    blocks = max(options.rows * each, chunk_blocks)
    with tempfile.TemporaryDirectory() as folder:
        path = make_model("llama", Path(folder) / "model", seed=1, **SHAPE)
        info = inspect_model("ranks", path, "float32", "cpu")
        geometry = info.geometry(BLOCK)
        one = ModelRunner(load_model(info, "cpu"), allocate_cache(geometry, blocks, "cpu"), "torch")
        ranks, several = with_ranks(info, geometry, blocks, options.degree)
        rows = [list(range(number * each, (number + 1) * each)) for number in range(options.rows)]
        passes = {
            "decode": lambda: [ForwardItem([7], options.context, own) for own in rows],
            "prefill": lambda: [ForwardItem([7] * options.chunk, 0, list(range(chunk_blocks)))],
        }
        try:
            measure({"one": one, "ranks": several}, passes, 2)
            found = measure({"one": one, "ranks": several}, passes, options.rounds)
        finally:
            ranks.close()
    for name, values in found.items():
        told = ", ".join(f"{key} {value:.3g}" for key, value in values.items())
        print(f"{name}, {options.degree} ranks: {told}")
    if options.json is not None:
        options.json.write_text(json.dumps({"degree": options.degree, **found}, indent=1))


if __name__ == "__main__":
    main()
