"""Makes the shipped cost models from measured data that is not shipped.

    python tools/cost_models/make_shipped.py DATA [--out scheduler/cost/data]

DATA holds `costmodel/rtxpro6000-llama-3.1-8b` (tables) and `costmodel/a100-opt` (DistServe's coefficients).
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import numpy as np

from alignedserve.scheduler.cost.fit import fit_grid, hats, relative_errors
from alignedserve.scheduler.cost.fitted import SCHEMA, VERSION, parts_from
from alignedserve.scheduler.cost.known import KNOWN_SHAPES
from alignedserve.scheduler.cost.skew import AXES
from alignedserve.scheduler.cost.tables import load_tables

POOL_BYTES = 512 << 30  # assumed host memory of the pool
HELD_OUT = 5  # every fifth row is held out: predicted, not fitted

DENSE_TOKENS = (1, 16, 32, *range(64, 257, 64), 272, *range(320, 1025, 64), *range(1152, 2049, 128))
SEQUENCES = (1, 16, 64, 128, 160, 176, 256)
DECODE_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DECODE_LENGTHS = (16, 64, 128, 512, 1024, 2048, 4096, 8192, 16384)
CHUNK_TOKENS = (16, 128, 256, 384, 512, 640, 768, 1024, 1536, 2048)
CHUNK_CACHED = (0, 512, 2048, 4096, 16384)
MIXED = (
    (16, 128, 256, 512, 1024, 2048),
    (0, 1024, 4096, 16384),
    (1, 4, 8, 16, 32, 64, 128),
    (16, 128, 512, 1024, 2048, 4096, 16384),
)
SKEW_BOUNDS = {
    "chunk_tokens": [0.0, 128.0, 512.0],
    "requests": [4.0, 16.0, 32.0, 64.0, 128.0],
    "long_share": [0.05, 0.15, 0.4, 0.7],
    "longest": [1024.0, 4096.0],
    "cached_tokens": [0.0, 2048.0],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("scheduler/cost/data"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    tables = options.data / "costmodel/rtxpro6000-llama-3.1-8b"
    models = [fit_tables(tables), *opt_models(options.data / "costmodel/a100-opt")]
    for model in models:
        text = json.dumps(model, separators=(",", ":"))
        parts_from(json.loads(text), model["name"], "")
        (options.out / f"{model['name']}.json").write_text(text.replace(',"', ',\n"') + "\n", encoding="utf-8")
        print(model["name"], json.dumps(model.get("fit", {})))


def read(path: Path, columns: tuple[str, ...]) -> np.ndarray:
    with path.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if all(row[column] for column in columns)]
    return np.array([[float(row[column]) for column in columns] for row in rows])


def rounded(values: np.ndarray) -> Any:
    return np.round(values, 3).tolist()


def fit_tables(folder: Path) -> dict[str, Any]:
    parts = load_tables(folder)
    rows = read(folder / "attention.csv", ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"))
    errors: dict[str, Any] = {}

    def grid(what: str, axes: Any, chosen: np.ndarray, columns: list[int]) -> Any:
        held = np.arange(len(chosen)) % HELD_OUT == HELD_OUT - 1
        values = fit_grid(axes, chosen[~held][:, columns], chosen[~held][:, 4])
        errors[what] = relative_errors(hats(axes, chosen[held][:, columns]) @ values.ravel(), chosen[held][:, 4])
        return rounded(values)

    chunks, decodes = rows[:, 0] > 0, rows[:, 2] > 0
    attention = {
        "decode": {
            "requests": DECODE_REQUESTS,
            "length": DECODE_LENGTHS,
            "us": grid("decode", (DECODE_REQUESTS, DECODE_LENGTHS), rows[~chunks & decodes], [2, 3]),
        },
        "chunk": {
            "tokens": CHUNK_TOKENS,
            "cached": CHUNK_CACHED,
            "us": grid("chunk", (CHUNK_TOKENS, CHUNK_CACHED), rows[chunks & ~decodes], [0, 1]),
        },
        "mixed": {
            **dict(zip(("tokens", "cached", "requests", "length"), MIXED, strict=True)),
            "us": grid("mixed", MIXED, rows[chunks & decodes], [0, 1, 2, 3]),
        },
    }
    shape = parts.shape
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "name": "rtxpro6000-llama-3.1-8b",
        "model": "meta-llama/Llama-3.1-8B",
        "device": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "attribution": "Fitted to kernel times that casys-kaist/LLMServingSim measured with vLLM 0.19 (bf16, eager)",
        "licence": "MIT (LLMServingSim, casys-kaist)",
        "shape": {name: getattr(shape, name) for name in type(shape).__slots__},
        "sm_count": parts.sm_count,
        "dense": {"tokens": DENSE_TOKENS, "us": fit_curve(parts.dense.xs, parts.dense.values, DENSE_TOKENS)},
        "sequences": {
            "requests": SEQUENCES,
            "us": fit_curve(parts.sequences.xs, parts.sequences.values, SEQUENCES),
        },
        "attention": attention,
        "skew": fit_skew(folder, errors),
        "hardware": hardware(int((0.9 * 96 - 15.0 - 1.5) * 2**30) // shape.kv_bytes_per_token, shape.kv_bytes_per_token)
        | {"pool_bandwidth": 50e9, "peer_bandwidth": 50e9},
        "hardware_note": "estimated: 0.9 of 96 GiB less 15 GiB of weights and 1.5 GiB of activations; a pool of 512 "
        "GiB; PCIe 5 x16 to host and peers",
        "fit": errors,
    }


def fit_curve(xs: list[float], values: list[float], knots: tuple[int, ...]) -> Any:
    return rounded(fit_grid((knots,), np.array(xs)[:, None], np.array(values)))


def fit_skew(folder: Path, errors: dict[str, Any]) -> dict[str, Any]:
    """Fit alpha for each bucket by least squares of the relative error of the skewed time."""
    columns = ("pc", "n", "kvs", "kv_big", "kp", "kv_mean", "t_mean_us", "t_max_us", "t_skew_us")
    rows = read(folder / "skew.csv", columns)
    share = (rows[:, 5] - rows[:, 2]) / (rows[:, 3] - rows[:, 2])
    values = {
        "chunk_tokens": rows[:, 0],
        "requests": rows[:, 1],
        "long_share": share,
        "longest": rows[:, 3],
        "cached_tokens": rows[:, 4],
    }
    index = np.stack([np.searchsorted(SKEW_BOUNDS[axis], values[axis], side="left") for axis in AXES], axis=1)
    held = np.arange(len(rows)) % HELD_OUT == HELD_OUT - 1
    mean, most, skewed = rows[:, 6], rows[:, 7], rows[:, 8]
    buckets = []
    predicted = mean.copy()
    for place in sorted({tuple(row) for row in index.tolist()}):
        inside = (index == place).all(axis=1)
        fitted = inside & ~held if (inside & ~held).any() else inside
        step = (most - mean)[fitted] / skewed[fitted]
        short = (skewed - mean)[fitted] / skewed[fitted]
        alpha = float(np.clip((step @ short) / max(1e-12, step @ step), 0.0, 1.0))
        buckets.append([*place, round(alpha, 4)])
        predicted[inside] += round(alpha, 4) * (most - mean)[inside]
    errors["skew"] = relative_errors(predicted[held], skewed[held])
    errors["skew_as_if_equal"] = relative_errors(mean[held], skewed[held])
    return {"bounds": SKEW_BOUNDS, "buckets": buckets}


def hardware(kv_tokens: int, token_bytes: int) -> dict[str, float]:
    return {
        "kv_tokens": kv_tokens // 16 * 16,
        "kv_bytes_per_token": token_bytes,
        "pool_tokens": POOL_BYTES // token_bytes // 16 * 16,
    }


def opt_models(folder: Path) -> list[dict[str, Any]]:
    coefficients = json.loads((folder / "profiler-a100-80g.distserve.json").read_text(encoding="utf-8"))
    with (folder / "max_num_tokens.csv").open(encoding="utf-8") as file:
        capacity = {
            (row["model"], row["tp"]): int(row["max_num_tokens"]) for row in csv.DictReader(file) if row["pp"] == "1"
        }
    return [
        opt_model(model, degree, found, capacity.get((model, degree), 0))
        for model, degrees in coefficients.items()
        for degree, found in degrees.items()
    ]


def opt_model(model: str, degree: str, found: dict[str, Any], kv_tokens: int) -> dict[str, Any]:
    """Convert DistServe's coefficients, in ms, to a cost model.

    A prefill takes `a + b sum(L) + c sum(L^2)`, a decode pass `a + b sum(context) + c requests`. A decode pass has two
    regimes by the number of requests. The grid has points on both sides of the change, so it is exact.
    """
    whole = KNOWN_SHAPES[model.rsplit("/", 1)[-1]]
    tp = int(degree)
    regimes = {1: "decoding_smallbs", found["decoding_large_small_bs_threshold"]: "decoding_largebs"}
    requests, base, per_token = [], [], []
    for begin, end in ((1, 94), (95, 512)):
        a, b, c = found[regimes[begin]]
        for count in (begin, end):
            requests.append(count)
            base.append((a + c * count) * 1e3)
            per_token.append(b * 1e3 * count / whole.layers)
    a, b, c = found["prefill"]
    name = f"a100-{model.rsplit('/', 1)[-1]}" + (f"-tp{tp}" if tp > 1 else "")
    length = 2048
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "name": name,
        "model": model,
        "device": f"{tp} NVIDIA A100-SXM4-80GB",
        "attribution": "From the latency coefficients of LLMServe/DistServe (profiler-a100-80g.distserve.json) and its "
        "max_num_tokens.csv; the skew of lengths is that of rtxpro6000-llama-3.1-8b, pooled",
        "licence": "Apache-2.0 (DistServe); skew: MIT (LLMServingSim)",
        "shape": {
            "layers": whole.layers,
            "heads": whole.heads // tp,
            "kv_heads": whole.kv_heads // tp,
            "head_dim": whole.head_dim,
            "itemsize": 2,
        },
        "sm_count": 108,
        "dense": {"tokens": [0, length], "us": [a * 1e3, (a + b * length) * 1e3]},
        "dense_decode": {"tokens": requests, "us": base},
        "attention": {
            "decode": {"requests": requests, "length": [0, length], "us": [[0.0, x * length] for x in per_token]},
            "chunk": {"pair_us": 2.0 * c * 1e3 / whole.layers},
        },
        "skew": {"bounds": {axis: [] for axis in AXES}, "buckets": [[0, 0, 0, 0, 0, 0.0543]]},
        "hardware": hardware(kv_tokens, whole.kv_bytes_per_token) | {"pool_bandwidth": 25e9, "peer_bandwidth": 250e9},
        "hardware_note": "KV capacity from max_num_tokens.csv; a pool of 512 GiB; PCIe 4 x16 to the host, "
        "NVLink 3 to peers",
    }


if __name__ == "__main__":
    main()
