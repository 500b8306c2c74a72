"""What a gateway has traced."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import pairwise
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, format_span_id, format_trace_id

from alignedserve.request import FinishReason, RequestSpec, Stage
from support.fake_cluster import FakeCluster
from support.gateway import RunningGateway, running_gateway

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
STAGES = ["gateway", "queue", "prefill", "pool", "prefetch", "handover", "decode"]


def traced_gateway(
    cluster: FakeCluster, *, api_key_file: str = "", **traces: Any
) -> AbstractAsyncContextManager[RunningGateway]:
    """`traces`: settings of this section."""
    return running_gateway(cluster, traces={"enabled": True, **traces}, api_key_file=api_key_file)


class Traces:
    """The spans that an exporter has got; complete when the gateway has ended."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self.spans = sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    @property
    def calls(self) -> list[ReadableSpan]:
        return [span for span in self.spans if span.kind is SpanKind.SERVER]

    @property
    def call(self) -> ReadableSpan:
        (call,) = self.calls
        return call

    def below(self, parent: ReadableSpan) -> list[ReadableSpan]:
        """By time."""
        assert parent.context is not None
        return [span for span in self.spans if span.parent and span.parent.span_id == parent.context.span_id]

    def text(self) -> str:
        """All that is in them."""
        return "\n".join(span.to_json() for span in self.spans)


def said(span: ReadableSpan) -> Mapping[str, Any]:
    assert span.attributes is not None
    return span.attributes


def names(spans: Sequence[ReadableSpan]) -> list[str]:
    return [span.name for span in spans]


def ids(span: ReadableSpan) -> tuple[str, str]:
    assert span.context is not None
    return format_trace_id(span.context.trace_id), format_span_id(span.context.span_id)


def without_gaps(stages: Sequence[ReadableSpan]) -> bool:
    return all(one.end_time == next_one.start_time for one, next_one in pairwise(stages))


async def staged(cluster: FakeCluster, spec: RequestSpec, *more: Stage) -> None:
    """Emits three tokens with the stages of real workers; `more`: those after the first stay in a running batch."""

    async def enter(stage: Stage) -> None:
        spec.stopwatch.enter(stage, time.time_ns())
        await asyncio.sleep(0.002)

    await enter(Stage.PREFILL)
    cluster.emit(spec, [100], role="prefill")
    for stage in (Stage.POOL, Stage.PREFETCH, Stage.HANDOVER, Stage.DECODE):
        await enter(stage)
    cluster.emit(spec, [101])
    for stage in more:
        await enter(stage)
    cluster.emit(spec, [102], finish=FinishReason.LENGTH)
