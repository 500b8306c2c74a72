# mypy: ignore-errors
"""Triton kernels of paged decode attention, called and specified by `triton_decode`.

Work is counted in tiles of `tile` tokens. A row is one request's KV head. Rows lie end to end, a request's heads one
after another, and each has at least one tile. A plan has an entry for each program, and one after the last, of four
int32: the first tile of its share, and the request, the KV head and the tile of that row where the share begins.

Scores are kept in base 2 (the chip has `exp2`). `from __future__ import annotations` is left out: Triton's interpreter
reads the annotations themselves.
"""

import triton
import triton.language as tl

# The maximum of no scores: finite, so that differences are not NaN.
_FLOOR = tl.constexpr(-1e30)
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_ROWS = tl.constexpr(512)  # lengths that a program of `plan_kernel` reads at a time
_PARTS = tl.constexpr(16)  # partial results that a program merges at a time


@triton.jit
def _first_tile(length, window, tile: tl.constexpr):
    """The first tile of a request inside the window."""
    return tl.maximum(length - window, 0) // tile


@triton.jit
def _tiles(length, window, tile: tl.constexpr):
    """Number of tiles of each of a request's rows; a row of padding has one, so that its output is written too."""
    return tl.maximum((length + tile - 1) // tile - _first_tile(length, window, tile), 1)


@triton.jit(do_not_specialize=["rows", "window", "programs"], do_not_specialize_on_alignment=["lengths"])
def plan_kernel(lengths, plan, rows, window, programs, kv_heads: tl.constexpr, tile: tl.constexpr):
    """Write entry `program_id` of the plan: equal shares of all tiles, the first `total % programs` one tile longer."""
    program = tl.program_id(0)
    lanes = tl.arange(0, _ROWS)
    counted = tl.zeros([_ROWS], tl.int32)
    for first in range(0, rows, _ROWS):
        length = tl.load(lengths + first + lanes, mask=first + lanes < rows, other=0)
        counted += tl.where(first + lanes < rows, _tiles(length, window, tile), 0)
    total = tl.sum(counted, 0) * kv_heads
    begin = program * (total // programs) + tl.minimum(program, total % programs)
    request = 0
    before = 0  # tiles of one head of all requests before `request`
    passed = 0
    for first in range(0, rows, _ROWS):
        inside = first + lanes < rows
        length = tl.load(lengths + first + lanes, mask=inside, other=0)
        tiles = tl.where(inside, _tiles(length, window, tile), 0)
        ends = passed + tl.cumsum(tiles, 0)
        ended = inside & (ends * kv_heads <= begin)
        request += tl.sum(ended.to(tl.int32), 0)
        before += tl.sum(tl.where(ended, tiles, 0), 0)
        passed += tl.sum(tiles, 0)
    length = tl.load(lengths + request, mask=request < rows, other=0)
    tiles = _tiles(length, window, tile)
    rest = begin - before * kv_heads
    entry = plan + program * 4
    tl.store(entry, begin)
    tl.store(entry + 1, request)
    tl.store(entry + 2, rest // tiles)
    tl.store(entry + 3, rest % tiles)


@triton.jit
def _place(
    lengths, table, rows, request, at, lanes, table_stride, width, window,
    block_size: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """For tile `at` of one of `request`'s rows: the length, the tokens' positions and blocks, and the packed token.

    Tokens beyond the length have a block too, with any id: nothing is read there.
    """
    length = tl.load(lengths + request)
    tokens = (_first_tile(length, window, tile) + at) * tile + lanes
    places = tokens // block_size
    ids = tl.load(table + request.to(tl.int64) * table_stride + places, mask=places < width, other=0)
    token = request if rows is None else tl.load(rows + request)
    return length, tokens, ids, token


@triton.jit
def _attend_tile(
    acc, top, total, query, keys, seen, live, dims, scaling, softcap,
    head_dim: tl.constexpr, block_size: tl.constexpr, has_softcap: tl.constexpr, widen: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: `query` and `keys` point at rows; values lie `block_size` rows after keys."""
    inside = (dims < head_dim)[None, :]
    mask = seen[:, None] & inside
    q = tl.load(query[:, None] + dims[None, :], mask=live[:, None] & inside, other=0.0)
    k = tl.load(keys[:, None] + dims[None, :], mask=mask, other=0.0)
    v = tl.load(keys[:, None] + block_size * head_dim + dims[None, :], mask=mask, other=0.0)
    narrow = v.dtype
    if widen:
        q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
    if has_softcap:
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    scores = tl.where(seen[None, :], scores, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - highest[:, None]).to(narrow)
    shrink = tl.exp2(top - highest)
    total = total * shrink + tl.sum(weights.to(tl.float32), 1)  # rounded, as the weights of the values are
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, highest, total


@triton.jit
def _finish(
    acc, top, total, heads, live, sinks, out, lse, token, dims,
    head_dim: tl.constexpr, all_heads: tl.constexpr,
):  # fmt: skip
    """Write the output of a row whose softmax is complete except for its sink."""
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=live, other=0.0).to(tl.float32) * _LOG2E
        highest = tl.maximum(top, sink)
        acc *= tl.exp2(top - highest)[:, None]
        total = total * tl.exp2(top - highest) + tl.exp2(sink - highest)
        top = highest
    some = tl.where(total > 0, total, 1.0)  # a row of padding gives 0
    places = token.to(tl.int64) * all_heads + heads
    mask = live[:, None] & (dims < head_dim)[None, :]
    tl.store(out + places[:, None] * head_dim + dims[None, :], (acc / some[:, None]).to(out.dtype.element_ty), mask)
    if lse is not None:
        tl.store(lse + places, tl.where(total > 0, (top + tl.log2(some)) * _LN2, float("-inf")), live)


@triton.jit
def _store_part(acc, top, total, places, live, part_out, part_lse, dims, head_dim: tl.constexpr):
    """Store one part of a row, normalised on its own, with its log-sum-exp in base 2."""
    tl.store(part_lse + places, top + tl.log2(total), live)
    mask = live[:, None] & (dims < head_dim)[None, :]
    tl.store(part_out + places[:, None] * head_dim + dims[None, :], acc / total[:, None], mask)


@triton.jit(
    do_not_specialize=["layer", "window", "last_row", "table_stride", "width"],
    do_not_specialize_on_alignment=["lengths", "table", "rows"],
)
def decode_kernel(
    query, cache, out, lse, lengths, table, rows, sinks, plan, part_out, part_lse, query_token_stride,
    query_head_stride, block_stride, table_stride, width, last_row, layer, window, scaling, softcap,
    kv_heads: tl.constexpr, group: tl.constexpr, group_pad: tl.constexpr, head_dim: tl.constexpr,
    dim_pad: tl.constexpr, block_size: tl.constexpr, tile: tl.constexpr, split: tl.constexpr,
    has_softcap: tl.constexpr, widen: tl.constexpr,
):  # fmt: skip
    """One program's share of tiles, as one loop over all of its rows, so that loads run ahead from row to row.

    The loop carries the next tile's place, including its blocks, so that no load of keys waits for its addresses.
    """
    program = tl.program_id(0)
    if split:
        entry = plan + program * 4
        begin, end = tl.load(entry), tl.load(entry + 4)
        request, head, at = tl.minimum(tl.load(entry + 1), last_row), tl.load(entry + 2), tl.load(entry + 3)
    else:
        begin, request, head, at = 0, program // kv_heads, program % kv_heads, 0
        end = _tiles(tl.load(lengths + request), window, tile)
    members = tl.arange(0, group_pad)
    live = members < group
    dims = tl.arange(0, dim_pad)
    lanes = tl.arange(0, tile)
    acc = tl.zeros([group_pad, dim_pad], tl.float32)
    top = tl.full([group_pad], _FLOOR, tl.float32)
    total = tl.zeros([group_pad], tl.float32)
    length, tokens, ids, token = _place(
        lengths, table, rows, request, at, lanes, table_stride, width, window, block_size, tile
    )
    whole = at == 0
    slot = program * 2
    for step in range(begin, end):
        heads = head * group + members
        inside = ((layer * kv_heads + head) * 2 * block_size + tokens % block_size) * head_dim
        acc, top, total = _attend_tile(
            acc, top, total, query + token.to(tl.int64) * query_token_stride + heads * query_head_stride,
            cache + ids.to(tl.int64) * block_stride + inside, (tokens < length) & (tokens >= length - window),
            live, dims, scaling, softcap, head_dim, block_size, has_softcap, widen,
        )  # fmt: skip
        row_ends = at + 1 == _tiles(length, window, tile)
        if row_ends | (step + 1 == end):
            if row_ends & whole:
                _finish(acc, top, total, heads, live, sinks, out, lse, token, dims, head_dim, kv_heads * group)
            else:
                _store_part(acc, top, total, slot * group + members, live, part_out, part_lse, dims, head_dim)
            slot = program * 2 + 1
            whole = True
            acc = tl.zeros([group_pad, dim_pad], tl.float32)
            top = tl.full([group_pad], _FLOOR, tl.float32)
            total = tl.zeros([group_pad], tl.float32)
        at = tl.where(row_ends, 0, at + 1)
        head = tl.where(row_ends, head + 1, head)
        request = tl.minimum(tl.where(head == kv_heads, request + 1, request), last_row)
        head = tl.where(head == kv_heads, 0, head)
        length, tokens, ids, token = _place(
            lengths, table, rows, request, at, lanes, table_stride, width, window, block_size, tile
        )


@triton.jit
def _program_of(tile, share, longer):
    """The program whose share contains `tile`: the first `longer` have `share + 1` tiles, the others `share`."""
    inside = tile // (share + 1)
    return tl.where(inside < longer, inside, longer + (tile - longer * (share + 1)) // tl.maximum(share, 1))


@triton.jit(do_not_specialize=["window", "programs"], do_not_specialize_on_alignment=["lengths", "rows"])
def combine_kernel(
    out, lse, lengths, rows, sinks, plan, part_out, part_lse, window, programs,
    kv_heads: tl.constexpr, group: tl.constexpr, head_dim: tl.constexpr, dim_pad: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Merge the parts of the row, if any, that begins in one program's share and continues after it.

    The grid is `(programs, group)`. A row's part is a program's first (slot 0), unless the row begins after the start
    of that program's share.
    """
    program = tl.program_id(0)
    entry = plan + program * 4
    begin, end = tl.load(entry), tl.load(entry + 4)
    at = tl.load(entry + 7)  # tiles, before the next share, of the row in which it begins
    if (at > 0) & (at <= end - begin):
        request, head = tl.load(entry + 5), tl.load(entry + 6)
        all_tiles = tl.load(plan + programs * 4)
        row_end = end - at + _tiles(tl.load(lengths + request), window, tile)
        last = _program_of(row_end - 1, all_tiles // programs, all_tiles % programs)
        member = tl.program_id(1)
        parts = tl.arange(0, _PARTS)
        dims = tl.arange(0, dim_pad)
        acc = tl.zeros([dim_pad], tl.float32)
        top = tl.full([1], _FLOOR, tl.float32)
        total = tl.zeros([1], tl.float32)
        for first in range(program, last + 1, _PARTS):
            part = first + parts
            behind = (part == program) & (at < end - begin)
            place = (part * 2 + behind.to(tl.int32)) * group + member
            there = part <= last
            mask = there[:, None] & (dims < head_dim)[None, :]
            weight = tl.load(part_lse + place, mask=there, other=float("-inf"))
            value = tl.load(part_out + place[:, None] * head_dim + dims[None, :], mask=mask, other=0.0)
            highest = tl.maximum(top, tl.max(weight, 0))
            weight = tl.exp2(weight - highest)
            shrink = tl.exp2(top - highest)
            acc = acc * shrink + tl.sum(value * weight[:, None], 0)
            total = total * shrink + tl.sum(weight, 0)
            top = highest
        token = request if rows is None else tl.load(rows + request)
        one = tl.arange(0, 1)
        _finish(
            acc[None, :], top, total, head * group + member + one, one == 0, sinks, out, lse, token, dims,
            head_dim, kv_heads * group,
        )  # fmt: skip
