"""The message that names a sequence of tokens whose full blocks are, or are to be, in the prefix cache."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from alignedserve.errors import TransferError
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import kv_pool_pb2 as kp


def cached_prefix(tokens: Sequence[int], salt: bytes, weights: str = "") -> kp.CachedPrefix:
    """`weights`: those that the caller computes with; "": the newest."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return kp.CachedPrefix(token_ids=packed.tobytes(), salt=salt, weights=weights)


def prefix_tokens(prefix: kp.CachedPrefix) -> array[int]:
    """The token ids. Raises TransferError if their bytes are cut."""
    tokens = array("I")
    if len(prefix.token_ids) % tokens.itemsize:
        raise TransferError(f"{len(prefix.token_ids)} bytes are not whole token ids of {tokens.itemsize} bytes")
    tokens.frombytes(prefix.token_ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def stored_tokens(payload: bytes) -> tuple[list[int], bytes, str]:
    """The tokens of a request whose StoredRequest is `payload`, its salt and weights; no tokens without a payload."""
    stored = pb.StoredRequest.FromString(payload)
    spec = stored.spec
    return [*spec.prompt_token_ids, *spec.output_token_ids], spec.cache_salt, stored.weights


def joint_weights(before: str, own: str) -> str:
    """The weights of KV of which `before` computed the first part, and the caller the rest. Of different ones, it is
    found by no other request; nor is what a version without names has computed."""
    return before if own in before.split("+") else f"{before}+{own}"
