"""`prompt_logprobs`: the log-probabilities of a prompt's tokens, in vLLM's format."""

from __future__ import annotations

from typing import Any

from alignedserve.gateway.body.planning import CallPlan
from alignedserve.gateway.reply.answers import AnswerView
from alignedserve.gateway.reply.replies import finite
from alignedserve.request import TokenLogprobs
from alignedserve.text import Tokenizer


def prompt_scores(view: AnswerView, plan: CallPlan, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The field `prompt_logprobs`, null for the first token; no field if it was not asked for."""
    count = plan.reply.prompt_logprobs
    if count is None:
        return {}
    scored = zip(view.answer.prompt.token_ids[1:], view.prompt_scores, strict=False)
    return {"prompt_logprobs": [None, *(_entry(token, found.most(count), tokenizer) for token, found in scored)]}


def _entry(token: int, found: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """By token id: the prompt's token, then the most likely ones."""
    ranked = {other: (logprob, rank) for rank, (other, logprob) in enumerate(found.top, 1)}
    entries = {token: (found.logprob, found.rank)} | ranked
    return {
        str(one): {
            "logprob": finite(logprob),
            "rank": rank,
            "decoded_token": None if tokenizer is None else tokenizer.token_text(one),
        }
        for one, (logprob, rank) in entries.items()
    }
