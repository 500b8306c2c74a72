"""Values of sampling options that depend on the model: its defaults, its vocabulary, and its tokens for words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from alignedserve.errors import InvalidRequestError
from alignedserve.gateway.body.requests import GenerationRequest
from alignedserve.model import ModelInfo
from alignedserve.text import Tokenizer

Sequences = tuple[tuple[int, ...], ...]

_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "no_repeat_ngram_size")
_INTEGERS = ("top_k", "no_repeat_ngram_size")
_TOKENS = ("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id")


def model_values(request: GenerationRequest, info: ModelInfo, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The arguments of SamplingParams that a request's prompts share: the client's, else the model's. Raises
    InvalidRequestError.
    """
    values = {**_generation_defaults(info.generation_defaults), **request.sampling}
    values["top_k"] = max(values.get("top_k", 0), 0)  # -1 also means no limit
    values["eos_token_ids"] = info.eos_token_ids
    values["bad_words"] = _word_tokens(request.bad_words or (), tokenizer)
    values["bad_words_ids"] = _without_ends(values.get("bad_words_ids", ()), info.eos_token_ids)
    return values


def _generation_defaults(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The model's defaults as arguments of SamplingParams, without those that depend on the prompt's length."""
    found = {
        name: int(defaults[name]) if name in _INTEGERS else defaults[name] for name in _NUMBERS if name in defaults
    }
    found |= {name: tuple(defaults[name]) for name in _TOKENS if name in defaults}
    if "bad_words_ids" in defaults:
        found["bad_words_ids"] = tuple(tuple(sequence) for sequence in defaults["bad_words_ids"])
    return found


def least_tokens(request: GenerationRequest, defaults: Mapping[str, Any], prompt_tokens: int, max_tokens: int) -> int:
    """The least number of tokens of an answer. As in transformers, a length of the answer overrides one with the
    prompt's. A client's must not exceed max_tokens; a model's is cut to it.
    """
    if request.min_tokens is not None:
        return request.min_tokens
    if request.min_length is not None:
        least = max(0, request.min_length - prompt_tokens)
        if least > max_tokens:
            message = f"min_length exceeds the prompt's {prompt_tokens} tokens and max_tokens, {max_tokens}, together"
            raise InvalidRequestError(message, param="min_length")
        return least
    wanted = defaults.get("min_new_tokens") or defaults.get("min_length", 0) - prompt_tokens
    return max(0, min(int(wanted), max_tokens))


def _without_ends(sequences: Sequence[Sequence[int]], eos_token_ids: Sequence[int]) -> Sequences:
    """`bad_words_ids` without end tokens: as in transformers, an answer may always end."""
    return tuple(tuple(ids) for ids in sequences if len(ids) != 1 or ids[0] not in eos_token_ids)


def _word_tokens(words: Sequence[str], tokenizer: Tokenizer | None) -> Sequences:
    """The token sequences of `bad_words`: each word as a text begins with it and, if that is another sequence of as
    many tokens, after a space. Raises InvalidRequestError.
    """
    if not words:
        return ()
    if tokenizer is None:
        raise InvalidRequestError("this model has no tokenizer: words cannot be forbidden", param="bad_words")
    texts = [word.lstrip() for word in words]
    tokens = tokenizer.encode_each([*texts, *(f" {text}" for text in texts)])
    found: list[tuple[int, ...]] = []
    for word, bare, spaced in zip(words, tokens, tokens[len(words) :], strict=False):
        if not bare:
            raise InvalidRequestError(f"bad_words: {word!r} has no tokens", param="bad_words")
        found.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            found.append(spaced)
    return tuple(dict.fromkeys(found))


def check_vocabulary(request: GenerationRequest, info: ModelInfo) -> None:
    """Raises InvalidRequestError for a token id outside the vocabulary; it names the field."""
    listed: dict[str, Sequence[int] | None] = {
        "stop_token_ids": request.stop_token_ids,
        "logit_bias": [token for token, _ in request.logit_bias],
        "bad_words_ids": [token for ids in request.bad_words_ids or () for token in ids],
    }
    listed |= {name: getattr(request, name) for name in (*_TOKENS, "allowed_token_ids", "logprob_token_ids")}
    for param, tokens in listed.items():
        if tokens and (token := max(tokens)) >= info.vocab_size:
            message = f"{param}: token id {token} is outside the vocabulary of {info.vocab_size}"
            raise InvalidRequestError(message, param=param)
