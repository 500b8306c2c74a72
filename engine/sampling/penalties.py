"""The tokens that a request has used, updated token by token for the repetition penalties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from alignedserve.request import SamplingParams


class PenaltyState:
    """Distinct tokens of one request's prompt and output, and how often each is in its output.

    Creation takes time in the prompt's length once; each `update` only in the number of new tokens. The caller keeps
    the object while the request decodes.
    """

    __slots__ = ("_counts", "_ids", "_seen_outputs", "_slots", "_used")

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        distinct = list(dict.fromkeys(prompt_token_ids))
        self._slots = {token: slot for slot, token in enumerate(distinct)}
        self._used = len(distinct)
        capacity = max(64, 2 * self._used)
        self._ids = np.zeros(capacity, dtype=np.int64)
        self._ids[: self._used] = distinct
        self._counts = np.zeros(capacity, dtype=np.float32)
        self._seen_outputs = 0

    def update(self, output_token_ids: Sequence[int]) -> None:
        """Count the tokens of `output_token_ids` that were added since the last call."""
        for token in output_token_ids[self._seen_outputs :]:
            slot = self._slots.get(token)
            if slot is None:
                slot = self._slots[token] = self._used
                self._used += 1
                if slot == len(self._ids):
                    self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                    self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
                self._ids[slot] = token
            self._counts[slot] += 1.0
        self._seen_outputs = len(output_token_ids)

    def apply(self, logits: torch.Tensor, sampling: SamplingParams) -> None:
        """Apply the penalties to one row of logits `[vocab_size]` in place: repetition, then presence and frequency.

        Repetition follows transformers: for tokens of prompt and output, positive logits are divided and negative ones
        multiplied. Presence and frequency follow OpenAI: they are subtracted for tokens of the output.
        """
        ids = torch.from_numpy(self._ids[: self._used]).to(logits.device)
        counts = torch.from_numpy(self._counts[: self._used]).to(logits.device)
        values = logits[ids]
        if sampling.repetition_penalty != 1.0:
            penalty = sampling.repetition_penalty
            values = torch.where(values < 0, values * penalty, values / penalty)
        if sampling.presence_penalty or sampling.frequency_penalty:
            values = values - counts * sampling.frequency_penalty - (counts > 0) * sampling.presence_penalty
        logits[ids] = values


def needs_penalties(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
