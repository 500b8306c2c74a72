"""Moves scattered blocks within one GPU's memory in one launch. Needs Triton: imported only if a GPU is used.

It is a kernel because a copy of one block within a device takes a few microseconds, about as long as its launch, so
that even a batch of copies spends most of its time between them. It uses few programs to leave the other SMs to the
computation; each program has many loads in flight instead. The best number of programs has not been measured yet.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from alignedserve.transfer.runs import Cut, IdArray

UNIT_BYTES = 16
"""Bytes that one thread moves at a time; begin, stride and width of a cut must be multiples of it."""

PROGRAMS = 64
WARPS = 32
CHUNK_BYTES = 64 << 10


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def copy_rows(  # type: ignore[no-untyped-def]
    source,
    destination,
    ids,
    count,
    source_block,
    source_begin,
    source_stride,
    target_block,
    target_begin,
    target_stride,
    rows,
    width,
    CHUNK: tl.constexpr,  # noqa: N803
):
    """Copy row `r` of block `ids[0, i]` to row `r` of block `ids[1, i]`; all sizes and offsets in units of 16 bytes.

    `source`, `destination`: int64, from block 0 on. `ids`: int64 `[2, count]`. There are `rows` rows of `width` units
    each; row `r` of block `b` begins at `b * block + begin + r * stride`. Work is divided into chunks of `CHUNK` units.
    """
    chunks = tl.cdiv(width, CHUNK)
    lanes = tl.arange(0, 2 * CHUNK)
    for work in range(tl.program_id(0), count * rows * chunks, tl.num_programs(0)):
        first = (work % chunks) * CHUNK
        row = (work // chunks) % rows
        index = work // (chunks * rows)
        # int64 from the ids on: a store is larger than 2^31 units' bytes.
        begin = tl.load(ids + index) * source_block + source_begin + row * source_stride + first
        target = tl.load(ids + count + index) * target_block + target_begin + row * target_stride + first
        wanted = lanes < (width - first) * 2
        moved = tl.load(source + begin * 2 + lanes, mask=wanted, eviction_policy="evict_first")
        tl.store(destination + target * 2 + lanes, moved, mask=wanted, eviction_policy="evict_first")


def serves(cuts: tuple[Cut, Cut], block_bytes: tuple[int, int]) -> bool:
    """Whether all sizes and offsets are multiples of the unit."""
    numbers = [*block_bytes]
    for cut in cuts:
        numbers += [cut.begin_bytes, cut.width_bytes, cut.stride_bytes]
    return not any(number % UNIT_BYTES for number in numbers)


def copy_blocks(
    source: torch.Tensor,
    destination: torch.Tensor,
    ids: tuple[IdArray, IdArray],
    cuts: tuple[Cut, Cut],
    *,
    programs: int = PROGRAMS,
) -> None:
    """Launch the copy of `cuts` of blocks `ids` on the current stream; `serves` must have returned True.

    `source`, `destination`: uint8 `[capacity_blocks, block_bytes]`, contiguous, on one device. The ids are sent in one
    copy, page-locked on a GPU, which torch keeps until the stream has passed it.
    """
    host = torch.from_numpy(np.stack(ids))
    if source.is_cuda:
        host = host.pin_memory()
    on_device = host.to(source.device, non_blocking=True)
    sizes = [blocks.shape[1] // UNIT_BYTES for blocks in (source, destination)]
    units = [(cut.begin_bytes // UNIT_BYTES, cut.stride_bytes // UNIT_BYTES) for cut in cuts]
    width = cuts[0].width_bytes // UNIT_BYTES
    chunk = min(CHUNK_BYTES // UNIT_BYTES, triton.next_power_of_2(width))
    works = ids[0].size * cuts[0].rows * triton.cdiv(width, chunk)
    kernel: Any = copy_rows
    kernel[(min(programs, works),)](
        source.view(-1).view(torch.int64),
        destination.view(-1).view(torch.int64),
        on_device,
        ids[0].size,
        sizes[0],
        *units[0],
        sizes[1],
        *units[1],
        cuts[0].rows,
        width,
        CHUNK=chunk,
        num_warps=min(WARPS, max(1, chunk // 32)),
    )
