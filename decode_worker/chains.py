"""What a request's KV was computed from, as a chain of blocks that others may share in a decode cache."""

from __future__ import annotations

from alignedserve.proto import common_pb2 as pb
from alignedserve.scheduler.instance.resident import BlockChain


def chain_of(stored: pb.StoredRequest, block_size: int, *, caches: bool) -> BlockChain | None:
    """The full blocks of the request's KV; None if it shares none.

    `caches`: with a prefix cache all requests of one salt and the same weights share blocks, else only the answers to
    one prompt.
    """
    spec = stored.spec
    if caches:
        tokens, salt = [*spec.prompt_token_ids, *spec.output_token_ids], spec.cache_salt
    elif spec.group_size > 1:
        tokens, salt = list(spec.prompt_token_ids), spec.group_id.encode()
    else:
        return None
    return BlockChain.of(tokens[: stored.kv_tokens], salt + b"\0" + stored.weights.encode(), block_size)
