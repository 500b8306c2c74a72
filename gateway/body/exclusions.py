"""Fields of a request about tokens that may not follow, and how its text shows special tokens.

Their names and meanings are vLLM's or, where it has none, transformers'.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from alignedserve.gateway.body.validation_errors import ONE_OF, TOKEN_LIMIT
from alignedserve.gateway.body.values import LIST, Between, Body, Sent

MAX_ALLOWED = 1 << 16
MAX_LISTED = 4096
MAX_WORDS = 256
MAX_SCORED = 128

_Token = Annotated[int, Between(0, TOKEN_LIMIT)]
_Listed = Annotated[list[_Token], Field(max_length=MAX_LISTED, fail_fast=True)]
_Tokens = Annotated[tuple[int, ...], Sent(_Listed, tuple)]
_Allowed = Annotated[
    tuple[int, ...],
    Sent(Annotated[list[_Token], Field(min_length=1, max_length=MAX_ALLOWED, fail_fast=True)], tuple),
]
_Scored = Annotated[tuple[int, ...], Sent(Annotated[list[_Token], Field(max_length=MAX_SCORED, fail_fast=True)], tuple)]
_Words = Annotated[
    tuple[str, ...],
    Sent(Annotated[list[Annotated[str, Between(1, 128)]], Field(max_length=MAX_WORDS, fail_fast=True)], tuple),
]
_Sequence = Annotated[list[_Token], Field(min_length=1, max_length=128, fail_fast=True)]
_Sequences = Annotated[
    tuple[tuple[int, ...], ...],
    Sent(
        Annotated[list[_Sequence], Field(max_length=MAX_WORDS, fail_fast=True)],
        lambda lists: tuple(tuple(entry) for entry in lists),
    ),
]


def _one_or_some(value: Any) -> str | None:
    return "<list>" if isinstance(value, list) else "<token>" if type(value) in (int, float) else None


_OneOrSome = Annotated[
    tuple[int, ...],
    Sent(
        Annotated[
            Annotated[_Token, Tag("<token>")] | Annotated[_Listed, LIST],
            Discriminator(
                _one_or_some, custom_error_type=ONE_OF, custom_error_message="a token id or an array of token ids"
            ),
        ],
        lambda value: (value,) if isinstance(value, int) else tuple(value),
    ),
]


class ExclusionFields(Body):
    """Options for choosing tokens, and for the text of an answer. None: the model's default."""

    allowed_token_ids: _Allowed | None = Field(None, description="Choose from these tokens only.")
    bad_words: _Words | None = Field(
        None, description="Words that the answer may not contain, each with and without a space before it."
    )
    bad_words_ids: _Sequences | None = Field(
        None, description="Token sequences that may not be completed; tokens of the prompt count."
    )
    suppress_tokens: _Tokens | None = Field(None, description="Tokens that may not be chosen.")
    begin_suppress_tokens: _Tokens | None = Field(None, description="Tokens that the answer may not begin with.")
    forced_bos_token_id: _OneOrSome | None = Field(
        None, description="Begin the answer to a prompt of one token with this token, or with one of these."
    )
    forced_eos_token_id: _OneOrSome | None = Field(
        None, description="At the last place that max_tokens allows, choose this token, or one of these."
    )
    no_repeat_ngram_size: Annotated[int, Between(0, TOKEN_LIMIT)] | None = Field(
        None, description="No sequence of this many tokens occurs twice in prompt and answer; 0: no limit."
    )
    logprob_token_ids: _Scored | None = Field(
        None, description="With logprobs: the tokens whose log-probabilities are returned, in place of the likeliest."
    )
    skip_special_tokens: bool = Field(True, description="Leave special tokens out of the text.")
    spaces_between_special_tokens: bool = Field(
        True, description="Separate special tokens in the text by spaces, if the tokenizer does so for tokens."
    )
