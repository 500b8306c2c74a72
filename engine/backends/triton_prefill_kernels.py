# mypy: ignore-errors
"""The two Triton kernels of `triton_prefill`.

A program computes one tile: up to `tile_rows` rows of one span and one key head, over the keys of one piece. A row is
one token and one of the query heads that share the key head (`row = token * group + head`), so that grouped heads read
a key once. Keys lie in blocks `[layer][kv_head][k|v][token][head_dim]`, found through the span's block table.

`from __future__ import annotations` is left out: Triton's interpreter reads the annotations themselves.
"""

import triton
import triton.language as tl

TILE_COLUMNS = 8  # columns of the work table, in the order in which `prefill_tiles` reads them
MERGE_COLUMNS = 5  # columns of the table of split tiles, in the order in which `merge_pieces` reads them
MERGE_ROWS = 16  # rows that one program of `merge_pieces` merges


@triton.jit
def _over_keys(
    acc,
    top,
    total,
    query,
    position,
    keys,
    table,
    begin,
    end,
    limit,
    window,
    scale,
    softcap,
    block_stride: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    padded: tl.constexpr,
    tile_keys: tl.constexpr,
    masked: tl.constexpr,
    windowed: tl.constexpr,
    capped: tl.constexpr,
    upcast: tl.constexpr,
):
    """Attend to the keys `begin .. end - 1`. If masked, only to those that a row sees, and to none from `limit` on."""
    dims = tl.arange(0, padded)
    for first in range(begin, end, tile_keys):
        token = first + tl.arange(0, tile_keys)
        if masked:
            block = tl.load(table + token // block_size, mask=token < limit, other=0)
        else:
            block = tl.load(table + token // block_size)
        # 64 bits before the product: a block has millions of elements.
        row = block.to(tl.int64) * block_stride + (token % block_size) * head_dim
        at = keys + row[:, None] + dims[None, :]
        if masked:
            there = (token < limit)[:, None] & (dims < head_dim)[None, :]
            key = tl.load(at, mask=there, other=0.0)
            value = tl.load(at + block_size * head_dim, mask=there, other=0.0)
        elif head_dim != padded:
            there = (dims < head_dim)[None, :]
            key = tl.load(at, mask=there, other=0.0)
            value = tl.load(at + block_size * head_dim, mask=there, other=0.0)
        else:
            key = tl.load(at)
            value = tl.load(at + block_size * head_dim)
        if upcast:
            key = key.to(tl.float32)
            value = value.to(tl.float32)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if capped:
            # tanh from exp, which overflows to the correct limit
            scores = softcap - 2.0 * softcap / (tl.exp(scores * scale) + 1.0)
            scores = scores * 1.4426950408889634
        else:
            scores = scores * scale
        if masked:
            seen = (token[None, :] <= position[:, None]) & (token < limit)[None, :]
            if windowed:
                seen = seen & (token[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row may see no key of this tile
        else:
            new_top = tl.maximum(top, tl.max(scores, 1))
            base = new_top
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit
def prefill_tiles(
    query,
    cache,
    tables,
    work,
    sinks,
    out,
    lse,
    pieces,
    pieces_lse,
    layer_offset,
    query_token_stride,
    query_head_stride,
    out_token_stride,
    out_head_stride,
    window,
    scale,
    softcap,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    block_stride: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    padded: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
    columns: tl.constexpr,
    windowed: tl.constexpr,
    capped: tl.constexpr,
    upcast: tl.constexpr,
):
    """Grid `[kv_heads, tiles]`. A tile with a piece number writes its part to `pieces`, any other writes to `out`.

    `scale` gives scores in base 2; if capped, it is twice the scaling over the soft-cap. `layer_offset` is in elements,
    from the first element of a block.
    """
    line = work + tl.program_id(1) * columns
    kv_head = tl.program_id(0)
    span_begin = tl.load(line)  # packed row of the span's first token
    first_row = tl.load(line + 1)  # of this tile in the span
    rows = tl.load(line + 2)  # of the span
    start = tl.load(line + 3)  # tokens before the span
    begin = tl.load(line + 4)  # keys of this piece
    end = tl.load(line + 5)
    table = tables + tl.load(line + 6)
    piece = tl.load(line + 7)

    row = first_row + tl.arange(0, tile_rows)
    token = row // group
    position = start + token
    head = kv_head * group + row % group
    dims = tl.arange(0, padded)
    real = (row < rows)[:, None] & (dims < head_dim)[None, :]
    packed = (span_begin + token).to(tl.int64)
    at = packed * query_token_stride + head * query_head_stride
    q = tl.load(query + at[:, None] + dims[None, :], mask=real, other=0.0)
    if upcast:
        q = q.to(tl.float32)

    keys = cache + layer_offset + kv_head * (2 * block_size * head_dim)
    acc = tl.zeros([tile_rows, padded], dtype=tl.float32)
    top = tl.full([tile_rows], float("-inf"), dtype=tl.float32)
    total = tl.zeros([tile_rows], dtype=tl.float32)

    # Keys visible to all rows need no mask: up to the first row's position, and inside the last row's window.
    low = start + first_row // group
    high = start + (tl.minimum(first_row + tile_rows, rows) - 1) // group
    free_end = tl.maximum(tl.minimum(low + 1, end) // tile_keys * tile_keys, begin)
    free_begin = begin
    if windowed:
        outside = tl.maximum(high - window + 1, 0)
        free_begin = tl.maximum((outside + tile_keys - 1) // tile_keys * tile_keys, begin)
        free_begin = tl.minimum(free_begin, free_end)
        acc, top, total = _over_keys(
            acc, top, total, q, position, keys, table, begin, free_begin, end, window, scale, softcap,
            block_stride, block_size, head_dim, padded, tile_keys, True, windowed, capped, upcast,
        )  # fmt: skip
    acc, top, total = _over_keys(
        acc, top, total, q, position, keys, table, free_begin, free_end, end, window, scale, softcap,
        block_stride, block_size, head_dim, padded, tile_keys, False, windowed, capped, upcast,
    )  # fmt: skip
    acc, top, total = _over_keys(
        acc, top, total, q, position, keys, table, free_end, end, end, window, scale, softcap,
        block_stride, block_size, head_dim, padded, tile_keys, True, windowed, capped, upcast,
    )  # fmt: skip

    if piece >= 0:
        number = (piece * kv_heads + kv_head).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
        seen = tl.where(total == 0.0, 1.0, total)  # a row may see no key of this piece
        tl.store(pieces + number[:, None] * head_dim + dims[None, :], acc / seen[:, None], mask=real)
        tl.store(pieces_lse + number, top + tl.log2(total), mask=row < rows)
    else:
        if sinks is not None:
            sink = tl.load(sinks + head, mask=row < rows, other=0.0).to(tl.float32) * 1.4426950408889634
            new_top = tl.maximum(top, sink)
            shrink = tl.exp2(top - new_top)
            acc = acc * shrink[:, None]
            total = total * shrink + tl.exp2(sink - new_top)
            top = new_top
        at = packed * out_token_stride + head * out_head_stride
        tl.store(out + at[:, None] + dims[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=real)
        if lse is not None:
            at = packed * (kv_heads * group) + head
            tl.store(lse + at, (top + tl.log2(total)) * 0.6931471805599453, mask=row < rows)


@triton.jit
def merge_pieces(
    merges,
    sinks,
    out,
    lse,
    pieces,
    pieces_lse,
    out_token_stride,
    out_head_stride,
    tile_rows,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    padded: tl.constexpr,
    columns: tl.constexpr,
    merge_rows: tl.constexpr,
):
    """Grid `[kv_heads, split tiles, tile_rows // merge_rows]`: pieces, weighted by their log-sum-exp, to `out`."""
    line = merges + tl.program_id(1) * columns
    kv_head = tl.program_id(0)
    span_begin = tl.load(line)
    first_row = tl.load(line + 1)
    rows = tl.load(line + 2)
    first_piece = tl.load(line + 3)
    count = tl.load(line + 4)

    inside = tl.program_id(2) * merge_rows + tl.arange(0, merge_rows)
    row = first_row + inside
    head = kv_head * group + row % group
    dims = tl.arange(0, padded)
    real = (row < rows)[:, None] & (dims < head_dim)[None, :]

    acc = tl.zeros([merge_rows, padded], dtype=tl.float32)
    total = tl.zeros([merge_rows], dtype=tl.float32)
    top = tl.full([merge_rows], float("-inf"), dtype=tl.float32)
    if sinks is not None:
        top = tl.load(sinks + head, mask=row < rows, other=0.0).to(tl.float32) * 1.4426950408889634
        total = total + 1.0
    for piece in range(first_piece, first_piece + count):
        number = (piece * kv_heads + kv_head).to(tl.int64) * tile_rows + inside
        size = tl.load(pieces_lse + number, mask=row < rows, other=0.0)
        part = tl.load(pieces + number[:, None] * head_dim + dims[None, :], mask=real, other=0.0)
        new_top = tl.maximum(top, size)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row may see no key of the first pieces
        shrink = tl.exp2(top - base)
        weight = tl.exp2(size - base)
        acc = acc * shrink[:, None] + part * weight[:, None]
        total = total * shrink + weight
        top = new_top
    packed = (span_begin + row // group).to(tl.int64)
    at = packed * out_token_stride + head * out_head_stride
    tl.store(out + at[:, None] + dims[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=real)
    if lse is not None:
        at = packed * (kv_heads * group) + head
        tl.store(lse + at, (top + tl.log2(total)) * 0.6931471805599453, mask=row < rows)
