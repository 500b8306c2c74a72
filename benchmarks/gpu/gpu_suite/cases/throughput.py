"""Output tokens a second of our engine and of transformers' continuous batching on 256 ShareGPT-like requests.

Both run in one process on the same weights. Transformers runs the manager of `generate_batch`, warmed up, but with a
token limit for each request: `generate_batch` has one limit for all.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

from alignedserve.engine import attention
from alignedserve.engine.model.loader import LoadedModel
from alignedserve.engine.runner import allocate_cache
from gpu_suite.models import random_model
from gpu_suite.offline import Job, Offline, decode_engine, new_runner
from gpu_suite.rates import release, synchronize
from gpu_suite.record import Context
from gpu_suite.requests import draw_lengths

REQUESTS = 256
MODEL = "medium"  # with a 7B model transformers alone would take most of a call
THEIRS_S = 40.0  # time limit; requests not finished by then count as finished, so the ratio is a lower bound
OURS_S = 25.0  # of the group's time, reserved for our engine including its start
BLOCK_SIZE = 16


def run(context: Context) -> None:
    count, scale = (6, 0.02) if context.small else (REQUESTS, 1.0)
    loaded = random_model(MODEL, context.device, small=context.small, dtype=torch.bfloat16, seed=context.seed)
    vocab_size = loaded.info.vocab_size
    jobs = [
        Job([context.draw.randrange(2, vocab_size) for _ in range(one.prompt)], one.answer)
        for one in draw_lengths(count, context.seed, scale)
    ]
    tokens = sum(job.new_tokens for job in jobs)
    ours_s = theirs_s = 0.0
    answers: dict[int, list[int]] = {}
    # Transformers first: our engine may compile parts of the model.
    with context.record.case("generate_batch", row="throughput"):
        theirs_s, answers = _theirs(context, loaded, jobs)
        at_most = "" if len(answers) == len(jobs) else ", at most"
        context.record.figure(
            f"transformers{at_most}", tokens / theirs_s, "tokens/s", seconds=theirs_s, answered=len(answers)
        )
    gc.collect()
    release()
    with context.record.case("our engine", row="throughput"):
        loaded.model.set_attn_implementation(attention.SERVING)
        ours_s = _ours(context, loaded, jobs)
        same = sum(jobs[number].tokens == answer for number, answer in answers.items())
        context.record.figure(
            "our engine",
            tokens / ours_s,
            "tokens/s",
            seconds=ours_s,
            output_tokens=tokens,
            answers_equal=same / max(1, len(answers)),
        )
    if ours_s and theirs_s:
        context.record.figure(
            f"{count} requests, ours over transformers'{'' if len(answers) == len(jobs) else ', at least'}",
            theirs_s / ours_s,
            "x",
            row="throughput",
            prompt_tokens=sum(len(job.prompt) for job in jobs),
            output_tokens=tokens,
        )


def _ours(context: Context, loaded: LoadedModel, jobs: Sequence[Job]) -> float:
    """Seconds of all jobs, after a warm-up that creates graphs and kernels."""
    geometry = loaded.info.geometry(BLOCK_SIZE)
    wanted = 1 + sum(geometry.blocks_for(len(job.prompt) + job.new_tokens) for job in jobs)
    if context.on_gpu:
        wanted = min(wanted, int(torch.cuda.mem_get_info()[0] * 0.8) // geometry.block_bytes)
    runner = new_runner(loaded, allocate_cache(geometry, wanted, context.device))
    engine = decode_engine(runner, len(jobs))
    warm = [Job(list(job.prompt), min(4, job.new_tokens)) for job in jobs[: max(4, len(jobs) // 8)]]
    Offline(runner, engine, seed=context.seed).run(warm)
    synchronize(context.device)
    begun_s = time.perf_counter()
    Offline(runner, engine, seed=context.seed).run(jobs)
    synchronize(context.device)
    return time.perf_counter() - begun_s


def _theirs(context: Context, loaded: LoadedModel, jobs: Sequence[Job]) -> tuple[float, dict[int, list[int]]]:
    """Seconds, and the finished answers by job number."""
    model: Any = loaded.model
    model.set_attn_implementation("sdpa")
    longest = max(job.new_tokens for job in jobs)
    settings = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=longest)
    hints = WorkloadHints(max(len(job.prompt) for job in jobs), longest, len(jobs))
    # On a GPU use the sizes that generate_batch chooses. On a CPU its cache would take most of the memory.
    sizes = None if context.on_gpu else ContinuousBatchingConfig(block_size=16, num_blocks=64, max_batch_tokens=64)
    manager_of = model.continuous_batching_context_manager(
        generation_config=settings,
        continuous_batching_config=sizes,
        block=True,
        timeout=5,
        workload_hints=hints,
        warmup=context.on_gpu,
    )
    with torch.no_grad(), manager_of as manager:
        _collect(manager, {"warm": jobs[0].prompt}, {"warm": 4}, THEIRS_S)
        synchronize(context.device)
        begun_s = time.perf_counter()
        named = {f"r{number}": job for number, job in enumerate(jobs)}
        found = _collect(
            manager,
            {name: job.prompt for name, job in named.items()},
            {name: job.new_tokens for name, job in named.items()},
            min(THEIRS_S, max(5.0, context.time_left_s - OURS_S)),
        )
        seconds = time.perf_counter() - begun_s
        if len(found) < len(jobs):  # otherwise leaving the context waits for all answers
            manager.stop(block=True, timeout=10.0, hard_stop=True)
    return seconds, {number: found[f"r{number}"] for number in range(len(jobs)) if f"r{number}" in found}


def _collect(
    manager: Any, prompts: dict[str, list[int]], new_tokens: dict[str, int], limit_s: float
) -> dict[str, list[int]]:
    """Submit all and wait, at most `limit_s`. Raises RuntimeError if one fails or the manager ends."""
    for name, prompt in prompts.items():
        manager.add_request(prompt, request_id=name, max_new_tokens=new_tokens[name], eos_token_id=-1)
    found: dict[str, list[int]] = {}
    ends_s = time.monotonic() + limit_s
    while len(found) < len(prompts) and time.monotonic() < ends_s:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError(f"transformers' manager ended with {len(found)} of {len(prompts)} answers")
        elif result.error is not None:
            raise RuntimeError(f"transformers could not answer {result.request_id}: {result.error}")
        elif result.is_finished():
            found[result.request_id] = list(result.generated_tokens)
    short = [name for name, tokens in found.items() if len(tokens) != new_tokens[name]]
    if short:
        raise RuntimeError(f"transformers gave another number of tokens than asked for: {short[:5]}")
    return found
