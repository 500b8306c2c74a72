"""Compares `aligned` with `fcfs` on mixed lengths, with the split and the no_split kernel, on one pair of instances."""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

from alignedserve.request import SamplingParams, Stage
from gpu_suite.cases.profile import FILE
from gpu_suite.record import Context
from gpu_suite.serving import Cell, medium_model, pool_gib, running
from support.driver import Answer

KERNELS = {"split": ("triton", "split_kv"), "no_split": ("triton_no_split", "no_split")}
POLICIES = ("aligned", "fcfs")
REQUESTS = 160


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of one run. `bubble_share`: share of the decode time; None without a cost model."""

    seconds: float
    tokens: int
    tpot_s: float
    tpot_p99_s: float
    bubble_share: float | None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def run(context: Context) -> None:
    """Start all clusters together, then load them one after the other with the same requests."""
    asyncio.run(_run(context, KERNELS if context.on_gpu else {"torch": ("", "split_kv")}))


async def _run(context: Context, kernels: dict[str, tuple[str, str]]) -> None:
    seed, folder = context.draw.randrange(1 << 30), str(medium_model(context))
    async with contextlib.AsyncExitStack() as stack:
        wanted = [(kernel, policy) for kernel in kernels for policy in POLICIES]
        starting = [
            stack.enter_async_context(
                running(context, folder, f"{policy}-{kernel}", **_sections(context, policy, *kernels[kernel]))
            )
            for kernel, policy in wanted
        ]
        cells = dict(zip(wanted, await asyncio.gather(*starting, return_exceptions=True), strict=True))
        for kernel in kernels:
            with context.record.case(kernel, row="policies"):
                outcomes = {}
                for policy in POLICIES:
                    cell = cells[kernel, policy]
                    if isinstance(cell, BaseException):
                        raise cell
                    outcomes[policy] = await _load(context, cell, seed)
                _report(context, kernel, outcomes)


def _sections(context: Context, policy: str, backend: str, kernel_mode: str) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {
        "kv_pool": {"size_gib": 0.25 if context.small else pool_gib(len(KERNELS) * len(POLICIES))},
        "prefill": {
            "cache_blocks": 600,
            "token_budget": 4096,
            "batch_buffer_blocks": 1500,
            "requests_buffer_blocks": 1200,
        },
        "decode": {"cache_blocks": 600 if context.small else 3600, "max_running": 64, "graph_sizes": "8,16,32,48,64"},
        "scheduler": {"policy": policy, "kernel_mode": kernel_mode, "min_batch_requests": 2 if context.small else 24},
    }
    if backend:
        sections["engine"] = {"attention": backend}
    if (context.out / FILE).is_file():
        sections["scheduler"]["cost_model"] = str(context.out / FILE)
    return sections


def draw_load(count: int, seed: int, scale: float = 1.0) -> list[tuple[int, int]]:
    """`(prompt, answer)` tokens of each request, shuffled: four in five prompts are short."""
    draw = random.Random(seed)
    load = []
    for number in range(count):
        prompt = draw.randint(1500, 3500) if number % 5 == 4 else draw.randint(40, 250)
        load.append((max(2, int(prompt * scale)), max(2, int(draw.randint(60, 200) * scale))))
    draw.shuffle(load)
    return load


async def _load(context: Context, cell: Cell, seed: int) -> Outcome:
    """Submit all requests at once, after a warm-up with a few others."""
    count, scale = (8, 0.03) if context.small else (REQUESTS, 1.0)
    await _answers(context, cell, draw_load(max(2, count // 8), seed + 1, scale))
    begun_s = time.monotonic()
    answers = await _answers(context, cell, draw_load(count, seed, scale))
    seconds = max(answer.times_s[-1] for answer in answers) - begun_s
    tpots = sorted((a.times_s[-1] - a.times_s[0]) / (len(a.tokens) - 1) for a in answers if len(a.tokens) > 1)
    return Outcome(
        seconds=seconds,
        tokens=sum(len(answer.tokens) for answer in answers),
        tpot_s=statistics.mean(tpots),
        tpot_p99_s=tpots[min(len(tpots) - 1, len(tpots) * 99 // 100)],
        bubble_share=_bubble(answers),
    )


async def _answers(context: Context, cell: Cell, load: list[tuple[int, int]]) -> list[Answer]:
    answers = []
    for prompt, answer in load:
        sampling = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        tokens = [context.draw.randrange(2, 500) for _ in range(prompt)]
        answers.append(cell.driver.submit(tokens, sampling)[0])
    await cell.driver.wait(answers, 40.0)
    for one in answers:
        if one.error is not None:
            raise one.error
    return answers


def _bubble(answers: list[Answer]) -> float | None:
    watches = [answer.stopwatch for answer in answers if answer.stopwatch is not None]
    known = [watch for watch in watches if watch.bubble_s is not None]
    if not known:
        return None
    return sum(watch.bubble_s or 0.0 for watch in known) / sum(watch.spent_s.get(Stage.DECODE, 0.0) for watch in known)


def _report(context: Context, kernel: str, found: dict[str, Outcome]) -> None:
    aligned, fcfs = found["aligned"], found["fcfs"]
    detail = {
        f"{policy}_{name}": getattr(outcome, name)
        for policy, outcome in found.items()
        for name in ("tokens_per_s", "seconds", "tokens", "tpot_s", "tpot_p99_s", "bubble_share")
    }
    context.record.figure(
        f"{kernel}: aligned over fcfs, output tokens/s",
        aligned.tokens_per_s / fcfs.tokens_per_s,
        "x",
        row="policies",
        **detail,
    )
    context.record.figure(
        f"{kernel}: fcfs over aligned, time per token", fcfs.tpot_s / aligned.tpot_s, "x", row="policies"
    )
    for policy, outcome in found.items():
        if outcome.bubble_share is not None:
            context.record.figure(f"{kernel}: {policy}, bubble", outcome.bubble_share, "of decode", row="policies")
