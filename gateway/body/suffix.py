"""`suffix`: prompts for the text between two texts."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.gateway.failures import UnsupportedFeatureError
from alignedserve.text import Prompt, PromptEncoder, Tokenizer
from alignedserve.text.infill import infill_prompt, infill_tokens


def with_suffix(
    tokenizer: Tokenizer | None, encoder: PromptEncoder, prompts: Sequence[Prompt], suffix: str
) -> list[Prompt]:
    """The prompts, each before `suffix`. Raises UnsupportedFeatureError for a model without the tokens for it."""
    tokens = None if tokenizer is None else infill_tokens(tokenizer)
    if tokens is None:
        message = "suffix is not supported: this model's tokenizer has no tokens to fill in the middle"
        raise UnsupportedFeatureError(message, param="suffix")
    return [infill_prompt(tokens, encoder, prompt, suffix) for prompt in prompts]
