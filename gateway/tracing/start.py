"""Whether traces are on, by the configuration and OpenTelemetry's standard variables, and their start."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from alignedserve.config import TracesConfig
from alignedserve.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from alignedserve.gateway.body.planning import ServedModel
    from alignedserve.gateway.tracing.tracing import Tracing

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def is_wanted(config: TracesConfig) -> bool:
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if disabled or os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
        return False
    return config.enabled or any(os.environ.get(name) for name in _ENDPOINTS)


def check_traces(config: TracesConfig) -> None:
    """Raises ConfigError if traces are wanted, and cannot be sent."""
    if is_wanted(config):
        _exporter().shutdown()


def start_tracing(config: TracesConfig, gateway_id: str, model: ServedModel) -> Tracing | None:
    """None: traces are off. Raises ConfigError as `check_traces`."""
    if not is_wanted(config):
        return None
    exporter = _exporter()
    from alignedserve.gateway.tracing.pipeline import make_provider
    from alignedserve.gateway.tracing.tracing import Tracing

    provider = make_provider(config.sample, gateway_id, exporter)
    return Tracing(provider, gateway_id, model, content=config.content)


def _exporter() -> SpanExporter:
    try:
        from alignedserve.gateway.tracing import pipeline

        return pipeline.make_exporter()
    except ImportError as error:
        raise ConfigError(
            "traces need OpenTelemetry's exporter: `pip install 'alignedserve[traces]'`, or switch them off: unset "
            f"traces.enabled and OTEL_EXPORTER_OTLP_ENDPOINT, or set OTEL_SDK_DISABLED=true ({error})"
        ) from error
