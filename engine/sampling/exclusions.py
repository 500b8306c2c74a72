"""The tokens that a request may not choose next: listed ones, the ends of word sequences, repeated n-grams.

Everything is computed from the prompt and the tokens of the answer so far. So a process that takes a request over
excludes the same tokens. `SamplingParams` says which server each option follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from alignedserve.request import SamplingParams

Ids = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that it can be divided by


def excludes_always(sampling: SamplingParams) -> bool:
    """Whether tokens may be excluded at every place of the answer."""
    return bool(
        sampling.allowed_token_ids
        or sampling.suppress_tokens
        or sampling.bad_words
        or sampling.bad_words_ids
        or sampling.no_repeat_ngram_size
        or sampling.forced_eos_token_id
    )


def excluded_beginning(sampling: SamplingParams) -> int:
    """The number of first tokens of the answer for which tokens may be excluded, if not for all."""
    if sampling.begin_suppress_tokens:
        return 2 if sampling.forced_bos_token_id else 1
    return 1 if sampling.forced_bos_token_id else 0


class Exclusions:
    """The excluded tokens of one answer, which follow it. Keep the object while the request decodes.

    Creation takes time in the prompt's length with n-grams only. Each `apply` then takes time in the number of tokens
    so far, a comparison a token.
    """

    __slots__ = ("_allowed", "_bad_in_all", "_bad_in_answer", "_begin_at", "_ngrams", "_prompt", "_sampling", "_single")

    def __init__(self, sampling: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._sampling = sampling
        self._prompt = prompt_token_ids
        words = (*sampling.bad_words, *sampling.bad_words_ids)
        self._single = [*sampling.suppress_tokens, *(word[0] for word in words if len(word) == 1)]
        self._bad_in_answer = _Endings(sampling.bad_words)
        self._bad_in_all = _Endings(sampling.bad_words_ids)
        self._ngrams = _Ngrams(sampling.no_repeat_ngram_size, prompt_token_ids)
        # transformers: one token later if the first one is forced
        self._begin_at = 1 if sampling.forced_bos_token_id and len(prompt_token_ids) <= 1 else 0
        self._allowed: torch.Tensor | None = None

    def apply(self, logits: torch.Tensor, output_token_ids: Sequence[int], *, forces: bool = True) -> None:
        """Set the logits `[vocab_size]` of excluded tokens to -inf, in place. `forces`: forced tokens are forced."""
        forced = self._forced(len(output_token_ids)) if forces else []
        if forced:
            kept = logits.new_full((), -math.inf).expand_as(logits).clone()
            kept[torch.tensor(forced, device=logits.device)] = 0.0
            logits.copy_(kept)
            return
        excluded = self._excluded(output_token_ids)
        excluded = excluded[excluded < len(logits)]
        if len(excluded):
            logits.index_fill_(0, torch.from_numpy(excluded).to(logits.device), -math.inf)
        if self._sampling.allowed_token_ids:
            allowed = self._allowed_on(logits.device)
            kept = logits[allowed]
            logits.fill_(-math.inf)
            logits[allowed] = kept

    def _allowed_on(self, device: torch.device) -> torch.Tensor:
        if self._allowed is None or self._allowed.device != device:
            self._allowed = torch.tensor(self._sampling.allowed_token_ids, dtype=torch.int64, device=device)
        return self._allowed

    def _forced(self, position: int) -> list[int]:
        """The tokens of which one must be chosen; [] if none is forced. A client's list of allowed tokens is kept."""
        sampling = self._sampling
        forced: tuple[int, ...] = ()
        if position == 0 and len(self._prompt) == 1:
            forced = sampling.forced_bos_token_id
        if position == sampling.max_tokens - 1 and sampling.forced_eos_token_id:
            forced = sampling.forced_eos_token_id
        allowed = sampling.allowed_token_ids
        return [token for token in forced if not allowed or token in allowed]

    def _excluded(self, output: Sequence[int]) -> Ids:
        found = list(self._single)
        if len(output) == self._begin_at:
            found += self._sampling.begin_suppress_tokens
        found += self._bad_in_answer.after(output)
        found += self._bad_in_all.after(_tail(self._prompt, output, self._bad_in_all.longest))
        return np.concatenate([np.array(found, dtype=np.int64), self._ngrams.next(output)])


def _tail(prompt: Sequence[int], output: Sequence[int], count: int) -> Sequence[int]:
    """The last `count` tokens of prompt and answer, or all if there are fewer."""
    missing = count - len(output)
    return output if missing <= 0 else [*prompt[max(0, len(prompt) - missing) :], *output]


class _Endings:
    """Sequences of two tokens or more, by the tokens before their last one."""

    __slots__ = ("_by_length", "longest")

    def __init__(self, sequences: Iterable[tuple[int, ...]]) -> None:
        self._by_length: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for *before, last in (sequence for sequence in sequences if len(sequence) > 1):
            self._by_length.setdefault(len(before), {}).setdefault(tuple(before), []).append(last)
        self.longest = max(self._by_length, default=0)

    def after(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that would complete a sequence."""
        found: list[int] = []
        for length, endings in self._by_length.items():
            if length <= len(tokens):
                found += endings.get(tuple(tokens[len(tokens) - length :]), ())
        return found


class _Ngrams:
    """All tokens of a request, to find the tokens that would repeat `size` of them in a row. `size` 0: none.

    Sequences are compared by hashes of 64 bits: sums over tokens times powers of `_BASE`, which wrap. So each token
    takes time in the number of tokens, whatever the size and however often they repeat.
    """

    __slots__ = ("_count", "_powers", "_prompt_tokens", "_size", "_sums", "_tokens")

    def __init__(self, size: int, prompt: Sequence[int]) -> None:
        self._size = size
        self._prompt_tokens = len(prompt)
        self._count = 0
        self._tokens: Ids = np.zeros(0, dtype=np.int64)
        self._sums: Hashes = np.zeros(1, dtype=np.uint64)  # entry i: of the tokens before i
        self._powers: Hashes = np.ones(1, dtype=np.uint64)
        if size:
            self._extend(prompt)

    def next(self, output: Sequence[int]) -> Ids:
        """The tokens that would repeat an n-gram after this answer, which only grows from call to call."""
        if not self._size:
            return np.zeros(0, dtype=np.int64)
        self._extend(output[self._count - self._prompt_tokens :])
        before, count = self._size - 1, self._count
        if count <= before:
            return np.zeros(0, dtype=np.int64)
        windows = self._sums[before : count + 1] - self._sums[: count + 1 - before]  # the last one is to be repeated
        same = windows[:-1] * self._powers[count - before : 0 : -1] == windows[-1]
        return np.unique(self._tokens[before:count][same])

    def _extend(self, new: Sequence[int]) -> None:
        begin, end = self._count, self._count + len(new)
        if end > len(self._tokens):
            size = max(64, 2 * end)
            self._tokens = np.concatenate([self._tokens[:begin], np.zeros(size - begin, dtype=np.int64)])
            self._sums = np.concatenate([self._sums[: begin + 1], np.zeros(size - begin, dtype=np.uint64)])
            self._powers = np.cumprod(np.concatenate([np.ones(1, dtype=np.uint64), np.full(size, _BASE)]))
        self._tokens[begin:end] = new
        parts = (self._tokens[begin:end].astype(np.uint64) + np.uint64(1)) * self._powers[begin:end]
        self._sums[begin + 1 : end + 1] = self._sums[begin] + np.cumsum(parts)
        self._count = end
