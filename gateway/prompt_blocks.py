"""Names of the blocks of prompts and answers, for the request log: equal names are equal beginnings, and no text.

A name is a keyed, chained hash of the tokens up to the end of its block. Without the key a guessed prompt cannot be
tested. The key is in a file beside the log, since the gateways that share the log name blocks alike.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path

BLOCK_TOKENS = 64
MOST_TOKENS = 1 << 20  # of one request
KEY_BYTES = 32
_NAME_BYTES = 8


def block_names(key: bytes, salt: bytes, token_ids: Sequence[int]) -> list[int]:
    """A number below 2^63 for each full block. `salt`: what keeps cached KV apart, as `cache_salt`."""
    tokens = array("I", token_ids[:MOST_TOKENS])
    if sys.byteorder == "big":
        tokens.byteswap()
    data, size = tokens.tobytes(), BLOCK_TOKENS * tokens.itemsize
    names = []
    before = hashlib.blake2b(salt, key=key).digest()
    for begin in range(0, len(data) - size + 1, size):
        before = hashlib.blake2b(before + data[begin : begin + size], key=key, digest_size=16).digest()
        names.append(int.from_bytes(before[:_NAME_BYTES], "big") >> 1)
    return names


def key_beside(log: Path, descriptor: int) -> bytes:
    """The key of this log, from the file `LOG.key`; made by the first gateway, readable by its owner only.

    A log that is no regular file (a pipe), or whose folder takes no file, has a new key in each process.
    """
    fresh = secrets.token_bytes(KEY_BYTES)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return fresh
    path, own = Path(f"{log}.key"), Path(f"{log}.key.{os.getpid()}.{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        with open(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(fresh)
        with contextlib.suppress(FileExistsError):
            os.link(own, path)  # whole or not at all, and only the first one
        own.unlink()
        found = path.read_bytes()
        if len(found) == KEY_BYTES:
            return found
    return fresh
