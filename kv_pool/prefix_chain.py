"""The chained digests of a prompt's full blocks, under which a prefix cache finds them.

    root = H(everything but the tokens that changes KV)      digest 0 = H(root | tokens of block 0)
    digest i = H(digest i-1 | tokens of block i)             H: BLAKE2b of 16 bytes, tokens as little-endian uint32

So a digest names its block and all tokens before it. As Mooncake's chained hashes (Mooncake, section 4.2).
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Callable, Sequence

from alignedserve.errors import TransferError

DIGEST_BYTES = 16
TOKEN_BYTES = 4


def digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def root_digest(*parts: str) -> bytes:
    """The start of a chain. `parts`: what changes KV beside tokens, such as `KvGeometry.fingerprint` and `cache_salt`.

    No two different sequences of parts have the same root.
    """
    encoded = [part.encode() for part in parts]
    return digest(b"".join(len(part).to_bytes(8, "little") + part for part in encoded))


class Chain:
    """The full blocks of a sequence of tokens. Digests are computed as they are asked for, and kept."""

    __slots__ = ("_digest", "_digests", "block_bytes", "blocks", "root", "tokens")

    def __init__(
        self, root: bytes, token_ids: Sequence[int], block_size: int, digest: Callable[[bytes], bytes] = digest
    ) -> None:
        """`root`: from `root_digest`. `digest`: another function of 16 bytes, for tests.

        Raises TransferError if `root` has not 16 bytes, and OverflowError if a token id does not fit in 32 bits.
        """
        if len(root) != DIGEST_BYTES:
            raise TransferError(f"the root of a chain has {DIGEST_BYTES} bytes, not {len(root)}")
        self.root = root
        self.blocks = len(token_ids) // block_size
        self.block_bytes = block_size * TOKEN_BYTES
        tokens = array("I", token_ids[: self.blocks * block_size])
        if sys.byteorder == "big":
            tokens.byteswap()
        self.tokens = tokens.tobytes()
        self._digest = digest
        self._digests = bytearray()

    def digests(self, count: int) -> bytearray:
        """The digests of at least the first `count` blocks, 16 bytes each."""
        found, step = self._digests, self.block_bytes
        at = len(found) // DIGEST_BYTES
        if at < count:
            make, tokens = self._digest, self.tokens
            before = bytes(found[-DIGEST_BYTES:]) or self.root
            for start in range(at * step, count * step, step):
                before = make(before + tokens[start : start + step])
                found += before
        return found
