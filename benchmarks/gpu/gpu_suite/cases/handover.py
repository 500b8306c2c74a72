"""Measures how much longer the hand-over of a 2k-token request into a running batch takes than the copy of its KV.

The copy's time is measured without a running batch, beside which a copy also waits for its turn.
"""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

from alignedserve.control.samples import value
from alignedserve.request import SamplingParams, Stage
from gpu_suite.record import Context
from gpu_suite.serving import REPORTED_S, Cell, medium_model, pool_gib, running
from support.driver import Answer

BATCH, TOKENS, JOINING, JOINS, ALONE = 64, 1024, 2048, 12, 4


def run(context: Context) -> None:
    with context.record.case("2k tokens into a running batch", row="handover"):
        asyncio.run(_run(context))


async def _run(context: Context) -> None:
    batch, tokens, joining, joins = (2, 16, 48, 2) if context.small else (BATCH, TOKENS, JOINING, JOINS)
    blocks = (batch + 4) * (tokens + 1600) // 16 + joining // 8
    sections: dict[str, dict[str, Any]] = {
        "kv_pool": {"size_gib": 0.25 if context.small else pool_gib(1)},
        "prefill": {
            "cache_blocks": 600,
            "token_budget": 2048,
            "batch_buffer_blocks": max(600, batch * tokens // 16),
            "requests_buffer_blocks": 1200,
        },
        "decode": {"cache_blocks": blocks, "max_running": batch + 8, "graph_sizes": f"{batch},{batch + 8}"},
        "scheduler": {"min_batch_requests": min(batch, 16), "join_window": 8.0},
    }
    async with running(context, str(medium_model(context)), "handover", **sections) as cell:
        await _join(context, cell, joining)  # what is slow the first time
        alone, _ = await _joins(context, cell, joining, ALONE)
        # Long enough that the batch runs until the last request has joined.
        held = [_submit(context, cell, tokens, 2500) for _ in range(batch)]
        await _until_decoding(held)
        await _join(context, cell, joining)  # what is slow the first time
        beside, joined = await _joins(context, cell, joining, joins)
        running_still = sum(not answer.done.is_set() for answer in held)
        cell.driver.cancel(held)
        await asyncio.sleep(REPORTED_S)
    _report(context, joined, alone, beside, running_still, held)


async def _joins(context: Context, cell: Cell, tokens: int, count: int) -> tuple[dict[str, float], list[Answer]]:
    """Let `count` requests join one after the other. Returns a copy's mean seconds and bytes, and the answers."""
    await asyncio.sleep(REPORTED_S)
    before = _copied((await cell.cluster.status()).metrics)
    joined = [await _join(context, cell, tokens) for _ in range(count)]
    await asyncio.sleep(REPORTED_S)
    after = _copied((await cell.cluster.status()).metrics)
    copies = after["copies"] - before["copies"]
    if copies < count:
        raise ValueError(f"{copies:g} copies into the cache for {count} requests that joined")
    return {name: (after[name] - before[name]) / copies for name in ("busy_s", "bytes")}, joined


def _report(
    context: Context,
    joined: list[Answer],
    alone: dict[str, float],
    beside: dict[str, float],
    running_still: int,
    held: list[Answer],
) -> None:
    handovers = [_stage(answer, Stage.HANDOVER) for answer in joined]
    beyond = [seconds - alone["busy_s"] for seconds in handovers]
    gaps = [
        later - sooner for answer in held for sooner, later in zip(answer.times_s, answer.times_s[1:], strict=False)
    ]
    context.record.figure(
        f"{len(held[0].spec.prompt_token_ids)} x {len(held)} running, median of {len(joined)}",
        statistics.median(beyond),
        "s",
        row="handover",
        samples=beyond,
        copy_s=alone["busy_s"],
        copy_beside_the_batch_s=beside["busy_s"],
        copy_bytes=beside["bytes"],
        handover_s=statistics.median(handovers),
        iteration_s=statistics.median(gaps) if gaps else None,
        still_running=running_still,
        prefetch_s=statistics.median([_stage(answer, Stage.PREFETCH) for answer in joined]),
    )
    if running_still < len(held):
        raise ValueError(f"of the batch of {len(held)} only {running_still} still ran when the last had joined")


def _submit(context: Context, cell: Cell, tokens: int, new_tokens: int) -> Answer:
    prompt = [context.draw.randrange(2, 500) for _ in range(tokens)]
    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    return cell.driver.submit(prompt, sampling)[0]


async def _join(context: Context, cell: Cell, tokens: int) -> Answer:
    answer = _submit(context, cell, tokens, 4)
    await cell.driver.wait([answer], 20.0)
    if answer.error is not None:
        raise answer.error
    return answer


async def _until_decoding(answers: list[Answer]) -> None:
    """Wait until each has a few decode tokens. Raises TimeoutError after 30 s, or the error of an answer."""
    async with asyncio.timeout(30.0):
        while any(len(answer.tokens) < 4 for answer in answers):
            for answer in answers:
                if answer.error is not None:
                    raise answer.error
            await asyncio.sleep(0.05)


def _stage(answer: Answer, stage: Stage) -> float:
    assert answer.stopwatch is not None
    return answer.stopwatch.spent_s.get(stage, 0.0)


def _copied(metrics: str) -> dict[str, float]:
    """Totals of all channels into the decode cache: copies, bytes, and seconds spent copying."""
    moved = {"copies": "copies", "bytes": "bytes", "busy_s": "busy_seconds"}
    into = {"destination": "decode-0/cache"}
    return {name: value(metrics, f"alignedserve_transfer_{what}_total", **into) for name, what in moved.items()}
