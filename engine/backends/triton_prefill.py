"""Attention of prefill chunks over the paged store, in Triton: all chunks of a pass in one launch.

A chunk's rows are divided into tiles. A tile with many more keys than one program's share of the whole launch (a short
chunk on a long prefix) is divided again into pieces of keys, which a second launch merges.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from alignedserve.engine.backends.base import AttentionNeeds, AttentionOptions
from alignedserve.engine.backends.triton_prefill_kernels import (
    MERGE_COLUMNS,
    MERGE_ROWS,
    TILE_COLUMNS,
    merge_pieces,
    prefill_tiles,
)
from alignedserve.engine.batch import Span
from alignedserve.errors import AlignedServeError

LOG2_E = 1.4426950408889634
SMALL_ROWS = 64  # a pass whose longest chunk has at most this many rows uses tiles of this height
SMALLEST = 16  # rows and keys of a matrix product
SHARED_BYTES = 227 << 10  # that a program may use, for compute capability 9.0
FEWEST_KEYS = 512  # of a piece: merging shorter ones costs more than they save
HEAD_DIMS = (16, 256)
BLOCK_SIZES = (16, 256)
DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of a program: rows and keys of a step, warps, and pipelined loads (stages)."""

    rows: int
    keys: int
    warps: int
    stages: int


