"""Extracts the new tokens of an answer from a worker's token event."""

from __future__ import annotations

from dataclasses import dataclass, field

from alignedserve.control.convert import timings_from_proto
from alignedserve.gateway.ledger.calls import Answer
from alignedserve.proto import gateway_pb2 as gw
from alignedserve.request import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class EarlyEvent:
    """An event that arrived before the tokens that precede it: two workers' streams have no common order."""

    event: gw.TokenEvent
    role: str
    sender_id: str


@dataclass(slots=True)
class NewTokens:
    """What an event adds to an answer. `logprobs` has one entry a token, or is empty."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None

    @property
    def any(self) -> bool:
        return bool(self.token_ids or self.prompt_logprobs or self.finish is not None)


def read_event(answer: Answer, event: gw.TokenEvent, role: str, sender_id: str) -> NewTokens:
    """Adds an event to the answer and returns what is new: tokens that the answer already has are left out.

    `event.position` must not be greater than the number of the answer's tokens.
    """
    answer.note_instance(role, sender_id, event.prefill_id, event.decode_id)
    if event.cached_tokens and not answer.tokens:
        answer.cached_tokens = event.cached_tokens
    known = len(answer.tokens) - event.position
    new = NewTokens(list(event.token_ids[known:] if known else event.token_ids))
    if event.logprobs:
        new.logprobs = [_logprobs(entry) for entry in event.logprobs[known:]]
    if event.prompt_logprobs and not answer.prompt_scored:
        answer.prompt_scored = True
        new.prompt_logprobs = [_logprobs(entry) for entry in event.prompt_logprobs]
    if event.finish_reason:
        new.finish = FinishReason(event.finish_reason)
    if event.HasField("timings"):
        answer.stopwatch = timings_from_proto(event.timings)
        if new.finish is None:
            answer.stopwatch.bubble_s = None  # it has only begun to decode
    answer.tokens.extend(new.token_ids)
    return new


def _logprobs(entry: gw.TokenLogprob) -> TokenLogprobs:
    return TokenLogprobs(entry.logprob, tuple((top.token_id, top.logprob) for top in entry.top), entry.rank)
