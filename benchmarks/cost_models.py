"""The error and the speed of the cost model from measured tables: python benchmarks/cost_models.py DIR

DIR: measured tables, `costmodel/rtxpro6000-llama-3.1-8b`. The rows of attention.csv whose numbers are powers of two
predict the other rows.
"""

from __future__ import annotations

import argparse
import csv
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from alignedserve.scheduler.cost.load import load_step_cost
from alignedserve.scheduler.cost.step import ChunkShape
from alignedserve.scheduler.cost.tables import ATTENTION_COLUMNS, attention_grids


def held_out(folder: Path) -> None:
    with (folder / "attention.csv").open(encoding="utf-8") as file:
        table = [tuple(float(row[column]) for column in ATTENTION_COLUMNS) for row in csv.DictReader(file)]
    coarse = {row[:4]: row[4] for row in table if all(int(x) & (int(x) - 1) == 0 for x in row[:4])}
    chunk, decode, mixed = attention_grids(coarse, str(folder))
    assert mixed is not None
    errors: dict[str, list[float]] = {"decodes": [], "chunks": [], "both": []}
    for tokens, cached, requests, length, measured in table:
        if (tokens, cached, requests, length) in coarse:
            continue
        if not tokens:
            errors["decodes"].append(abs(decode.at(requests, length) / measured - 1))
        elif not requests:
            errors["chunks"].append(abs(chunk.at(tokens, cached) / measured - 1))
        else:
            errors["both"].append(abs(mixed.at(tokens, cached, requests, [length])[0] / measured - 1))
    for what, values in errors.items():
        print(f"{what}: mean error {np.mean(values):.2%}, P90 {np.quantile(values, 0.9):.2%} of {len(values)} rows")


def best_us(call: Callable[[], object], times: int) -> float:
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        for _ in range(times):
            call()
        seconds.append((time.perf_counter() - begun) / times)
    return min(seconds) * 1e6


def speed(folder: Path) -> None:
    draw = random.Random(1)
    lengths = [draw.randint(32, 8000) for _ in range(256)]
    split, no_split = load_step_cost(folder), load_step_cost(folder, "no_split")
    chunk = (ChunkShape(300, 200),)
    print(f"256 decodes, split_kv: {best_us(lambda: split.step_s((), lengths), 200):.1f} µs")
    print(f"a leap of 500 such passes: {best_us(lambda: split.run_s(lengths, 500), 20) / 500:.3f} µs a pass")
    print(f"128 decodes and a chunk, split_kv: {best_us(lambda: split.step_s(chunk, lengths[:128]), 200):.1f} µs")
    print(f"256 decodes x 32 heads, no_split: {best_us(lambda: no_split.step_s((), lengths), 3):.0f} µs")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    held_out(options.folder)
    speed(options.folder)
