"""Prompts that begin alike: attention over what they share once for all, and first tokens with a prefix cache."""

from __future__ import annotations

import asyncio
import math
import statistics
import time

import torch

from alignedserve.engine.backends.base import AttentionOptions
from alignedserve.engine.backends.triton_backend import TritonBackend
from alignedserve.engine.batch import ForwardItem, PackedBatch, build_batch
from alignedserve.request import SamplingParams
from gpu_suite.kernel_bench import BLOCK_SIZE
from gpu_suite.offline import fill
from gpu_suite.rates import release, seconds_of
from gpu_suite.record import Context
from gpu_suite.serving import Cell, medium_model, pool_gib, running

REQUESTS, SHARED, OWN = 32, 2000, 100
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 8, 128, 8
ERROR = 1e-2  # of bf16
PROMPTS = 12


def run(context: Context) -> None:
    shared, own = (32, 5) if context.small else (SHARED, OWN)
    cases = {"decode": (1, shared), "prefill": (own, shared), "decode, nothing shared": (1, 0)}
    for name, (new, alike) in cases.items():
        with context.record.case(name, row="prefix-attention"):
            _attention(context, name, new, alike, shared + own - alike)
        release()
    with context.record.case("first tokens", row="prefix-ttft"):
        asyncio.run(_first_tokens(context))


def _attention(context: Context, name: str, new: int, shared: int, own: int) -> None:
    """Time passes that compute `new` tokens of each request, by turns with shared blocks read once and each time."""
    requests, layers, repeat = (3, 1, 1) if context.small else (REQUESTS, LAYERS, 30)
    heads, kv_heads, head_dim = (4, 1, 32) if context.small else (HEADS, KV_HEADS, HEAD_DIM)
    common = shared // BLOCK_SIZE
    each = -(-(shared + own) // BLOCK_SIZE) - common
    items = [
        ForwardItem([1] * new, shared + own - new, [*range(common), *range(first, first + each)])
        for first in range(common, common + requests * each, each)
    ]
    blocks = common + requests * each
    dtype = torch.bfloat16 if context.on_gpu else torch.float16  # the interpreter is slow in bf16
    cache = torch.empty(blocks, layers, kv_heads, 2, BLOCK_SIZE, head_dim, dtype=dtype, device=context.device)
    fill(cache, context.seed)
    batch = build_batch(items, BLOCK_SIZE, blocks, torch.device(context.device))
    query, key, value = (
        torch.randn(batch.tokens, count, head_dim, device=context.device).to(dtype)
        for count in (heads, kv_heads, kv_heads)
    )
    options = AttentionOptions(head_dim**-0.5)

    def one_pass(backend: TritonBackend, batch: PackedBatch) -> torch.Tensor:
        backend.begin(batch)
        for layer in range(layers):
            out = backend.attend(layer, query, key, value, options)
        return out

    backends = {"plain": TritonBackend(cache), "shared": TritonBackend(cache)}
    backends["plain"].least_saved_bytes = math.inf
    if context.small:
        backends["shared"].least_saved_bytes = 0.0
    outs = {which: one_pass(backend, batch).float() for which, backend in backends.items()}
    error = float((outs["plain"] - outs["shared"]).abs().max())
    if not error <= ERROR:
        raise ValueError(f"attention over shared blocks differs by {error}")
    taken: dict[str, list[float]] = {which: [] for which in backends}
    for turn in ("plain", "shared", "shared", "plain"):
        taken[turn] += seconds_of(lambda turn=turn: one_pass(backends[turn], batch), context.device, repeat)
    plain_s, shared_s = (statistics.median(taken[which]) for which in ("plain", "shared"))
    detail = {"plain_s": plain_s, "shared_s": shared_s, "layers": layers, "error": error}
    context.record.figure(f"{name}, plain over shared", plain_s / shared_s, "x", row="prefix-attention", **detail)


async def _first_tokens(context: Context) -> None:
    """Prompts one after the other: by turns one whose beginning is cached, and one of the same length that is new."""
    system, own = (64, 8) if context.small else (SHARED, 50)
    sections = {
        "kv_pool": {"size_gib": 0.25 if context.small else pool_gib(1), "prefix_cache": True},
        "prefill": {"cache_blocks": 600, "batch_buffer_blocks": 600, "requests_buffer_blocks": 600},
        "decode": {"cache_blocks": 600},
    }
    beginning = _tokens(context, system)
    async with running(context, str(medium_model(context)), "prefixes", **sections) as cell:
        await _first_s(cell, beginning + _tokens(context, own), 0)
        await _first_s(cell, _tokens(context, system + own), 0)
        found: dict[str, list[float]] = {"cached": [], "new": []}
        for _ in range(3 if context.small else PROMPTS):
            least = system // BLOCK_SIZE * BLOCK_SIZE
            found["cached"].append(await _first_s(cell, beginning + _tokens(context, own), least))
            found["new"].append(await _first_s(cell, _tokens(context, system + own), 0))
    cached_s, new_s = (statistics.median(found[which]) for which in ("cached", "new"))
    name = f"time to first token, {system} of {system + own} tokens cached, over none"
    context.record.figure(name, cached_s / new_s, "x", row="prefix-ttft", cached_s=cached_s, new_s=new_s)


async def _first_s(cell: Cell, prompt: list[int], least_cached: int) -> float:
    """Seconds to the first token. Raises ValueError if fewer than `least_cached` tokens were cached."""
    begun_s = time.monotonic()
    (answer,) = cell.driver.submit(prompt, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    await cell.driver.wait([answer], 40.0)
    if answer.error is not None:
        raise answer.error
    if answer.cached_tokens < least_cached:
        raise ValueError(f"{answer.cached_tokens} tokens were cached, not {least_cached}")
    return answer.times_s[0] - begun_s


def _tokens(context: Context, count: int) -> list[int]:
    return [context.draw.randrange(2, 500) for _ in range(count)]
