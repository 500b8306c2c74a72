"""Measures the read bandwidth of one, several and all thread blocks of a GPU. Timing needs Triton and a GPU.

The bandwidth of one block is the constant of the `no_split` kernel mode, in which one thread block reads all KV of a
(request, head) job.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

TILE = 8192  # float32 elements that a program reads at once: 32 KiB, as the keys and values of 64 tokens in bf16
STAGES = 4  # reads in flight
REGION_BYTES = 16 << 20  # read by each program; each run reads other memory, so that no cache holds it
REPEATS = 5
SLEEP_CYCLES = 400_000  # about 0.2 ms: the host launches the timed work meanwhile


@triton.jit  # type: ignore[untyped-decorator]
def _stream_kernel(source, sums, region, tile: tl.constexpr, stages: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program i stores the sum of `region` elements of `source` from `i * region`. `region`: a multiple of `tile`."""
    program = tl.program_id(0)
    begin = program.to(tl.int64) * region
    place = tl.arange(0, tile)
    total = tl.zeros([tile], dtype=tl.float32)
    for step in tl.range(0, region // tile, num_stages=stages):
        total += tl.load(source + begin + step * tile + place)
    tl.store(sums + program, tl.sum(total, axis=0))


def stream(source: torch.Tensor, programs: int, region: int) -> torch.Tensor:
    """Let `programs` thread blocks read `region` elements each of `source` (float32, 1-d), one region after another.

    `region`: a multiple of TILE. Returns each sum, fp32 `[programs]`, which proves that every element was read.
    """
    if region % TILE or source.numel() < programs * region:
        raise ValueError(f"{programs} regions of {region} elements in tiles of {TILE} do not fit in {source.numel()}")
    sums = torch.empty(programs, dtype=torch.float32, device=source.device)
    _stream_kernel[(programs,)](source, sums, region, tile=TILE, stages=STAGES, num_warps=8)
    return sums


def program_counts(sm_count: int) -> list[int]:
    """1, 2, 4 … and the number of multiprocessors."""
    return [*(1 << power for power in range(sm_count.bit_length()) if 1 << power < sm_count), sm_count]


def bandwidth_by_blocks(
    device: torch.device, counts: Sequence[int] | None = None, region_bytes: int = REGION_BYTES
) -> dict[int, float]:
    """Bytes a second that different numbers of thread blocks read together: medians of runs over different memory.

    `counts`: by default `program_counts` of the device. Uses `max(counts) * region_bytes` of its memory meanwhile.
    """
    if counts is None:
        counts = program_counts(torch.cuda.get_device_properties(device).multi_processor_count)
    region = region_bytes // 4 // TILE * TILE
    source = torch.ones(max(counts) * region, dtype=torch.float32, device=device)
    with torch.cuda.device(device):
        stream(source, max(counts), region)  # compiles, and raises the memory's clock
        found = {count: 4 * count * region / _seconds(source, count, region) for count in counts}
    torch.cuda.empty_cache()
    return found


def _seconds(source: torch.Tensor, count: int, region: int) -> float:
    """Seconds of one launch."""
    regions = source.numel() // region
    taken: list[float] = []
    for number in range(REPEATS + 1):
        begin = number * count % (regions - count + 1) * region
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda._sleep(SLEEP_CYCLES)
        events[0].record()
        stream(source[begin:], count, region)
        events[1].record()
        events[1].synchronize()
        taken.append(events[0].elapsed_time(events[1]) * 1e-3)
    return statistics.median(taken[1:])
