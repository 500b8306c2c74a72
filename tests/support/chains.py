"""Chains of blocks for requests without a model: tokens are any words."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from alignedserve.kv_pool.prefix_chain import DIGEST_BYTES, block_chain, digest
from alignedserve.scheduler.instance.resident import BlockChain


def chain_of(
    words: Sequence[object], block_size: int, salt: bytes = b"", digest: Callable[[bytes], bytes] = digest
) -> BlockChain | None:
    """None if there is no full block."""
    return block_chain([zlib.crc32(str(word).encode()) for word in words], salt, block_size, digest)


def weak_digest(data: bytes) -> bytes:
    """One of three digests, so that different prefixes have the same."""
    return digest(data)[:1].translate(bytes(number % 3 for number in range(256))) * DIGEST_BYTES
