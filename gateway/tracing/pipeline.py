"""Where spans go: OpenTelemetry's own batches, in a thread of theirs, over OTLP by the standard variables."""

from __future__ import annotations

import importlib
import logging
import os
import time

from opentelemetry.sdk.environment_variables import (
    OTEL_EXPORTER_OTLP_PROTOCOL,
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL,
    OTEL_TRACES_SAMPLER,
)
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

from alignedserve import __version__
from alignedserve.errors import ConfigError

logger = logging.getLogger(__name__)

COMPLAIN_EVERY_S = 60.0
_MODULES = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}


class _Complaints(logging.Handler):
    """Passes on what OpenTelemetry complains of. A dead collector would make several lines for each batch."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said_s = float("-inf")

    def emit(self, record: logging.LogRecord) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s >= COMPLAIN_EVERY_S:
            self._said_s = now_s
            logger.warning("traces: %s", record.getMessage())


def make_exporter() -> SpanExporter:
    """The exporter of the protocol that the variables name. Raises ConfigError, and ImportError if it is missing."""
    said = os.environ.get(OTEL_EXPORTER_OTLP_TRACES_PROTOCOL) or os.environ.get(OTEL_EXPORTER_OTLP_PROTOCOL)
    protocol = (said or "http/protobuf").strip()
    if protocol not in _MODULES:
        raise ConfigError(f"{OTEL_EXPORTER_OTLP_PROTOCOL} must be one of {', '.join(_MODULES)}; got {protocol!r}")
    try:
        exporter: SpanExporter = importlib.import_module(_MODULES[protocol]).OTLPSpanExporter()
    except ValueError as error:
        raise _unusable(error) from error
    return exporter


def make_provider(sample: float, gateway_id: str, exporter: SpanExporter) -> TracerProvider:
    """`sample`: of calls whose caller has not decided, unless OTEL_TRACES_SAMPLER is set. Raises ConfigError."""
    own = {"service.name": "alignedserve", "service.version": __version__, "service.instance.id": gateway_id}
    said = OTELResourceDetector().detect().attributes or {}
    sampler = None if os.environ.get(OTEL_TRACES_SAMPLER) else ParentBasedTraceIdRatio(sample)
    try:
        # At exit it would wait for a dead collector for half a minute; `Tracing.close` waits for two seconds.
        provider = TracerProvider(sampler, Resource.create({**own, **said}), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter))
    except ValueError as error:
        raise _unusable(error) from error
    library = logging.getLogger("opentelemetry")
    library.handlers[:], library.propagate = [_Complaints()], False
    return provider


def _unusable(error: ValueError) -> ConfigError:
    return ConfigError(f"a variable of OpenTelemetry (OTEL_*) cannot be used: {error}")
