"""`Sampler`'s draw (temperature, top_k, top_p, min_p) in one kernel of fixed shapes, for a graph.

Each row has a thread block, so that loops may be as long as the row's settings require. Whether top_p keeps one token
or all of them, no draw is left for outside of the graph (`drawing_kernel`).

Noise, ties and the order of the filters are those of `engine.sampling`. Exponentials and logarithms are the GPU's own,
so a token can differ from the Sampler's if two scores, or a sum and the limit of top_p, are within their rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from alignedserve.engine.graphs.drawing_kernel import draw_kernel

_BLOCK = 4096  # tokens of the vocabulary at a time


@dataclass(frozen=True, slots=True)
class DrawColumns:
    """How each row draws, `[rows]` each, on the device. No token is drawn for rows of temperature 0."""

    temperature: torch.Tensor  # fp32
    min_p: torch.Tensor  # fp32: its logarithm; -inf for none
    top_p: torch.Tensor  # fp64; 1 for none
    top_k: torch.Tensor  # int32; 0 for none
    first_key: torch.Tensor  # int32: see `noise.row_keys`
    second_key: torch.Tensor  # int32


@torch.library.custom_op("alignedserve::draw", mutates_args=("chosen",))
def _draw(
    logits: torch.Tensor,
    top: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor,
    first_key: torch.Tensor,
    second_key: torch.Tensor,
    chosen: torch.Tensor,
) -> None:
    rows, vocab_size = logits.shape
    block = min(_BLOCK, triton.next_power_of_2(vocab_size))
    draw_kernel[(rows,)](
        logits,
        logits.stride(0),
        vocab_size,
        top,
        temperature,
        min_p,
        top_p,
        top_k,
        first_key,
        second_key,
        chosen,
        block=block,
        num_warps=8,
    )


def draw(logits: torch.Tensor, top: torch.Tensor, columns: DrawColumns, chosen: torch.Tensor) -> None:
    """Overwrite `chosen` (int64 `[rows]`) for each row that draws; reads nothing on the host.

    `logits`: fp32 `[rows, vocab_size]`, with contiguous rows. `top`: fp32 `[rows]`, the largest of each. A row with NaN
    or infinite logits gets a meaningless token.
    """
    _draw(
        logits,
        top,
        columns.temperature,
        columns.min_p,
        columns.top_p,
        columns.top_k,
        columns.first_key,
        columns.second_key,
        chosen,
    )
