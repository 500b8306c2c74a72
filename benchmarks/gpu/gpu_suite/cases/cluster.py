"""Compares greedy tokens of a cluster with `transformers`: stores, channels and hand-overs use the device."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import torch

from alignedserve.control.samples import value
from alignedserve.request import SamplingParams
from alignedserve.testing.models import make_model
from alignedserve.testing.reference import load_reference
from gpu_suite.cases.tokens import SHAPE
from gpu_suite.models import GAIN
from gpu_suite.record import Context
from gpu_suite.reference import agreement, greedy
from gpu_suite.serving import REPORTED_S, running

# Long prompts are split into chunks. Short ones grow until the cache is full, which forces evictions.
LENGTHS = (20, 31, 200, 40, 250, 33, 17, 280, 1, 36, 22, 600, 90, 150, 300, 44)
CACHE_BLOCKS = 110


def run(context: Context) -> None:
    """On a GPU, run a cluster of each dtype at once, since nothing is timed. On a CPU, run one small cluster."""
    dtypes = [torch.float32, torch.bfloat16] if context.on_gpu else [torch.float32]
    asyncio.run(_run(context, dtypes))


async def _run(context: Context, dtypes: list[torch.dtype]) -> None:
    answers = [_serve(context, dtype) for dtype in dtypes]
    for dtype, found in zip(dtypes, await asyncio.gather(*answers, return_exceptions=True), strict=True):
        with context.record.case(f"llama {dtype}", row="tokens-cluster"):
            if isinstance(found, BaseException):
                raise found
            _compare(context, dtype, *found)


async def _serve(context: Context, dtype: torch.dtype) -> tuple[str, list[list[int]], list[list[int]], str]:
    """Serve random prompts. Returns the model's folder, the prompts, the answers and the cluster's metrics."""
    name = str(dtype).removeprefix("torch.")
    folder = str(context.work / f"cluster-{name}")
    shape = {**SHAPE, "num_hidden_layers": 2} if context.small else SHAPE
    make_model("llama", folder, seed=context.seed, std=GAIN / SHAPE["hidden_size"] ** 0.5, dtype=dtype, **shape)
    lengths = LENGTHS[:6] if context.small else LENGTHS
    prompts = [[context.draw.randrange(2, SHAPE["vocab_size"]) for _ in range(length)] for length in lengths]
    sampling = SamplingParams(temperature=0.0, max_tokens=12 if context.small else 48, ignore_eos=True)
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": folder, "dtype": name},
        "kv_pool": {"size_gib": 0.5, "verify": True},
        # All sizes are explicit: other groups use the rest of the device's memory.
        "prefill": {
            "token_budget": 64,
            "cache_blocks": 400,
            "batch_buffer_blocks": 130,
            "requests_buffer_blocks": 200,
        },
        "decode": {"cache_blocks": CACHE_BLOCKS, "join_iterations": 1},
        "scheduler": {"min_batch_requests": 4},
    }
    async with running(context, folder, name, **sections) as cell:
        answers = await cell.driver.generate(prompts, sampling, 70.0)
        await asyncio.sleep(REPORTED_S)
        metrics = (await cell.cluster.status()).metrics
    for answer in answers:
        if answer.error is not None:
            raise answer.error
    return folder, prompts, [answer.tokens for answer in answers], metrics


def _compare(
    context: Context,
    dtype: torch.dtype,
    folder: str,
    prompts: list[list[int]],
    answers: list[list[int]],
    metrics: str,
) -> None:
    reference: Any = load_reference(folder, dtype).to(context.device)  # type: ignore[arg-type]
    theirs = [greedy(reference, prompt, len(answer)) for prompt, answer in zip(prompts, answers, strict=True)]
    found = agreement(reference, prompts, answers, theirs)
    name = str(dtype).removeprefix("torch.")
    counted = {
        "evictions": value(metrics, "alignedserve_decode_evictions_total"),
        "checked_blocks": value(metrics, "alignedserve_kv_checksum_blocks_total"),
        "mismatched_blocks": value(metrics, "alignedserve_kv_checksum_mismatches_total"),
        "channels": sorted(set(re.findall(r'channel="([^"]+)"', metrics))),
    }
    equal = found.equal_answers / found.answers
    same = found.same_before / found.before if found.before else 0.0
    judged = equal if dtype == torch.float32 else same
    what = "answers equal" if dtype == torch.float32 else "tokens before rounding equal"
    context.record.figure(f"{name}, {what}", judged, "", row="tokens-cluster", wrong=found.wrong, **counted)
    if dtype != torch.float32:
        context.record.figure(f"{name}, share of tokens before it", found.share, "of tokens")
    if counted["mismatched_blocks"] or not counted["checked_blocks"]:
        raise ValueError(f"checksums: {counted}")