def choose_tile(head_dim: int, itemsize: int, most_rows: int, shared_bytes: int = SHARED_BYTES) -> Tile:
    """The tile for chunks of at most `most_rows` rows.

    Two-byte elements use tensor cores, four-byte ones IEEE products. Shared memory holds the rows' queries, and the
    keys and values of `stages` steps.
    """
    tile = _large_tile(head_dim, itemsize, most_rows)
    row_bytes = triton.next_power_of_2(head_dim) * itemsize
    while (tile.rows + 2 * tile.stages * tile.keys) * row_bytes > shared_bytes and tile.rows > SMALLEST:
        small = tile.keys > SMALLEST
        tile = replace(tile, keys=tile.keys // 2) if small else replace(tile, rows=tile.rows // 2)
    return tile


def _large_tile(head_dim: int, itemsize: int, most_rows: int) -> Tile:
    """The tile for the shared memory of an H200."""
    if itemsize == 4:
        return Tile(32, 32 if head_dim <= 128 else 16, 8, 1)
    wide = 128 if head_dim <= 128 else 64
    if most_rows <= SMALL_ROWS:
        return Tile(SMALL_ROWS, 64 if head_dim <= 128 else 32, 4, 3)
    return Tile(128, wide, 8, 3 if head_dim <= 64 else 2)


@dataclass(frozen=True, slots=True)
class Work:
    """The launch's tiles, one line each (see `prefill_tiles`), and the tiles to be merged (`merge_pieces`)."""

    tiles: list[tuple[int, ...]]
    merges: list[tuple[int, ...]]
    pieces: int


def plan_work(spans: tuple[Span, ...], group: int, window: int | None, tile: Tile, programs: float) -> Work:
    """Divide `spans` into tiles of `tile.rows` rows, and long tiles into pieces of keys.

    `programs`: the minimum number of programs for a key head; no piece has more keys than an equal share of them. Tiles
    are in the order of their spans, so that those of one span find its keys in the cache; long spans come first.
    """
    at, whole = 0, []
    for span in spans:
        rows = span.query_tokens * group
        lines = []
        for first_row in range(0, rows, tile.rows):
            first = span.start + first_row // group
            last = span.start + (min(first_row + tile.rows, rows) - 1) // group
            begin = 0 if window is None else max(0, first - window + 1) // tile.keys * tile.keys
            end = last + 1 if span.limit is None else span.limit
            lines.append((span.begin, first_row, rows, span.start, begin, end, at))
        whole.append((span.kv_tokens, lines[::-1]))
        at += len(span.blocks)
    whole.sort(key=lambda entry: -entry[0])
    keys = sum(line[5] - line[4] for _, lines in whole for line in lines)
    most = max(FEWEST_KEYS, int(keys / programs))
    tiles: list[tuple[int, ...]] = []
    merges: list[tuple[int, ...]] = []
    pieces = 0
    for line in (line for _, lines in whole for line in lines):
        begin, end = line[4], line[5]
        count = -(-(end - begin) // most)
        step = -(-(end - begin) // (count * tile.keys)) * tile.keys
        cuts = range(begin, end, step)
        if len(cuts) == 1:
            tiles.append((*line, -1))
            continue
        tiles += [(*line[:4], cut, min(cut + step, end), line[6], pieces + n) for n, cut in enumerate(cuts)]
        merges.append((*line[:3], pieces, len(cuts)))
        pieces += len(cuts)
    return Work(tiles, merges, pieces)


class PrefillAttention:
    """Attends for the chunks of one forward pass over `cache` (see AttentionBackend for its shape).

    The keys and values of a chunk's tokens, cached and new, must be in the store before `attend`. `tile` and `programs`
    are chosen from the chunks and the device unless given.
    """

    def __init__(self, cache: torch.Tensor, tile: Tile | None = None, programs: int | None = None) -> None:
        _, _, self._kv_heads, _, self._block_size, self._head_dim = cache.shape
        self._cache = cache
        self._tile = tile
        self._programs, self._shared_bytes = _device(cache.device)
        self._programs = programs or self._programs
        self._merged = False  # whether the second kernel was compiled; compiling it while serving would be too late
        self._upcast = bool(triton.knobs.runtime.interpret)  # the interpreter's products of bfloat16 are wrong
        self._spans: tuple[Span, ...] = ()
        self._tables = torch.empty(0, dtype=torch.int64)
        self._work: dict[tuple[int, int | None], tuple[Tile, Work, torch.Tensor, torch.Tensor]] = {}

    @staticmethod
    def refusal(needs: AttentionNeeds) -> str | None:
        """Why these kernels cannot serve `needs`; None: they can."""
        if not HEAD_DIMS[0] <= needs.head_dim <= HEAD_DIMS[1] or needs.head_dim % 8:
            return f"heads have {needs.head_dim} elements; it takes multiples of 8 from 16 to 256"
        if not BLOCK_SIZES[0] <= needs.block_size <= BLOCK_SIZES[1] or needs.block_size % 16:
            return f"blocks have {needs.block_size} tokens (kv_pool.block_size); it takes multiples of 16 up to 256"
        if needs.dtype not in DTYPES:
            return f"KV is {needs.dtype}; it takes {', '.join(DTYPES)}"
        return None

    def begin(self, spans: tuple[Span, ...]) -> None:
        """Prepare the data that all layers of a pass with these chunks share."""
        self._spans = spans
        self._work.clear()
        if spans:
            self._tables = torch.cat([span.blocks for span in spans])

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        options: AttentionOptions,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Write the rows of all chunks of `out` `[tokens, heads, head_dim]`; its other rows are unchanged.

        `query` has the shape of `out`; the elements of a head are contiguous in both. `lse` `[tokens, heads]`, fp32,
        contiguous, gets the natural logarithm of each softmax's denominator, including the sink.
        """
        if not self._spans:
            return
        if query.stride(2) != 1 or out.stride(2) != 1:
            raise AlignedServeError("prefill attention needs contiguous elements in each head")
        heads, window = query.shape[1], options.sliding_window
        tile, work, tiles, merges = self._plan(heads // self._kv_heads, window)
        slots = work.pieces * self._kv_heads * tile.rows
        pieces = torch.empty(max(1, slots * self._head_dim), dtype=torch.float32, device=query.device)
        pieces_lse = torch.empty(max(1, slots), dtype=torch.float32, device=query.device)
        scale = options.scaling * LOG2_E if options.softcap is None else 2.0 * options.scaling / options.softcap
        block_stride = self._cache.stride(0)
        shape = {
            "kv_heads": self._kv_heads,
            "group": heads // self._kv_heads,
            "head_dim": self._head_dim,
            "padded": triton.next_power_of_2(self._head_dim),
        }
        with torch.cuda.device_of(self._cache):
            prefill_tiles[(self._kv_heads, len(work.tiles))](
                query,
                self._cache,
                self._tables,
                tiles,
                options.sinks,
                out,
                lse,
                pieces,
                pieces_lse,
                layer * self._cache.stride(1),
                *(query.stride(0), query.stride(1), out.stride(0), out.stride(1)),
                *(window or 0, scale, options.softcap or 0.0),
                **shape,
                tile_rows=tile.rows,
                block_stride=block_stride,
                block_size=self._block_size,
                tile_keys=tile.keys,
                columns=TILE_COLUMNS,
                windowed=window is not None,
                capped=options.softcap is not None,
                upcast=self._upcast,
                num_warps=tile.warps,
                num_stages=tile.stages,
            )
            if work.merges or not self._merged:
                merge_pieces[(self._kv_heads, len(merges), tile.rows // MERGE_ROWS)](
                    merges,
                    options.sinks,
                    out,
                    lse,
                    pieces,
                    pieces_lse,
                    *(out.stride(0), out.stride(1), tile.rows),
                    **shape,
                    columns=MERGE_COLUMNS,
                    merge_rows=MERGE_ROWS,
                    num_warps=4,
                )
                self._merged = True

    def _plan(self, group: int, window: int | None) -> tuple[Tile, Work, torch.Tensor, torch.Tensor]:
        """The pass's work and its tables on the device, shared by all layers with the same window."""
        found = self._work.get((group, window))
        if found is None:
            most_rows = max(span.query_tokens for span in self._spans) * group
            tile = self._tile or choose_tile(self._head_dim, self._cache.itemsize, most_rows, self._shared_bytes)
            work = plan_work(self._spans, group, window, tile, self._programs / self._kv_heads)
            tiles, merges = (
                torch.tensor(lines, dtype=torch.int32).to(self._cache.device, non_blocking=True)
                for lines in (work.tiles, work.merges or [(0,) * MERGE_COLUMNS])  # a tile without rows
            )
            found = self._work[group, window] = (tile, work, tiles, merges)
        return found


def _device(device: torch.device) -> tuple[int, int]:
    """The minimum number of programs that run at the same time, and the bytes of shared memory that each may use.

    On a CPU, where the interpreter runs them one by one, 1.
    """
    if device.type != "cuda":
        return 1, SHARED_BYTES
    found = torch.cuda.get_device_properties(device)
    return int(found.multi_processor_count), int(getattr(found, "shared_memory_per_block_optin", SHARED_BYTES))
