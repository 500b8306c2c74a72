"""Chains of blocks for requests without a model: tokens are any words."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from alignedserve.scheduler.instance.resident import BlockChain


def chain_of(words: Sequence[object], block_size: int, salt: bytes = b"") -> BlockChain | None:
    """None if there is no full block."""
    return BlockChain.of([zlib.crc32(str(word).encode()) for word in words], salt, block_size)
