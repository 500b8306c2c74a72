"""Packed, chunked and paged execution matches `transformers`: tokens exactly, logits within 1e-4, in fp32."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.model.loader import load_model
from alignedserve.engine.runner import ForwardItem, ModelRunner, allocate_cache
from alignedserve.engine.sampling.sampler import Sampler, SampleRow
from alignedserve.request import SamplingParams
from alignedserve.testing.models import KINDS, MAX_POSITIONS, VOCAB_SIZE, make_model

PROMPT_LENGTHS = (1, 2, 31, 48, 300)
NEW_TOKENS = 6
CHUNK_BUDGET = 70
TOLERANCE = 1e-4


@dataclass
class Served:
    """A request of the small scheduler below."""

    prompt: list[int]
    block_ids: list[int]
    starts_at: int
    done: int = 0
    output: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


def serve(runner: ModelRunner, prompts: list[list[int]], *, seed: int) -> list[Served]:
    """Serve `prompts` together in shuffled blocks: prompt chunks and decode rows share passes. Requests arrive one
    after another, so that each joins a running batch."""
    draw = random.Random(seed)
    free = list(range(runner.cache.shape[0]))
    draw.shuffle(free)
    needed = [-(-(len(prompt) + NEW_TOKENS) // runner.block_size) for prompt in prompts]
    requests = [
        Served(prompt, [free.pop() for _ in range(count)], starts_at=index)
        for index, (prompt, count) in enumerate(zip(prompts, needed, strict=True))
    ]
    step = 0
    while any(len(request.output) < NEW_TOKENS for request in requests):
        step_items(runner, [r for r in requests if r.starts_at <= step and len(r.output) < NEW_TOKENS], draw)
        step += 1
    return requests


def step_items(runner: ModelRunner, running: list[Served], draw: random.Random) -> None:
    items: list[ForwardItem] = []
    ends: list[Served] = []
    budget = CHUNK_BUDGET
    for request in running:
        tokens = request.prompt + request.output
        count = min(len(tokens) - request.done, budget, draw.randint(1, CHUNK_BUDGET))
        if count == 0:
            continue
        budget -= count
        last = request.done + count == len(tokens)
        items.append(
            ForwardItem(
                tokens[request.done : request.done + count], request.done, request.block_ids, "last" if last else "none"
            )
        )
        request.done += count
        if last:
            ends.append(request)
    logits = runner.forward(items)
    sampled = Sampler().sample(logits, [SampleRow(SamplingParams(temperature=0.0), r.prompt, r.output) for r in ends])
    for request, token, row in zip(ends, sampled, logits, strict=True):
        request.output.append(token.token_id)
        request.logits.append(row)


def open_runner(folder: Path, *, dtype: str = "float32", block_size: int = 16) -> ModelRunner:
    info = inspect_model("test", folder, dtype, "cpu")
    cache = allocate_cache(info.geometry(block_size), 600 // block_size, "cpu")
    cache.fill_(float("nan"))  # unwritten memory must not affect a result
    return ModelRunner(load_model(info, "cpu"), cache)


def prompts_of(lengths: tuple[int, ...], seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def assert_matches_transformers(folder: Path, requests: list[Served]) -> None:
    # Eager: Gemma 2's default (sdpa) silently omits its softcap, at least up to transformers 5.17.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for request in requests:
        generated = model.generate(
            torch.tensor([request.prompt]),
            attention_mask=torch.ones(1, len(request.prompt), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=[],
        )
        assert request.output == generated[0, len(request.prompt) :].tolist()
        with torch.inference_mode():
            whole = model(torch.tensor([request.prompt + request.output])).logits[0]
        expected = whole[len(request.prompt) - 1 : -1]
        torch.testing.assert_close(torch.stack(request.logits), expected, rtol=0.0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_served_together_in_chunks_equals_generate(kind: str, tmp_path: Path) -> None:
    folder = make_model(kind, tmp_path, seed=11)
    requests = serve(open_runner(folder), prompts_of(PROMPT_LENGTHS, seed=5), seed=7)
    assert_matches_transformers(folder, requests)


ODD_SHAPES: list[dict[str, Any]] = [
    {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8},
    {"hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 12},
    {"hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 20},
    {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 80},
]


@pytest.mark.parametrize("shape", ODD_SHAPES, ids=lambda shape: f"{shape['num_attention_heads']}x{shape['head_dim']}")
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_odd_head_shapes_equal_generate(kind: str, shape: dict[str, Any], tmp_path: Path) -> None:
    folder = make_model(kind, tmp_path, seed=3, **shape)
    requests = serve(open_runner(folder, block_size=8), prompts_of((1, 9, 77), seed=6), seed=8)
    assert_matches_transformers(folder, requests)


def test_block_size_of_one_token_equals_generate(tmp_path: Path) -> None:
    folder = make_model("mistral", tmp_path, seed=4)
    requests = serve(open_runner(folder, block_size=1), prompts_of((1, 40, 65), seed=1), seed=2)
    assert_matches_transformers(folder, requests)


def test_last_position_of_the_model_can_be_computed(tmp_path: Path) -> None:
    folder = make_model("opt", tmp_path, seed=4)
    runner = open_runner(folder)
    tokens = prompts_of((MAX_POSITIONS,), seed=1)[0]
    blocks = list(range(MAX_POSITIONS // 16))
    runner.forward([ForwardItem(tokens[:-1], 0, blocks, "none")])
    found = runner.forward([ForwardItem(tokens[-1:], MAX_POSITIONS - 1, blocks)])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        torch.testing.assert_close(found, model(torch.tensor([tokens])).logits[0, -1:], rtol=0.0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mixtral", "gpt2", "gpt_oss"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_stays_within_rounding(kind: str, dtype: str, tmp_path: Path) -> None:
    folder = make_model(kind, tmp_path, seed=9)
    runner = open_runner(folder, dtype=dtype)
    tokens = prompts_of((60,), seed=3)[0]
    served = [runner.forward([ForwardItem(tokens[:40], 0, [5, 1, 7, 3], "all")])]
    served += [runner.forward([ForwardItem(tokens[i : i + 1], i, [5, 1, 7, 3])]) for i in range(40, 60)]
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    low = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    with torch.inference_mode():
        expected = exact(torch.tensor([tokens])).logits[0]
        theirs = low(torch.tensor([tokens])).logits[0].float()
    ours = (torch.cat(served) - expected).square().mean(-1).sqrt().median()
    reference = (theirs - expected).square().mean(-1).sqrt().median()
    assert ours <= 1.5 * reference
