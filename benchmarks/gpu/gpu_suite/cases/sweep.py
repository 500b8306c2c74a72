"""Measures tuning settings of the decode kernel: the best ones of each shape, beside the one in use."""

from __future__ import annotations

import gc
import statistics
import time

from alignedserve.engine.backends.triton_tuning import decode_candidates, padded_group
from gpu_suite.cases.attention import mixes
from gpu_suite.kernel_bench import KernelBench
from gpu_suite.rates import copy_rate, release
from gpu_suite.record import Context

# (query heads, KV heads, head size); each has an equal share of the time.
SHAPES = ((32, 32, 128), (32, 8, 128), (32, 32, 64), (16, 8, 256))
SHAPE_S = 55.0
SHOWN = 12


def run(context: Context) -> None:
    shapes = ((2, 1, 32),) if context.small else SHAPES
    for heads, kv_heads, head_dim in shapes:
        with context.record.case(f"{heads}/{kv_heads} x {head_dim}"):
            _sweep(context, heads, kv_heads, head_dim)
        gc.collect()
        release()


def _sweep(context: Context, heads: int, kv_heads: int, head_dim: int) -> None:
    lengths = [20, 40] if context.small else mixes()["64 x 1024"]
    bench = KernelBench(
        context.device,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=1 if context.small else 4,
        most_tokens=128 if context.small else 64 * 1024,
        seed=context.seed,
    )
    rate = copy_rate(context.device)
    settings = list(decode_candidates(head_dim, 2, padded_group(heads, kv_heads)))
    in_use, end_s = settings[0], time.monotonic() + SHAPE_S
    context.draw.shuffle(settings)  # the time may not suffice for all
    found = []
    for setting in [in_use, *(other for other in settings if other != in_use)]:
        if found and (min(end_s - time.monotonic(), context.time_left_s) < 0 or context.small):
            break
        try:
            seconds = bench.seconds(lengths, 1 if context.small else 20, setting=setting)
        except Exception as error:  # a setting that does not compile or fit is skipped
            context.record.note("left out", setting=str(setting), reason=f"{type(error).__name__}: {error}"[:300])
            continue
        found.append((statistics.median(seconds), setting))
        name = f"{heads}/{kv_heads} x {head_dim}, {setting}{' (in use)' * (setting == in_use)}"
        context.record.figure(name, bench.rate(lengths, seconds) / rate, "of the copy rate")
    for seconds_of_best, setting in sorted(found, key=lambda one: one[0])[:SHOWN]:
        print(f"{heads}/{kv_heads} x {head_dim}: {seconds_of_best * 1e6:.1f} µs {setting}", flush=True)
    context.record.note("tried", settings=len(found), of=len(settings), best=str(min(found, key=lambda one: one[0])[1]))
