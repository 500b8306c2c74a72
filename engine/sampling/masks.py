"""Applies the masks of grammars to logits, on the device of the logits."""

from __future__ import annotations

import math

import numpy as np
import torch

from alignedserve.grammar.base import Bits


def apply_masks(logits: torch.Tensor, bits: Bits) -> None:
    """Set `logits` `[rows, vocab_size]` of forbidden tokens to -inf, in place."""
    rows, vocab_size = logits.shape
    if logits.device.type == "cpu":
        allowed = np.unpackbits(bits.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        logits.masked_fill_(torch.from_numpy(allowed) == 0, -math.inf)
        return
    words = torch.from_numpy(bits).to(logits.device, non_blocking=True)
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed_bits = ((words[:, :, None] >> places) & 1).view(rows, -1)[:, :vocab_size]
    logits.masked_fill_(allowed_bits == 0, -math.inf)
