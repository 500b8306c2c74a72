"""`truncate_prompt_tokens`: prompts of which only the last or the first tokens are used."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.errors import InvalidRequestError
from alignedserve.gateway.body.requests import GenerationRequest

CHAT_ANSWER = 1024  # tokens that a chat without max_tokens is left, but at most a quarter of the limit
MOST = 1 << 17  # tokens of a text that is tokenised to be truncated, if the model has fewer positions


def most_tokens(request: GenerationRequest, limit: int) -> int:
    """The most tokens that a prompt may have before it is truncated. `limit`: of prompt and answer together."""
    return limit if request.truncate_prompt_tokens is None else max(limit, MOST)


def truncated(
    request: GenerationRequest, tokens: Sequence[int], limit: int, default: int, beginning: int | None = None
) -> Sequence[int]:
    """The part of a prompt that is used. `default`: tokens of an answer for which the request sets no max_tokens.

    `beginning`: the token that a text begins with, without which a model may answer anything: it is kept. Raises
    InvalidRequestError.
    """
    wanted = request.truncate_prompt_tokens
    if wanted is None:
        return tokens
    if wanted > limit:
        message = f"truncate_prompt_tokens is {wanted}, more than the {limit} tokens that there is room for"
        raise InvalidRequestError(message, param="truncate_prompt_tokens")
    if wanted == -1:
        asked = request.max_tokens
        wanted = max(1, limit - (default if asked is None or asked >= limit else asked))
    if len(tokens) <= wanted:
        return tokens
    if request.truncation_side != "left":
        return tokens[:wanted]
    kept = 1 if wanted > 1 and tokens[0] == beginning else 0
    return [*tokens[:kept], *tokens[len(tokens) - wanted + kept :]]
