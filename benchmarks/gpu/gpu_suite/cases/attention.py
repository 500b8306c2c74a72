"""The decode attention kernel compared with the copy rate, and the paper's mixes with equal lengths."""

from __future__ import annotations

import gc
import statistics

from gpu_suite.kernel_bench import KernelBench
from gpu_suite.rates import Rate, around, copy_rate, release
from gpu_suite.record import Context

BATCH, HEADS, HEAD_DIM = 64, 32, 128
LAYERS = 8
EXCESS_SHARE, EXCESS_S = 0.05, 5e-6
SHORT = 128  # short length in the mix with four long requests


def mixes() -> dict[str, list[int]]:
    """Lengths by name: all 1024, and the paper's two mixes; the second one is evenly spaced."""
    return {
        "64 x 1024": [1024] * BATCH,
        f"60 x {SHORT} and 4 x 4096": [SHORT] * 60 + [4096] * 4,
        "10 to 3790": [10 + (3790 - 10) * number // (BATCH - 1) for number in range(BATCH)],
    }


def equal_lengths(lengths: list[int]) -> list[int]:
    """The same number of rows and the same total, with lengths that differ by at most one."""
    each, more = divmod(sum(lengths), len(lengths))
    return [each + (row < more) for row in range(len(lengths))]


def run(context: Context) -> None:
    for kv_heads in (HEADS, HEADS // 4):
        with context.record.case(f"{kv_heads} KV heads", row="attention" if kv_heads == HEADS else ""):
            _measure(context, kv_heads)
        gc.collect()
        release()


def _measure(context: Context, kv_heads: int) -> None:
    cases = {"3 rows": [5, 40, 18]} if context.small else mixes()
    heads = 4 if context.small else HEADS
    bench = KernelBench(
        context.device,
        heads=heads,
        kv_heads=1 if context.small else kv_heads,
        head_dim=32 if context.small else HEAD_DIM,
        layers=1 if context.small else LAYERS,
        most_tokens=256 if context.small else 64 * 2048,
        seed=context.seed,
    )
    repeat = 1 if context.small else 50
    with around(lambda: copy_rate(context.device)) as rate:
        found = {
            (name, kernel, which): bench.seconds(lengths, repeat, split=kernel == "split")
            for name, mix in cases.items()
            for kernel in ("split", "no_split")
            for which, lengths in (("mix", mix), ("equal", equal_lengths(mix)))
        }
    for name, mix in cases.items():
        for kernel in ("split", "no_split"):
            judged = kernel == "split" and kv_heads == HEADS
            shown = f"{name}, {kv_heads} KV heads, {kernel}"
            _report(context, bench, shown, mix, found[name, kernel, "mix"], found[name, kernel, "equal"], rate, judged)


def _report(
    context: Context,
    bench: KernelBench,
    name: str,
    mix: list[int],
    seconds: list[float],
    equal: list[float],
    rate: Rate,
    judged: bool,
) -> None:
    taken_s, equal_s = statistics.median(seconds), statistics.median(equal)
    context.record.figure(
        name,
        bench.rate(mix, seconds) / rate.mean,
        "of the copy rate",
        row="attention" if judged else "",
        samples=seconds,
        bytes=bench.bytes_read(mix),
        copy_rate=rate.detail(),
    )
    if len(set(mix)) > 1:
        excess_s = taken_s - equal_s
        context.record.figure(
            f"{name}, beyond equal lengths",
            excess_s / equal_s,
            f"({excess_s * 1e6:+.1f} µs of {equal_s * 1e6:.1f})",
            row="attention-mixes" if judged else "",
            met=excess_s <= max(EXCESS_SHARE * equal_s, EXCESS_S) if judged else None,
        )
