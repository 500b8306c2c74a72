"""Checks that refuse well-formed messages with invalid contents before they change any state.

Every peer has the cluster's token, so the checks protect against bugs and mixed versions. Each raises
InvalidRequestError, and `serve_stream` then drops the message.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from alignedserve.control.convert import spec_from_proto
from alignedserve.errors import AlignedServeError, InvalidRequestError
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import prefill_worker_pb2 as pw
from alignedserve.request import RequestSpec

logger = logging.getLogger(__name__)

MAX_ID_BYTES = 400


def check_heads(heads: Sequence[pb.RequestHead]) -> None:
    """Checks the requests of one group, as they are submitted to the scheduler."""
    if not heads or not all(head.prompt_tokens for head in heads):
        raise InvalidRequestError("a group must have requests, and each request a prompt")
    if len({head.key.request_id for head in heads}) != len(heads):
        raise InvalidRequestError("a group contains a request twice")
    for head in heads:
        _check_id(head.key)


def check_group(requests: Sequence[pb.RequestSpec], vocab_size: int) -> None:
    """Checks the requests of one group, whose first request has the prompt."""
    if not requests or not requests[0].prompt_token_ids:
        raise InvalidRequestError("a group must have requests, and its first request a prompt")
    if len({request.key.request_id for request in requests}) != len(requests):
        raise InvalidRequestError("a group contains a request twice")
    for request in requests:
        _check_spec(request, vocab_size)


def check_buffer(message: pw.Prefetch) -> None:
    """Checks that a prefetch names one of the two candidate buffers."""
    if message.buffer not in (pw.BUFFER_BATCH, pw.BUFFER_REQUESTS):
        raise InvalidRequestError(f"there is no buffer {message.buffer}")


def decodable(stored: pb.StoredRequest, block_size: int, vocab_size: int) -> bool:
    """Whether a stored request passes `check_stored`; if not, a warning is logged."""
    try:
        check_stored(stored, block_size, vocab_size)
    except InvalidRequestError as error:
        logger.warning("a request stored in the pool is invalid: %s", error)
        return False
    return True


def check_stored(stored: pb.StoredRequest, block_size: int, vocab_size: int = 0) -> None:
    """Checks a request whose KV is in blocks, and whose next token is to be computed."""
    spec = _check_spec(stored.spec, vocab_size)
    for what, tokens, ids in (
        ("its store", stored.kv_tokens, stored.block_ids),
        ("the pool", stored.pool_tokens, stored.pool_block_ids),
    ):
        if not tokens <= len(ids) * block_size or len(set(ids)) != len(ids):
            raise InvalidRequestError(f"{tokens} tokens of {spec.key} are not in {len(ids)} blocks of {what}")
    if not stored.store_id or not spec.output_token_ids or not 0 < stored.kv_tokens < spec.prefix_length:
        raise InvalidRequestError(f"{spec.key} with {stored.kv_tokens} tokens in {stored.store_id!r} cannot be decoded")


def _check_spec(message: pb.RequestSpec, vocab_size: int) -> RequestSpec:
    _check_id(message.key)
    try:
        spec = spec_from_proto(message)
    except (AlignedServeError, ValueError) as error:
        raise InvalidRequestError(f"{message.key.request_id}: {error}") from error
    if vocab_size:
        _check_tokens(spec, vocab_size)
    return spec


def _check_tokens(spec: RequestSpec, vocab_size: int) -> None:
    lists: tuple[Iterable[int], ...] = (
        spec.prompt_token_ids,
        spec.output_token_ids,
        (token for token, _ in spec.sampling.logit_bias),
    )
    if any(max(tokens, default=0) >= vocab_size for tokens in lists):
        raise InvalidRequestError(f"{spec.key} has token ids outside the vocabulary of {vocab_size}")


def _check_id(key: pb.RequestKey) -> None:
    if not 0 < len(key.request_id.encode()) <= MAX_ID_BYTES:
        raise InvalidRequestError(f"a request id must have 1 to {MAX_ID_BYTES} bytes")
