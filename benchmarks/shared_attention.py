"""Attention over a prefix that requests of a pass share: computed once for all of them, against the plain path.

Both compute the same passes by turns, in one process: decode (one new token a request), prefill (a chunk of `--own`
tokens a request), and decode of requests that share nothing, which shows what looking for groups costs. Times are of
attention in all layers and the planning of the pass; with `--iteration` also of a whole decode iteration of a random
Llama of 134 million parameters.

    python benchmarks/shared_attention.py --requests 32 --shared 2000 --own 100 --json shared_attention.json
    python benchmarks/shared_attention.py --sweep      # where sharing begins to pay: `least_saved_bytes`
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from alignedserve.engine.backends.base import AttentionOptions
from alignedserve.engine.backends.torch_backend import TorchBackend
from alignedserve.engine.batch import ForwardItem, PackedBatch, build_batch
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.model.loader import load_model
from alignedserve.engine.runner import ModelRunner, allocate_cache

BLOCK = 16


@dataclass(frozen=True)
class Shape:
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


# Two layers are enough: planning a pass then weighs more than it does with all of them.
SHAPES = {"tiny": Shape(2, 8, 4, 32), "134m": Shape(2, 12, 12, 64), "8b": Shape(2, 32, 8, 128)}


@dataclass(frozen=True)
class Result:
    """Medians in milliseconds of CPU time, and of their ratio, plain over shared, the quartiles."""

    name: str
    plain_ms: float
    shared_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float

    def __str__(self) -> str:
        spread = f"{self.ratio_low:.2f} to {self.ratio_high:.2f}"
        return (
            f"{self.name}: plain {self.plain_ms:.2f} ms, shared {self.shared_ms:.2f} ms: {self.ratio:.2f} x ({spread})"
        )


def items_of(requests: int, shared: int, own: int, new: int) -> tuple[list[ForwardItem], int]:
    """Requests of `shared` tokens in common (whole blocks) and `own` beside them, `new` of these in this pass."""
    common = list(range(shared // BLOCK))
    items, used = [], len(common)
    tokens = len(common) * BLOCK + own
    for _ in range(requests):
        rest = -(-tokens // BLOCK) - len(common)
        items.append(ForwardItem([1] * new, tokens - new, common + list(range(used, used + rest))))
        used += rest
    return items, used


def by_turns(plain: Callable[[], None], shared: Callable[[], None], rounds: int, name: str) -> Result:
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 2):
        for place in (0, 1) if turn % 2 else (1, 0):
            begun = time.process_time()
            (plain, shared)[place]()
            if turn > 1:
                times[place].append((time.process_time() - begun) * 1e3)
    ratios = [slow / fast for slow, fast in zip(*times, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Result(name, statistics.median(times[0]), statistics.median(times[1]), middle, low, high)


def attention(
    shape: Shape, dtype: torch.dtype, items: list[ForwardItem], blocks: int, rounds: int, name: str
) -> Result:
    cache = torch.randn(blocks, shape.layers, shape.kv_heads, 2, BLOCK, shape.head_dim, dtype=torch.float32).to(dtype)
    batch = build_batch(items, BLOCK, blocks, torch.device("cpu"))
    query = torch.randn(batch.tokens, shape.heads, shape.head_dim).to(dtype)
    key, value = (torch.randn(batch.tokens, shape.kv_heads, shape.head_dim).to(dtype) for _ in range(2))
    options = AttentionOptions(shape.head_dim**-0.5)

    def run(backend: TorchBackend, batch: PackedBatch) -> None:
        backend.begin(batch)
        for layer in range(shape.layers):
            backend.attend(layer, query, key, value, options)

    plain, shared = TorchBackend(cache), TorchBackend(cache)
    plain.least_saved_bytes, shared.least_saved_bytes = math.inf, shared.least_saved_bytes if name != "sweep" else 0.0
    with torch.inference_mode():
        return by_turns(lambda: run(plain, batch), lambda: run(shared, batch), rounds, name)


def iteration(items: list[ForwardItem], blocks: int, rounds: int) -> Result:
    from engine_cpu import make_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), torch.float32)
        info = inspect_model("bench", Path(folder), "float32", "cpu")
        loaded = load_model(info, "cpu")
    cache = allocate_cache(info.geometry(BLOCK), blocks, "cpu")
    runner, least = ModelRunner(loaded, cache), TorchBackend.least_saved_bytes

    def run(least_saved_bytes: float) -> None:
        TorchBackend.least_saved_bytes = least_saved_bytes
        runner.forward(items)

    return by_turns(lambda: run(math.inf), lambda: run(least), rounds, "decode iteration, 134m")


def sweep(shape: Shape, dtype: torch.dtype, rounds: int) -> list[Result]:
    """Small groups: the ratio passes 1 where reads saved pay for the calls added."""
    results = []
    for requests in (2, 4, 16):
        for shared in (64, 128, 256, 512, 1024, 2048):
            items, blocks = items_of(requests, shared, 100, 1)
            found = attention(shape, dtype, items, blocks, rounds, "sweep")
            saved = (requests - 1) * shared * shape.kv_heads * shape.head_dim * 2 * dtype.itemsize
            print(
                f"{requests} requests sharing {shared} tokens, "
                f"saving {saved / 2**20:.2f} MiB a layer: {found.ratio:.2f} x"
            )
            results.append(found)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--shared", type=int, default=2000, help="tokens that all requests begin with")
    parser.add_argument("--own", type=int, default=100, help="further tokens of each request")
    parser.add_argument("--shape", choices=SHAPES, default="134m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--iteration", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    shape, dtype = SHAPES[args.shape], getattr(torch, args.dtype)
    if args.sweep:
        results = sweep(shape, dtype, args.rounds)
    else:
        decode = items_of(args.requests, args.shared, args.own, 1)
        cases = {
            "decode": decode,
            "prefill": items_of(args.requests, args.shared, args.own, args.own),
            "decode, nothing shared": items_of(args.requests, 0, args.own + args.shared, 1),
        }
        results = [attention(shape, dtype, *case, args.rounds, name) for name, case in cases.items()]
        if args.iteration:
            results.append(iteration(*decode, args.rounds))
        print(*results, sep="\n")
    if args.json is not None:
        setup = {key: str(value) for key, value in vars(args).items()} | {"torch": torch.__version__}
        args.json.write_text(json.dumps({"setup": setup, "results": [asdict(result) for result in results]}, indent=1))


if __name__ == "__main__":
    main()
