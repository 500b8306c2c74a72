# mypy: ignore-errors
"""The Triton kernel of `triton_shared`.

`from __future__ import annotations` is left out: Triton's interpreter reads the annotations themselves.
"""

import triton
import triton.language as tl

_HEADS = tl.constexpr(16)  # that a program merges at a time


@triton.jit(do_not_specialize=["heads"])
def merge_shared(out, lse, part, part_lse, rows, heads, head_dim: tl.constexpr, padded: tl.constexpr):
    """Grid `[stacked rows]`: `out` of packed token `rows[row]` becomes its merger with `part` of the row.

    All are fp32 and contiguous. `lse` and `part_lse` are natural logarithms; both are finite.
    """
    row = tl.program_id(0)
    packed = tl.load(rows + row)
    dims = tl.arange(0, padded)
    for first in range(0, heads, _HEADS):
        head = first + tl.arange(0, _HEADS)
        live = head < heads
        at = packed * heads + head
        other = row.to(tl.int64) * heads + head
        mask = live[:, None] & (dims < head_dim)[None, :]
        own = tl.load(out + at[:, None] * head_dim + dims[None, :], mask=mask, other=0.0)
        shared = tl.load(part + other[:, None] * head_dim + dims[None, :], mask=mask, other=0.0)
        less = tl.load(lse + at, mask=live, other=0.0) - tl.load(part_lse + other, mask=live, other=0.0)
        weight = 1.0 / (1.0 + tl.exp(less))
        tl.store(out + at[:, None] * head_dim + dims[None, :], own + (shared - own) * weight[:, None], mask=mask)
