"""Well-formed messages that make no sense are refused before any books hear of them.

A peer has the cluster's token, so this guards against mistakes and mixed versions: each raises InvalidRequestError, and
`serve_stream` drops the message.
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
    """The requests of one group, as the scheduler hears of them."""
    if not heads or not all(head.prompt_tokens for head in heads):
        raise InvalidRequestError("a group needs requests, and each a prompt")
    if len({head.key.request_id for head in heads}) != len(heads):
        raise InvalidRequestError("a group names one request twice")
    for head in heads:
        _check_id(head.key)


def check_group(requests: Sequence[pb.RequestSpec], vocab_size: int) -> None:
    """The requests of one group, of which the first carries the prompt."""
    if not requests or not requests[0].prompt_token_ids:
        raise InvalidRequestError("a group needs requests, and its first one a prompt")
    if len({request.key.request_id for request in requests}) != len(requests):
        raise InvalidRequestError("a group names one request twice")
    for request in requests:
        _check_spec(request, vocab_size)


def check_buffer(message: pw.Prefetch) -> None:
    """Requests that are to lie in one of the two buffers."""
    if message.buffer not in (pw.BUFFER_BATCH, pw.BUFFER_REQUESTS):
        raise InvalidRequestError(f"there is no buffer {message.buffer}")


def decodable(stored: pb.StoredRequest, block_size: int, vocab_size: int) -> bool:
    """`check_stored`, for one of many."""
    try:
        check_stored(stored, block_size, vocab_size)
    except InvalidRequestError as error:
        logger.warning("what the pool has stored makes no sense: %s", error)
        return False
    return True


def check_stored(stored: pb.StoredRequest, block_size: int, vocab_size: int = 0) -> None:
    """A request whose KV lies in blocks, and whose next token is to be computed."""
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
        raise InvalidRequestError(f"{spec.key} names tokens that the model does not have ({vocab_size})")


def _check_id(key: pb.RequestKey) -> None:
    if not 0 < len(key.request_id.encode()) <= MAX_ID_BYTES:
        raise InvalidRequestError(f"a request id has 1 to {MAX_ID_BYTES} bytes")
