"""What spans say of a call and its answers, under OpenTelemetry's names (`gen_ai.*`) or ours. No text of a client."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from alignedserve.errors import CancelledError, DeadlineError
from alignedserve.gateway.failures import as_error
from alignedserve.gateway.tracing.bars import evicted_ns
from alignedserve.request import FinishReason

if TYPE_CHECKING:
    from alignedserve.gateway.ledger.calls import Answer, Call
    from alignedserve.gateway.tracing.current import CallTrace

PROVIDER = "alignedserve"

Attributes = dict[str, Any]


def of_call(call: Call, model: str) -> Attributes:
    plan, sampling = call.plan, call.plan.prompts[0].sampling
    first_s = min((answer.first_token_s for answer in call.answers if answer.first_token_s), default=None)
    found: Attributes = {
        "gen_ai.response.id": plan.id,
        "gen_ai.response.model": model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.stream": plan.reply.stream,
        "gen_ai.usage.input_tokens": sum(len(prompt.token_ids) for prompt in plan.prompts),
        "gen_ai.usage.output_tokens": 0 if plan.scored_only else sum(len(answer.tokens) for answer in call.answers),
        "gen_ai.usage.cache_read.input_tokens": _cached_tokens(call),
        "alignedserve.request.stop_sequences": len(sampling.stop),
        "alignedserve.request.priority": plan.priority,
        "alignedserve.resumed": bool(plan.resume),
    }
    optional: Attributes = {
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.choice.count": plan.n if plan.n > 1 else 0,
        "gen_ai.conversation.id": call.session,
        "gen_ai.response.finish_reasons": [_finish(answer) for answer in call.answers if answer.finish is not None],
    }
    if call.sent_id:
        optional["http.request.header.x-request-id"] = [call.sent_id]
    if first_s is not None:
        found["alignedserve.time_to_first_token_s"] = first_s - call.arrival_s
        if plan.reply.stream:
            found["gen_ai.response.time_to_first_chunk"] = first_s - call.arrival_s
    return found | {name: value for name, value in optional.items() if value}


def of_answer(answer: Answer) -> Attributes:
    found: Attributes = {
        "alignedserve.request_id": answer.request_id,  # as in the logs of all processes
        "alignedserve.epoch": answer.epoch,
        "alignedserve.evictions": len(evicted_ns(answer)),
    }
    places = {"alignedserve.prefill_id": answer.prefill_id, "alignedserve.decode_id": answer.decode_id}
    found |= {name: value for name, value in places.items() if value}
    if answer.stopwatch.bubble_s is not None:
        found["alignedserve.bubble_s"] = answer.stopwatch.bubble_s
    return found


def of_one_among_several(answer: Answer) -> Attributes:
    """What `of_call` has as a sum."""
    found: Attributes = {"alignedserve.answer": answer.index, "gen_ai.usage.output_tokens": len(answer.tokens)}
    if answer.finish is not None:
        found["gen_ai.response.finish_reasons"] = [_finish(answer)]
    return found


def failure_of(trace: CallTrace) -> tuple[str, bool] | None:
    """An error's code, and whether it is the server's; None if the call has not failed.

    Messages of errors may quote what the client has sent.
    """
    error = trace.error if trace.call is None or trace.call.error is None else trace.call.error
    if error is None:
        return None
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return CancelledError.code, False
    found = as_error(error)
    return found.code, found.http_status >= 500 or isinstance(found, DeadlineError)


def _finish(answer: Answer) -> str:
    assert answer.finish is not None
    return "tool_calls" if answer.calls_tools and answer.finish is FinishReason.STOP else answer.finish.value


def _cached_tokens(call: Call) -> int:
    n = call.plan.n
    return sum(
        max(answer.cached_tokens for answer in call.answers[first : first + n])
        for first in range(0, len(call.answers), n)
    )
