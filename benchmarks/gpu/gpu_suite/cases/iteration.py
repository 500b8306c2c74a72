"""A decode iteration at 7B shapes compared with the bytes it must read, and the GPU's idle time between iterations."""

from __future__ import annotations

import gc
import itertools
import statistics
from contextlib import AbstractContextManager
from typing import Any

import torch

from gpu_suite.models import random_model, read_weight_bytes
from gpu_suite.rates import around, copy_rate, release, synchronize
from gpu_suite.record import Context
from gpu_suite.steady import Steady, make_steady
from gpu_suite.trace import STEP, idle_of, read_trace

BATCH, TOKENS = 64, 1024
TRACED = 24  # iterations under the profiler


def run(context: Context) -> None:
    for name in ("llama-2-7b", "opt-6.7b"):
        with context.record.case(name, row="iteration"):
            _measure(context, name)
        gc.collect()
        release()


def _measure(context: Context, name: str) -> None:
    batch, tokens, iterations = (4, 32, 8) if context.small else (BATCH, TOKENS, 120)
    loaded = random_model(name, context.device, small=context.small, dtype=torch.bfloat16, seed=context.seed)
    warm_up = 10
    # chosen so that the mean length over the measured iterations is `tokens`
    lengths = [max(1, tokens - warm_up - iterations // 2)] * batch
    steady = make_steady(loaded, lengths, warm_up + iterations + 4 * TRACED + 64, context.seed)
    with around(lambda: copy_rate(context.device)) as rate:
        steady.run(warm_up)
        synchronize(context.device)
        kv_tokens = sum(steady.lengths) + len(lengths) * iterations / 2
        seconds = steady.run(iterations)
    kv_bytes = kv_tokens * loaded.info.geometry(16).token_bytes
    least_s = (read_weight_bytes(loaded) + kv_bytes) / rate.mean
    context.record.figure(
        f"{name}, {batch} x {tokens}",
        least_s / statistics.median(seconds),
        "of the copy rate",
        row="iteration",
        samples=seconds,
        by_mean=least_s / statistics.mean(seconds),
        bytes=read_weight_bytes(loaded) + kv_bytes,
        copy_rate=rate.detail(),
        engine=type(steady.engine).__name__,
        attention=steady.attention,
    )
    with context.record.case(f"{name} idle", row="idle"):
        _idle(context, name, steady, statistics.median(seconds))


def _idle(context: Context, name: str, steady: Steady, alone_s: float) -> None:
    """Record the idle share, by events around each launch and by the profiler, which sees every kernel."""
    if context.on_gpu:
        share, samples = _idle_by_events(steady)
        context.record.figure(f"{name}, idle by events", share, "of the time", row="idle", samples=samples)
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if context.on_gpu else []
    steady.run(4)
    with torch.profiler.profile(activities=activities) as profiler:
        traced = steady.run(TRACED, lambda: torch.profiler.record_function(STEP))
        synchronize(context.device)
    file = context.work / f"{name}-trace.json"
    profiler.export_chrome_trace(str(file))
    events = read_trace(file)
    if not context.on_gpu:
        steps = sum(event.get("name") == STEP for event in events)
        context.record.figure(f"{name}, iterations in the trace", steps, "")
        return
    found = idle_of(events)
    context.record.figure(
        f"{name}, idle by the profiler",
        found.share,
        "of the time",
        row="idle",
        iterations=found.iterations,
        within_iterations=found.within_s / found.total_s,
        slower_under_the_profiler=statistics.median(traced) / alone_s,
    )


def _idle_by_events(steady: Steady) -> tuple[float, list[float]]:
    """The idle share and the gaps between the work of consecutive launches."""
    marks: list[tuple[Any, Any]] = []

    class Marked(AbstractContextManager[object]):
        def __enter__(self) -> None:
            marks.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            marks[-1][0].record()

        def __exit__(self, *_: object) -> None:
            marks[-1][1].record()

    steady.run(TRACED, Marked)
    torch.cuda.synchronize()
    gaps = [ended.elapsed_time(begun) / 1e3 for (_, ended), (begun, _) in itertools.pairwise(marks[4:])]
    total_s = marks[4][0].elapsed_time(marks[-1][0]) / 1e3
    return sum(gaps) / total_s, gaps
