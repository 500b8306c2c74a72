"""Random numbers that depend on (seed, position, token) and nothing else.

A counter-based generator: each value is a hash of its coordinates, so that a row's draws do not depend on the batch
it is in, on the device, or on how many candidates are left. The mixing function is `lowbias32`
(https://nullprogram.com/blog/2018/07/31/), applied twice under two keys of 32 bits.
"""

from __future__ import annotations

import torch

_MASK64 = (1 << 64) - 1
_MASK32 = (1 << 32) - 1


def row_keys(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit keys from a 64-bit seed and a position (splitmix64 of both), as signed integers."""
    state = _splitmix64(_splitmix64(seed & _MASK64) ^ (position & _MASK64))
    return _signed(state >> 32), _signed(state & _MASK32)


def exponential_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Exponential(1) noise, fp32, for `token_ids` (int32 `[rows, n]` or `[n]`) under int32 `keys` `[rows, 2]`.

    Small values, which decide whether an unlikely token wins, are resolved to 2**-31.
    """
    mixed = _lowbias32(_lowbias32(token_ids ^ keys[:, :1]) ^ keys[:, 1:])
    # 31 bits h become (h + 0.5) / 2**31 in (0, 1); fp32 may round that up to 1, hence the clamp.
    uniform = (mixed & 0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31)
    return uniform.clamp_(max=1.0 - 2.0**-24).neg_().log1p_().neg_()


def _lowbias32(value: torch.Tensor) -> torch.Tensor:
    value = value ^ _shift(value, 16)
    value = value * 0x7FEB352D
    value = value ^ _shift(value, 15)
    value = value * _signed(0x846CA68B)
    return value ^ _shift(value, 16)


def _shift(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right of int32."""
    return (value >> bits) & ((1 << (32 - bits)) - 1)


def _splitmix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value
