"""Marks of a prompt: hashes of its first tokens at fixed lengths.

The scheduler sees no tokens. By their marks it knows which prompts begin alike, and how far. A mark is a hint: one that
is outdated, or a collision, costs time and never a token.
"""

from __future__ import annotations

import hashlib

LEAST_TOKENS = 512  # computing less takes hardly longer than asking who has it
MARK_BYTES = 8
TOKEN_BYTES = 4
_GROWTH, _MULTIPLE, _LONGEST = 1.25, 16, 1 << 20


def _lengths() -> tuple[int, ...]:
    found, length = [LEAST_TOKENS], float(LEAST_TOKENS)
    while (length := length * _GROWTH) <= _LONGEST:
        found.append(round(length / _MULTIPLE) * _MULTIPLE)
    return tuple(found)


MARK_LENGTHS = _lengths()
"""Numbers of tokens, each at most a quarter more than the one before: so much of a shared beginning is not seen."""


def prefix_marks(token_bytes: bytes, salt: bytes) -> bytes:
    """The marks of a prompt, MARK_BYTES each, shortest first; none of the whole prompt: its last token is computed.

    `token_bytes`: its token ids, TOKEN_BYTES each. `salt`: prompts of different salts have no marks in common.
    """
    state = hashlib.blake2b(len(salt).to_bytes(8, "little") + salt, digest_size=MARK_BYTES)
    whole, marks, begin = memoryview(token_bytes), [], 0
    for length in MARK_LENGTHS:
        end = length * TOKEN_BYTES
        if end >= len(token_bytes):
            break
        state.update(whole[begin:end])
        marks.append(state.digest())
        begin = end
    return b"".join(marks)
