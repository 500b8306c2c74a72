"""Prefill of 8 prompts of 2048 tokens at 7B shapes, compared with the matrix-product rate."""

from __future__ import annotations

import gc
import statistics

import torch

from alignedserve.engine.runner import ForwardItem, allocate_cache
from gpu_suite.models import causal_attention_flops, linear_flops, random_model
from gpu_suite.offline import new_runner
from gpu_suite.rates import around, matrix_rate, release, seconds_of
from gpu_suite.record import Context

PROMPTS, TOKENS = 8, 2048
BLOCK_SIZE = 16


def run(context: Context) -> None:
    for name in ("llama-2-7b", "opt-6.7b"):
        with context.record.case(name, row="prefill"):
            _measure(context, name)
        gc.collect()
        release()


def _measure(context: Context, name: str) -> None:
    prompts, tokens, repeat = (2, 48, 2) if context.small else (PROMPTS, TOKENS, 7)
    loaded = random_model(name, context.device, small=context.small, dtype=torch.bfloat16, seed=context.seed)
    width = -(-tokens // BLOCK_SIZE)
    cache = allocate_cache(loaded.info.geometry(BLOCK_SIZE), prompts * width + 1, context.device)
    order = list(range(1, prompts * width + 1))
    context.draw.shuffle(order)
    vocab_size = loaded.info.vocab_size
    items = [
        ForwardItem(
            [context.draw.randrange(2, vocab_size) for _ in range(tokens)], 0, order[at * width : (at + 1) * width]
        )
        for at in range(prompts)
    ]
    runner = new_runner(loaded, cache)
    with around(lambda: matrix_rate(context.device)) as rate:
        seconds = seconds_of(lambda: runner.forward(items), context.device, repeat)
    linear = linear_flops(loaded) * prompts * tokens
    attention = causal_attention_flops(loaded, tokens) * prompts
    taken_s = statistics.median(seconds)
    context.record.figure(
        f"{name}, {prompts} x {tokens}",
        (linear + attention) / taken_s / rate.mean,
        "of the matrix-product rate",
        row="prefill",
        samples=seconds,
        linear_alone=linear / taken_s / rate.mean,
        attention_flops_share=attention / (linear + attention),
        tokens_per_s=prompts * tokens / taken_s,
        matrix_rate=rate.detail(),
    )
