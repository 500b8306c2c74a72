"""The rows of the result table: those of issue 6's table and of its paragraph "Right first"."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

_COMPARE: dict[str, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le}


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table. `limit` is checked for figures recorded without `met`; None: they are only reported."""

    key: str
    group: str
    what: str
    bound: str
    limit: tuple[str, float] | None = None

    @property
    def command(self) -> str:
        return f"benchmarks/gpu/run.sh --only {self.group}"

    def met(self, value: float) -> bool | None:
        """Whether `value` keeps the limit; None without a limit."""
        if self.limit is None:
            return None
        sign, limit = self.limit
        return _COMPARE[sign](value, limit)  # False for NaN


ROWS = (
    Row(
        "kernels",
        "kernels",
        "every attention kernel against fp64 attention on fresh random inputs: ragged lengths, poisoned unused blocks "
        "and outputs",
        "error ≤ 1e-2 in bf16, ≤ 2e-3 in fp16",
    ),
    Row("gpu-tests", "kernels", "tests marked `gpu`", "all pass", (">=", 1.0)),
    Row(
        "tokens-fp32",
        "tokens",
        "greedy tokens of the GPU engine against `transformers` on the same GPU, fp32",
        "equal",
        (">=", 1.0),
    ),
    Row(
        "tokens-bf16",
        "tokens_bf16",
        "the same in bf16: equal up to the first position whose best two logits lie within rounding; share of tokens "
        "before it",
        "equal before it; aim 99 %",
    ),
    Row(
        "tokens-cluster",
        "cluster",
        "the same through a whole cluster of plain processes on the GPU",
        "fp32 equal; bf16 as above",
        (">=", 1.0),
    ),
    Row(
        "tokens-ranks",
        "ranks",
        "the same of instances of ranks that share each layer, of stages, of ranks that share experts, and of two "
        "instances of unequal degrees, each rank with KV of its own, fp32",
        "equal",
        (">=", 1.0),
    ),
    Row(
        "transfers",
        "transfers",
        "10,000 hand-overs through every channel, with checksums",
        "no mismatch",
        ("<=", 0.0),
    ),
    Row(
        "attention",
        "attention",
        "decode attention kernel, bytes read over time against the measured device copy rate (read plus written "
        "bytes): batch 64, 32 heads, head size 128, lengths 1k, and the paper's mixes",
        "≥ 80 %",
        (">=", 0.80),
    ),
    Row(
        "attention-mixes",
        "attention",
        "the paper's mixes (60 short and 4 of 4096; 10 to 3790) against equal lengths with the same bytes",
        "within 5 % or 5 µs",
    ),
    Row(
        "iteration",
        "iteration",
        "whole decode iteration, Llama-2-7B and OPT-6.7B shapes in bf16 with random weights, batch 64 at 1k: "
        "(weights + KV bytes) / copy rate against measured time",
        "≥ 75 %",
        (">=", 0.75),
    ),
    Row("idle", "iteration", "time the GPU idles between iterations at batch 64", "≤ 2 %", ("<=", 0.02)),
    Row(
        "prefill",
        "prefill",
        "prefill of 8 × 2048 tokens, same models, against the measured matrix-product rate",
        "≥ 60 %",
        (">=", 0.60),
    ),
    Row(
        "throughput",
        "throughput",
        "our engine's output tokens per second over `transformers`' `generate_batch`, 256 ShareGPT-like requests, "
        "same weights and dtype",
        "≥ 2 ×",
        (">=", 2.0),
    ),
    Row(
        "pool-copies",
        "pool",
        "page-locked pool to HBM and back, 1 GiB in blocks, against one large copy",
        "≥ 90 %",
        (">=", 0.90),
    ),
    Row(
        "device-ipc",
        "device",
        "HBM to HBM of another process through CUDA IPC, against a device copy",
        "≥ 80 %",
        (">=", 0.80),
    ),
    Row(
        "device-nccl",
        "device",
        "HBM to HBM of another process through NCCL (two ranks on one GPU with `NCCL_MULTI_RANK_GPU_ENABLE=1` where "
        "that is all there is), against a device copy",
        "reported",
    ),
    Row(
        "handover",
        "handover",
        "hand-over of a 2k-token request beyond its copy time, batch running",
        "≤ 5 ms",
        ("<=", 0.005),
    ),
    Row(
        "policies",
        "policies",
        "`aligned` over `fcfs` with the flash-attn or `no_split` kernel and with the split one, mixed lengths, one "
        "prefill and one decode process sharing the GPU, with the bubble metric beside it",
        "reported",
    ),
    Row(
        "prefix-attention",
        "prefixes",
        "attention of 32 requests that share 2,000 tokens, blocks read for each of them over read once for all",
        "reported",
    ),
    Row(
        "prefix-ttft",
        "prefixes",
        "time to first token with 2,000 of 2,050 tokens in the prefix cache over none",
        "≤ 0.2",
        ("<=", 0.2),
    ),
    Row(
        "rank-times",
        "rank_times",
        "iterations and prompts of a medium Llama in bf16 by tensor parallel ranks and by stages, on a GPU each or on "
        "shared ones, over those of one rank",
        "reported",
    ),
    Row(
        "rank-copies",
        "rank_times",
        "copies of KV between instances of unequal degrees over those of the same blocks from 2 ranks to 2",
        "≤ 1.3",
        ("<=", 1.3),
    ),
    Row(
        "bandwidth",
        "bandwidth",
        "bandwidth that one thread block reaches alone, and 2, 4 … all SMs together (the constant of `no_split`)",
        "reported; goes into the cost model",
    ),
    Row(
        "profile",
        "profile",
        "`alignedserve profile` on the GPU, whose JSON the scheduler and the simulator read",
        "under a minute",
        ("<=", 60.0),
    ),
)

BY_KEY = {row.key: row for row in ROWS}
