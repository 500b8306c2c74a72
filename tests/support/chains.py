"""Chains of blocks for requests without a model: tokens are any words."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial

from alignedserve.kv_pool.prefix_chain import DIGEST_BYTES, block_chain, digest
from alignedserve.scheduler.instance.resident import BlockChain


def chain_of(
    words: Sequence[object], block_size: int, salt: bytes = b"", digest: Callable[[bytes], bytes] = digest
) -> BlockChain | None:
    """None if there is no full block."""
    return block_chain([zlib.crc32(str(word).encode()) for word in words], salt, block_size, digest)


def depth_digest(data: bytes) -> bytes:
    """The same for all prefixes of as many blocks: only tokens tell them apart."""
    before = data[:DIGEST_BYTES]
    depth = before[0] + 1 if before == before[:1] * DIGEST_BYTES else 0
    return bytes([depth]) * DIGEST_BYTES


def weak_digest(data: bytes, seed: int) -> bytes:
    """One of two digests, so that prefixes of any lengths have the same. Another `seed` mixes up others."""
    return bytes([digest(data + bytes([seed]))[0] % 2]) * DIGEST_BYTES


DIGESTS = (digest, depth_digest, *(partial(weak_digest, seed=seed) for seed in range(2)))
"""What a state machine finds prefixes by."""
