"""Makes the spans of a call when it ends: for each answer one a stage, with the instance that it was at."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.trace import Span, StatusCode, Tracer, set_span_in_context

from alignedserve.gateway.live.timeline import LOST, UNTIL_FIRST
from alignedserve.gateway.tracing.attributes import failure_of, of_answer, of_call, of_one_among_several
from alignedserve.gateway.tracing.bars import Bar, bars_of, evicted_ns, first_token_ns
from alignedserve.gateway.tracing.content import content_of

if TYPE_CHECKING:
    from alignedserve.gateway.body.planning import ServedModel
    from alignedserve.gateway.ledger.calls import Answer, Call
    from alignedserve.gateway.tracing.current import CallTrace

_GATEWAY = "gateway"
# The role that has a request in a stage; "decode" in the others.
_ROLES = {
    _GATEWAY: _GATEWAY,
    LOST: _GATEWAY,
    "queue": "scheduler",
    "prefill": "prefill",
    UNTIL_FIRST: "prefill",
    "pool": "kv_pool",
}


class Spans:
    """Of one gateway."""

    def __init__(self, tracer: Tracer, gateway_id: str, model: ServedModel) -> None:
        self._tracer, self._gateway_id, self._model = tracer, gateway_id, model

    def end(self, trace: CallTrace) -> None:
        """Ends the call's span, and makes those below it."""
        span, call, now_ns = trace.span, trace.call, time.time_ns()
        try:
            span.update_name(f"{trace.operation} {self._model.name}")
            span.set_attribute("gen_ai.operation.name", trace.operation)
            if (failed := failure_of(trace)) is not None:
                span.set_attribute("error.type", failed[0])
                if failed[1]:
                    span.set_status(StatusCode.ERROR, failed[0])
            if call is not None:
                span.set_attributes(of_call(call, self._model.name))
                if trace.content:
                    span.set_attributes(content_of(call, trace.messages, self._model.tokenizer))
                self._add_stages(trace, call, now_ns)
        finally:
            span.end(now_ns)

    def _add_stages(self, trace: CallTrace, call: Call, now_ns: int) -> None:
        below = set_span_in_context(trace.span)
        stages = [bars_of(answer, now_ns) for answer in call.answers]
        sent_ns = min((bars[0].begin_ns for bars in stages if bars), default=call.arrival_ns)
        self._add(below, Bar(_GATEWAY, self._gateway_id, trace.begun_ns, sent_ns))
        for answer, bars in zip(call.answers, stages, strict=True):
            if len(call.answers) == 1:
                self._add_answer(trace.span, below, answer, bars)
                continue
            span = self._tracer.start_span(
                "answer", below, attributes=of_one_among_several(answer), start_time=call.arrival_ns
            )
            self._add_answer(span, set_span_in_context(span), answer, bars)
            span.end(bars[-1].end_ns if bars else now_ns)

    def _add_answer(self, span: Span, below: Context, answer: Answer, bars: Sequence[Bar]) -> None:
        span.set_attributes(of_answer(answer))
        for epoch, (lost_ns, reason) in enumerate(answer.losses, answer.epoch - len(answer.losses)):
            span.add_event("loss", {"alignedserve.epoch": epoch, "alignedserve.reason": reason}, lost_ns)
        if answer.first_token_s:
            span.add_event("first_token", timestamp=first_token_ns(answer))
        for moment_ns in evicted_ns(answer):
            span.add_event("eviction", timestamp=moment_ns)
        for bar in bars:
            self._add(below, bar)

    def _add(self, below: Context, bar: Bar) -> None:
        attributes = {"alignedserve.stage": bar.stage, "alignedserve.role": _ROLES.get(bar.stage, "decode")}
        if bar.instance:
            attributes["alignedserve.instance"] = bar.instance
        span = self._tracer.start_span(bar.stage, below, attributes=attributes, start_time=bar.begin_ns)
        span.end(max(bar.begin_ns, bar.end_ns))  # clocks of two nodes may differ
