"""The message that names a sequence of tokens whose full blocks are, or are to be, in the prefix cache."""

from __future__ import annotations

import array
import sys
from collections.abc import Sequence

from alignedserve.proto import kv_pool_pb2 as kp


def cached_prefix(tokens: Sequence[int], salt: bytes) -> kp.CachedPrefix:
    packed = array.array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return kp.CachedPrefix(token_ids=packed.tobytes(), salt=salt)
