"""Random numbers that depend only on (seed, position, token).

A counter-based generator: each value is a hash of its coordinates, so that a row's draws do not depend on its batch, on
the device, or on how many candidates are left. The mixing function is `lowbias32`
(https://nullprogram.com/blog/2018/07/31/) under two keys of 32 bits.
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
    """Exponential(1) noise, fp32 `[rows, n]`, for int32 `token_ids` `[rows or 1, n]` under int32 `keys` `[rows, 2]`.

    Small values, which decide whether an unlikely token is drawn, have a resolution of 2**-31. Values are above 0 and
    finite.
    """
    bits = _mix(token_ids, keys).bitwise_and_(0x7FFFFFFF).bitwise_or_(1)
    # bits / 2**31 is in (0, 1); fp32 may round it up to 1, hence the clamp.
    uniform = bits.to(torch.float32).mul_(-(2.0**-31)).clamp_(min=2.0**-24 - 1.0)
    return uniform.log1p_().neg_()


def _mix(token_ids: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """`lowbias32` of int32 `token_ids`, with one key mixed in before it and one in its middle. Products wrap."""
    value = token_ids ^ keys[:, :1]
    shifted = torch.empty_like(value)
    _xor_shifted(value, 16, shifted)
    value.mul_(0x7FEB352D)
    _xor_shifted(value, 15, shifted)
    value.bitwise_xor_(keys[:, 1:]).mul_(_signed(0x846CA68B))
    _xor_shifted(value, 16, shifted)
    return value


def _xor_shifted(value: torch.Tensor, bits: int, scratch: torch.Tensor) -> None:
    """`value ^= value >> bits`, in place, with a logical shift; int32's own shift is arithmetic."""
    torch.bitwise_right_shift(value, bits, out=scratch)
    value.bitwise_xor_(scratch.bitwise_and_((1 << (32 - bits)) - 1))


def _splitmix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value
