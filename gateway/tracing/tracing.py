"""The traces of one gateway: decides about each call when it begins, and makes its spans when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanKind, format_span_id, format_trace_id
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from alignedserve import __version__, logs
from alignedserve.gateway.tracing.attributes import PROVIDER
from alignedserve.gateway.tracing.current import CallTrace, current_trace
from alignedserve.gateway.tracing.spans import Spans

if TYPE_CHECKING:
    from alignedserve.gateway.body.planning import ServedModel

logger = logging.getLogger(__name__)

FLUSH_S = 2.0
_HEADERS = ("traceparent", "tracestate")

Headers = Iterable[tuple[str | bytes, str | bytes]]


class Tracing:
    """`content`: whether prompts and answers are in the spans."""

    def __init__(self, provider: TracerProvider, gateway_id: str, model: ServedModel, *, content: bool) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("alignedserve", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model = model
        self._content = content
        self._spans = Spans(self._tracer, gateway_id, model)

    @contextlib.contextmanager
    def call(self, operation: str, headers: Headers, attributes: Mapping[str, str]) -> Iterator[CallTrace | None]:
        """Encloses the handling of a client's call; None if it is not sampled. `headers` may have `traceparent`."""
        trace = self._begin(operation, headers, attributes)
        # Never reset: the context ends with the call, and a generator may be closed in another one.
        current_trace.set(trace)
        logs.trace.set(None if trace is None else trace.ids)
        if trace is None:
            yield None
            return
        try:
            yield trace
        except BaseException as error:
            trace.error = trace.error or error
            raise
        finally:
            self._end(trace)

    async def close(self) -> None:
        """Sends what is left, for at most FLUSH_S."""
        thread = threading.Thread(target=self._provider.shutdown, name="traces-end", daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, FLUSH_S)

    def _begin(self, operation: str, headers: Headers, attributes: Mapping[str, str]) -> CallTrace | None:
        begun_ns, model = time.time_ns(), self._model.name
        known = {"gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER, "gen_ai.request.model": model}
        span = self._tracer.start_span(
            f"{operation} {model}",
            self._propagator.extract(_carrier(headers)),
            SpanKind.SERVER,
            {**known, **attributes},
            start_time=begun_ns,
        )
        context = span.get_span_context()
        if not context.trace_flags.sampled or not span.is_recording():
            return None
        ids = format_trace_id(context.trace_id), format_span_id(context.span_id)
        header = f"00-{ids[0]}-{ids[1]}-{context.trace_flags:02x}"
        return CallTrace(span, ids, header, operation, self._content, begun_ns)

    def _end(self, trace: CallTrace) -> None:
        try:
            self._spans.end(trace)
        except Exception:  # the client has its answer
            logger.exception("the spans of a call could not be made")


def _carrier(headers: Headers) -> dict[str, list[str]]:
    """The headers of the trace's context. A parent that is sent twice is none."""
    found: dict[str, list[str]] = {}
    for name, value in headers:
        key = name.decode("latin-1") if isinstance(name, bytes) else name
        if key in _HEADERS:
            found.setdefault(key, []).append(value.decode("latin-1") if isinstance(value, bytes) else value)
    return found if len(found.get("traceparent", ())) == 1 else {}
