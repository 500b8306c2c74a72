"""Compares greedy tokens of ModelRunner and its decode engine with `transformers` on the same device."""

from __future__ import annotations

import gc
import inspect
import os
import shutil
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import torch

from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.model.loader import LoadedModel, load_model
from alignedserve.engine.runner import allocate_cache
from alignedserve.model import resolve_model
from alignedserve.testing.models import KINDS, make_model
from alignedserve.testing.reference import load_reference
from alignedserve.text import Tokenizer
from gpu_suite.models import GAIN, random_model
from gpu_suite.offline import Job, Offline, decode_engine, new_runner
from gpu_suite.rates import release
from gpu_suite.record import Context
from gpu_suite.reference import Agreement, agreement, greedy

BLOCK_SIZE = 16
# A head size that the Triton kernels support, and a shape that fills several tiles of every kernel.
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
}
SMALL_KINDS = ("llama", "opt")


def run(context: Context) -> None:
    run_dtype(context, torch.float32)


def run_dtype(context: Context, dtype: torch.dtype) -> None:
    """Compare all models in one dtype, the largest first. Models are skipped, and recorded, when the time is over."""
    total, trained = Agreement(wrong=[]), Agreement(wrong=[])
    row, folder = _row(dtype), resolve_model("tiny")
    with context.record.case(f"medium {_name(dtype)}", row=row):
        _compare_medium(context, dtype, total)
    with context.record.case(f"tiny {_name(dtype)}", row=row):
        _compare_folder(context, str(folder), "tiny", dtype, trained, known_texts(folder))
    kinds, left_out = SMALL_KINDS if context.small else KINDS, []
    for kind in kinds:
        if context.time_left_s <= 0:
            left_out.append(kind)
            continue
        with context.record.case(f"{kind} {_name(dtype)}", row=row):
            _compare_kind(context, kind, dtype, total)
    if left_out:
        context.record.note("no time for these models", kinds=left_out)
    for name, found in (("random models", total), ("tiny, trained", trained)):
        if found.answers:
            report(context, row, f"{name}{f', {len(left_out)} left out' * bool(left_out)}", found, dtype)


def report(context: Context, row: str, name: str, found: Agreement, dtype: torch.dtype) -> None:
    """Record a row's figures: in fp32 the share of equal answers, otherwise of equal tokens before rounding matters."""
    detail = {"answers": found.answers, "tokens": found.tokens, "wrong": (found.wrong or [])[:20]}
    equal = found.equal_answers / found.answers
    if dtype == torch.float32:
        context.record.figure(f"{name}, answers equal (fp32)", equal, "of answers", row=row, met=equal == 1.0, **detail)
        return
    same = found.same_before / found.before if found.before else 0.0
    context.record.figure(
        f"{name}, equal before rounding ({_name(dtype)})", same, "of those tokens", row=row, met=same == 1.0, **detail
    )
    context.record.figure(f"{name}, share of tokens before it ({_name(dtype)})", found.share, "of tokens", row=row)
    context.record.figure(f"{name}, answers equal ({_name(dtype)})", equal, "of answers")


def _row(dtype: torch.dtype) -> str:
    return "tokens-fp32" if dtype == torch.float32 else "tokens-bf16"


def _name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def _compare_kind(context: Context, kind: str, dtype: torch.dtype, total: Agreement) -> None:
    deviation = GAIN / SHAPE["hidden_size"] ** 0.5
    folder = context.work / f"{kind}-{_name(dtype)}"
    make_model(kind, folder, seed=context.seed, std=deviation, dtype=dtype, **SHAPE)
    _compare_folder(context, str(folder), kind, dtype, total)


def known_texts(folder: Path) -> list[list[int]]:
    """Prompts from texts that the tiny model has learnt, so that its best two logits are mostly far apart."""
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    known = (os.path.join, shutil.copytree, textwrap.dedent, subprocess.run, inspect.getdoc, os.walk)
    texts = [f"{one.__module__}.{one.__name__}{inspect.signature(one)}\n\n{inspect.getdoc(one)}" for one in known]
    return [tokenizer.encode(text[: len(text) * 2 // 3])[:400] for text in texts]


def _compare_folder(
    context: Context,
    folder: str,
    name: str,
    dtype: torch.dtype,
    total: Agreement,
    prompts: list[list[int]] | None = None,
) -> None:
    device = context.device
    info = inspect_model(name, folder, str(dtype).removeprefix("torch."), device)
    loaded = load_model(info, device)
    reference: Any = load_reference(info.path, dtype).to(device)  # type: ignore[arg-type]
    _compare(context, name, loaded, reference, total, prompts)


def _compare_medium(context: Context, dtype: torch.dtype, total: Agreement) -> None:
    loaded = random_model("medium", context.device, small=context.small, dtype=dtype, seed=context.seed)
    # A second copy, since parts of the served one may be compiled.
    reference: Any = random_model("medium", context.device, small=context.small, dtype=dtype, seed=context.seed).model
    reference.set_attn_implementation("sdpa")
    _compare(context, "medium", loaded, reference, total)
    del loaded, reference
    gc.collect()
    release()


def _compare(
    context: Context,
    name: str,
    loaded: LoadedModel,
    reference: Any,
    total: Agreement,
    prompts: list[list[int]] | None = None,
) -> None:
    """Compare `loaded` with `reference`, the same weights in transformers. `prompts`: random by default."""
    vocab_size, new_tokens = loaded.info.vocab_size, 8 if context.small else 32
    if prompts is None:
        lengths = [3, 21] if context.small else [1, 17, 64, 150, 333, 500]
        prompts = [[context.draw.randrange(2, vocab_size) for _ in range(length)] for length in lengths]
    elif context.small:
        prompts = prompts[:2]
    blocks = sum(-(-(len(prompt) + new_tokens) // BLOCK_SIZE) for prompt in prompts) + 1
    cache = allocate_cache(loaded.info.geometry(BLOCK_SIZE), blocks, context.device)
    runner = new_runner(loaded, cache)
    engine = decode_engine(runner, len(prompts), compiles=name == "medium")  # compiling for each kind takes minutes
    cache.fill_(float("nan"))  # detects reads of unwritten memory
    jobs = [Job(prompt, new_tokens) for prompt in prompts]
    Offline(runner, engine, chunk_tokens=48, seed=context.seed).run(jobs)
    theirs = [greedy(reference, prompt, new_tokens) for prompt in prompts]
    found = agreement(reference, prompts, [job.tokens for job in jobs], theirs)
    total.add(found)
    context.record.note(
        name,
        answers=found.answers,
        equal=found.equal_answers,
        share_before_rounding=found.share,
        wrong=found.wrong,
        different_tokens=found.varied,
    )
    if found.varied < 3:
        raise ValueError(f"{name}: only {found.varied} different tokens: nothing was shown")
