# mypy: ignore-errors
"""The Triton kernel that stores new keys and values in blocks; `triton_write` calls it.

`from __future__ import annotations` is left out: Triton's interpreter reads the annotations themselves.
"""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["layer", "table_stride"],
    do_not_specialize_on_alignment=["slot_block", "slot_offset", "lengths", "table"],
)
def write_kernel(
    key, value, cache, slot_block, slot_offset, lengths, table, key_token_stride, key_head_stride,
    value_token_stride, value_head_stride, block_stride, table_stride, layer,
    kv_heads: tl.constexpr, head_dim: tl.constexpr, dim_pad: tl.constexpr, block_size: tl.constexpr,
    heads_at_once: tl.constexpr,
):  # fmt: skip
    """Token `program_id(0)`, `heads_at_once` of its KV heads.

    Its slot is given, or is the last one of its length (`lengths` and `table`); a row of length 0 has none.
    """
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * heads_at_once + tl.arange(0, heads_at_once)
    dims = tl.arange(0, dim_pad)
    there = heads < kv_heads
    if lengths is None:
        block = tl.load(slot_block + token)
        offset = tl.load(slot_offset + token)
    else:
        length = tl.load(lengths + token)
        last = tl.maximum(length - 1, 0)
        block = tl.load(table + token * table_stride + last // block_size, mask=length > 0, other=0)
        offset = last % block_size
        there = there & (length > 0)
    mask = there[:, None] & (dims < head_dim)[None, :]
    rows = (layer * kv_heads + heads) * (2 * block_size) + offset
    target = cache + block.to(tl.int64) * block_stride + rows[:, None] * head_dim + dims[None, :]
    keys = key + token * key_token_stride + heads[:, None] * key_head_stride + dims[None, :]
    tl.store(target, tl.load(keys, mask=mask), mask=mask)
    values = value + token * value_token_stride + heads[:, None] * value_head_stride + dims[None, :]
    tl.store(target + block_size * head_dim, tl.load(values, mask=mask), mask=mask)
