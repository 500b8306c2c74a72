"""Settings of the Triton decode kernel for a chip: tile, warps, stages, and the number of programs on an SM.

Nothing is tried out while serving: compiling or timing a kernel while a graph is captured breaks the capture. The
following is calculated for an H200 (132 SMs, 228 KiB of shared memory each, 4.8 TB/s) and not measured yet:

- A load from HBM takes close to 1 µs under load. In that time an SM must have 4.8 TB/s / 132 SMs * 1 µs = 36 KiB in
  flight, better twice that, to cover the time in which no load is issued. A tile's keys and values are 32 KiB, each
  program has one or two tiles in flight, and two programs share an SM: while one reduces a tile, the other's loads
  continue.
- The tile is the tensor core's N in one product and K in the other. The costs of reductions over warps and of barriers
  are per tile. Wide heads have shorter tiles of the same bytes.
- Four warps split the tile's tokens, then the head's dimensions. More query heads than the 16 rows of one tensor core
  tile (a group above 16) need registers for that many outputs: eight warps.
- fp32 uses plain FMA units, for exactness, not speed: short tiles, whose operands stay in registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_SHARED_BYTES_SM = 228 << 10  # for compute capability 9.0; each program uses 1 KiB in addition to its own
_SHARED_BYTES_PROGRAM = 227 << 10
_TILE_BYTES = 32 << 10
_MMA_ROWS = 16
_WGMMA_ROWS = 64  # from here on products read their operands from shared memory while the next loads are issued


@dataclass(frozen=True, slots=True)
class DecodeSetting:
    """One setting of the decode kernel; `tile` in tokens, a power of two."""

    tile: int
    warps: int
    stages: int
    programs_per_sm: int


def padded_group(heads: int, kv_heads: int) -> int:
    """Rows of the product of a KV head's queries and keys: a power of two, at least 16."""
    return max(_MMA_ROWS, power_of_two(heads // kv_heads))


def padded_dim(head_dim: int) -> int:
    return max(16, power_of_two(head_dim))


def shared_bytes(setting: DecodeSetting, head_dim: int, element_bytes: int, group_rows: int) -> int:
    """The most shared memory that a program uses on an SM: tiles in flight, and buffers for its results."""
    width = padded_dim(head_dim)
    buffers = setting.stages if group_rows >= _WGMMA_ROWS else max(1, setting.stages - 1)
    on_the_way = buffers * (2 * setting.tile + group_rows) * width * element_bytes
    return on_the_way + group_rows * max(setting.tile * element_bytes, width * 4)


def decode_setting(head_dim: int, element_bytes: int, group_rows: int) -> DecodeSetting:
    """The setting for serving, for heads of `head_dim` elements and `group_rows` (see `padded_group`)."""
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
    """Settings for a sweep: the one in use first, then all others for which an SM has enough shared memory."""
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
    """Whether an SM has enough bytes in flight for its share of the bandwidth, and registers for all threads."""
    tile_bytes = 2 * setting.tile * head_dim * element_bytes
    on_the_way = setting.programs_per_sm * (setting.stages - 1) * tile_bytes
    return on_the_way >= 40 << 10 and setting.programs_per_sm * setting.warps <= 16


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
