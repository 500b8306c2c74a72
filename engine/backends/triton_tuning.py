"""How the Triton decode kernel is cut for a chip: tile, warps, stages, and how many of its programs an SM holds.

Nothing is tried out while serving: a kernel that is compiled or timed while a graph is captured breaks the capture.
What follows is reckoned for an H200 (132 SMs, 228 KiB of shared memory each, 4.8 TB/s) and not measured yet:

- A load from HBM takes close to 1 µs under load, in which an SM must have 4.8 TB/s / 132 SMs * 1 µs = 36 KiB on the
  way, better twice that, for the time in which no load is issued. A tile's keys and values are 32 KiB, one or two
  tiles are on the way in each program, and two programs share an SM: while one reduces a tile, the other's loads go on.
- The tile is the tensor core's N in one product and K in the other, and what the reductions over warps and the
  barriers are paid for; wide heads have shorter tiles of the same bytes.
- Four warps split the tile's tokens, then the head's dimensions. More query heads than one tensor core tile's 16 rows
  (a group above 16) need registers for that many outputs: eight warps.
- fp32 goes through plain FMA units, for exactness, not speed: short tiles, whose operands stay in registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_SHARED_BYTES_SM = 228 << 10  # of compute capability 9.0; each program takes 1 KiB beside its own
_SHARED_BYTES_PROGRAM = 227 << 10
_TILE_BYTES = 32 << 10
_MMA_ROWS = 16
_WGMMA_ROWS = 64  # from which on products read their operands from shared memory while the next loads are issued


@dataclass(frozen=True, slots=True)
class DecodeSetting:
    """One way to run the decode kernel; `tile` in tokens, a power of two."""

    tile: int
    warps: int
    stages: int
    programs_per_sm: int


def padded_group(heads: int, kv_heads: int) -> int:
    """Rows of the product of a KV head's queries and keys: a power of two of at least 16."""
    return max(_MMA_ROWS, power_of_two(heads // kv_heads))


def padded_dim(head_dim: int) -> int:
    return max(16, power_of_two(head_dim))


def shared_bytes(setting: DecodeSetting, head_dim: int, element_bytes: int, group_rows: int) -> int:
    """What a program takes of an SM's shared memory at most: tiles on the way, and what its results pass through."""
    width = padded_dim(head_dim)
    buffers = setting.stages if group_rows >= _WGMMA_ROWS else max(1, setting.stages - 1)
    on_the_way = buffers * (2 * setting.tile + group_rows) * width * element_bytes
    return on_the_way + group_rows * max(setting.tile * element_bytes, width * 4)


def decode_setting(head_dim: int, element_bytes: int, group_rows: int) -> DecodeSetting:
    """The setting to serve with, for heads of `head_dim` elements and `group_rows` (see `padded_group`)."""
    width = padded_dim(head_dim)
    warps = 4 if group_rows == _MMA_ROWS else 8
    if element_bytes == 4:
        tile, most_stages = 16 if width > 128 else 32, 2
    else:
        tile, most_stages = min(128, max(16, _TILE_BYTES // (2 * width * element_bytes))), 3
    choices = [(tile, stages, programs) for stages in range(most_stages, 0, -1) for programs in (2, 1)]
    fitting = (
        setting
        for tile, stages, programs in [*choices, (16, 1, 1)]
        if _fits(setting := DecodeSetting(tile, warps, stages, programs), head_dim, element_bytes, group_rows)
    )
    return next(fitting, DecodeSetting(16, warps, 1, 1))


def decode_candidates(head_dim: int, element_bytes: int, group_rows: int) -> Iterator[DecodeSetting]:
    """What a sweep may try: the setting in use first, then all others that an SM has the shared memory for."""
    chosen = decode_setting(head_dim, element_bytes, group_rows)
    yield chosen
    for tile in (16, 32, 64, 128):
        for warps in (2, 4, 8):
            for stages in (2, 3, 4, 5):
                for programs in (1, 2, 3, 4):
                    setting = DecodeSetting(tile, warps, stages, programs)
                    fits = _fits(setting, head_dim, element_bytes, group_rows)
                    if fits and _worth(setting, head_dim, element_bytes) and setting != chosen:
                        yield setting


def _fits(setting: DecodeSetting, head_dim: int, element_bytes: int, group_rows: int) -> bool:
    needed = shared_bytes(setting, head_dim, element_bytes, group_rows)
    return needed <= _SHARED_BYTES_PROGRAM and setting.programs_per_sm * (needed + 1024) <= _SHARED_BYTES_SM


def _worth(setting: DecodeSetting, head_dim: int, element_bytes: int) -> bool:
    """Whether an SM has enough on the way to reach its share of the bandwidth, and few enough threads for registers."""
    tile_bytes = 2 * setting.tile * head_dim * element_bytes
    on_the_way = setting.programs_per_sm * (setting.stages - 1) * tile_bytes
    return on_the_way >= 40 << 10 and setting.programs_per_sm * setting.warps <= 16


def power_of_two(number: int) -> int:
    """The smallest power of two of at least `number`."""
    return 1 << (number - 1).bit_length()
