"""Defaults of sampling options from a model's `generation_config.json`, as transformers' `generate` applies them.

They are the values that the file itself contains, without the defaults of transformers. If it has `do_sample: false`,
its temperature, top_p, top_k and min_p are not used; the others apply to greedy decoding too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alignedserve.errors import InvalidRequestError, ModelError
from alignedserve.request import SamplingParams

_DRAWING = ("temperature", "top_p", "top_k", "min_p")
_COUNTS = ("no_repeat_ngram_size", "min_length", "min_new_tokens")
_SUPPRESSED = ("suppress_tokens", "begin_suppress_tokens")
_FORCED = ("forced_bos_token_id", "forced_eos_token_id")
_SEQUENCES = "bad_words_ids"


def generation_defaults(generation: Mapping[str, Any], folder: Path, vocab_size: int) -> dict[str, Any]:
    """The defaults as JSON values. Raises ModelError, which names the file and the key."""
    drawing = () if generation.get("do_sample") is False else _DRAWING
    defaults: dict[str, Any] = {
        key: generation[key]
        for key in (*drawing, "repetition_penalty")
        if isinstance(generation.get(key), (int, float))
    }
    try:
        SamplingParams(**defaults)
        for key in (*_COUNTS, *_SUPPRESSED, *_FORCED, _SEQUENCES):
            if generation.get(key) not in (None, []) and not (key in _COUNTS and generation[key] == 0):
                defaults[key] = _read(key, generation[key], vocab_size)
    except InvalidRequestError as error:
        raise ModelError(f"{folder / 'generation_config.json'}: {error}") from error
    return defaults


def _read(key: str, value: Any, vocab_size: int) -> Any:
    if key in _COUNTS:
        if type(value) is not int or value < 0:
            raise InvalidRequestError(f"{key} must be a whole number of at least 0, got {value!r:.60}")
        return value
    if key == _SEQUENCES:
        if not isinstance(value, list) or not all(isinstance(entry, list) and entry for entry in value):
            raise InvalidRequestError(f"{key} must be a list of lists of token ids, got {value!r:.60}")
        return [_tokens(key, entry, vocab_size) for entry in value]
    if key in _SUPPRESSED:  # transformers ignores ids outside the vocabulary
        return [token for token in _tokens(key, value, None) if token < vocab_size]
    return _tokens(key, value if isinstance(value, list) else [value], vocab_size)


def _tokens(key: str, value: Any, vocab_size: int | None) -> list[int]:
    """Token ids, less than `vocab_size`, if that is known."""
    if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
        raise InvalidRequestError(f"{key} must hold token ids, got {value!r:.60}")
    if vocab_size is not None and max(value, default=0) >= vocab_size:
        raise InvalidRequestError(f"{key}: token id {max(value)} is outside the vocabulary of {vocab_size}")
    return list(value)
