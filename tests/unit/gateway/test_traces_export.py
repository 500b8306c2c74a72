"""Where traces go: OTLP by OpenTelemetry's standard variables, and what a collector that does not answer costs."""

from __future__ import annotations

import gzip
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from alignedserve.cluster.launch.environment import telemetry_environment
from alignedserve.config import TracesConfig
from alignedserve.errors import ConfigError
from alignedserve.gateway.tracing import pipeline
from alignedserve.gateway.tracing.start import check_traces, is_wanted
from support.fake_cluster import FakeCluster
from support.gateway import running_gateway
from support.traces import TRACE_ID, TRACEPARENT, traced_gateway

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
BODY = {"prompt": "a b c", "max_tokens": 3}
NO_COLLECTOR = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in telemetry_environment():
        monkeypatch.delenv(name)
    return monkeypatch


@dataclass
class Collector:
    """What a collector has got: requests, and the headers of each."""

    url: str = ""
    requests: list[otlp.ExportTraceServiceRequest] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    @property
    def spans(self) -> list[Any]:
        scopes = [scope for request in self.requests for one in request.resource_spans for scope in one.scope_spans]
        return [span for scope in scopes for span in scope.spans]

    @property
    def resource(self) -> dict[str, str]:
        attributes = self.requests[0].resource_spans[0].resource.attributes
        return {attribute.key: attribute.value.string_value for attribute in attributes}


@pytest.fixture
def over_http() -> Iterator[Collector]:
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            found.requests.append(otlp.ExportTraceServiceRequest.FromString(body))
            found.headers.append({"path": self.path, **{name.lower(): value for name, value in self.headers.items()}})
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield found
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def over_grpc() -> Iterator[Collector]:
    found = Collector()

    class Service(otlp_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> otlp.ExportTraceServiceResponse:
            found.requests.append(request)
            found.headers.append(dict(context.invocation_metadata()))
            return otlp.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    otlp_grpc.add_TraceServiceServicer_to_server(Service(), server)  # type: ignore[no-untyped-call]
    found.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield found
    server.stop(0).wait()


async def post(url: str, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, timeout=20.0) as http:
        return await http.post("/v1/completions", json=BODY, headers=headers)


@pytest.mark.parametrize("protocol", ["", "http/protobuf", "grpc"])
async def test_spans_reach_a_collector_by_the_variables_alone(
    cluster: FakeCluster, environ: pytest.MonkeyPatch, request: pytest.FixtureRequest, protocol: str
) -> None:
    collector: Collector = request.getfixturevalue("over_grpc" if protocol == "grpc" else "over_http")
    environ.setenv(ENDPOINT, collector.url)
    environ.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    environ.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=7")
    environ.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=tests")
    async with running_gateway(cluster) as gateway:
        assert (await post(gateway.url, traceparent=TRACEPARENT)).status_code == 200
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE_ID}
    (call,) = [span for span in collector.spans if span.name == "text_completion tiny"]
    assert {span.parent_span_id for span in collector.spans if span is not call} == {call.span_id}
    said = {attribute.key: attribute.value for attribute in call.attributes}
    assert said["gen_ai.usage.output_tokens"].int_value == 3
    assert collector.headers[0]["x-tenant"] == "7"
    assert protocol == "grpc" or collector.headers[0]["path"] == "/v1/traces"
    resource = collector.resource
    assert (resource["service.name"], resource["service.instance.id"]) == ("alignedserve", "gateway-0")
    assert resource["deployment.environment.name"] == "tests"


async def test_the_variables_name_the_service_and_the_sampler(
    cluster: FakeCluster, environ: pytest.MonkeyPatch, over_http: Collector
) -> None:
    environ.setenv(ENDPOINT, over_http.url)
    environ.setenv("OTEL_SERVICE_NAME", "chat")
    environ.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    environ.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    async with running_gateway(cluster, traces={"sample": 1.0}) as gateway:
        assert "traceparent" not in (await post(gateway.url)).headers
        assert "traceparent" in (await post(gateway.url, traceparent=TRACEPARENT)).headers
    assert {span.trace_id.hex() for span in over_http.spans} == {TRACE_ID}
    assert over_http.resource["service.name"] == "chat"


async def test_a_collector_that_is_away_costs_one_warning(
    cluster: FakeCluster, environ: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environ.setenv(ENDPOINT, NO_COLLECTOR)
    environ.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    async with running_gateway(cluster) as gateway:
        for _ in range(20):
            assert (await post(gateway.url)).status_code == 200
        await cluster.wait_for(lambda: "traces: " in caplog.text, timeout_s=20.0)
        began_s = time.monotonic()
        assert gateway.server.tracing is not None
        await gateway.server.tracing.close()
        assert time.monotonic() - began_s < 4.0
    said = [record for record in caplog.records if record.name == pipeline.logger.name]
    assert [record.levelno for record in said] == [logging.WARNING]
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


class Stuck(SpanExporter):
    """Takes no batch until `go`."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.go.wait(60.0)
        return SpanExportResult.SUCCESS


async def test_a_full_queue_drops_spans_and_no_request(cluster: FakeCluster, environ: pytest.MonkeyPatch) -> None:
    environ.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    environ.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    stuck = Stuck()
    environ.setattr(pipeline, "make_exporter", lambda: stuck)
    try:
        async with traced_gateway(cluster) as gateway:
            for _ in range(10):
                assert (await post(gateway.url)).status_code == 200
    finally:
        stuck.go.set()


@pytest.mark.parametrize(
    ("variables", "config", "wanted"),
    [
        ({}, TracesConfig(), False),
        ({}, TracesConfig(enabled=True), True),
        ({ENDPOINT: NO_COLLECTOR}, TracesConfig(), True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": NO_COLLECTOR}, TracesConfig(), True),
        ({ENDPOINT: ""}, TracesConfig(), False),
        ({ENDPOINT: NO_COLLECTOR, "OTEL_SDK_DISABLED": "true"}, TracesConfig(enabled=True), False),
        ({ENDPOINT: NO_COLLECTOR, "OTEL_TRACES_EXPORTER": "none"}, TracesConfig(enabled=True), False),
    ],
)
def test_what_switches_traces_on(
    environ: pytest.MonkeyPatch, variables: dict[str, str], config: TracesConfig, wanted: bool
) -> None:
    for name, value in variables.items():
        environ.setenv(name, value)
    assert is_wanted(config) is wanted


def test_without_the_extra_the_start_ends_with_what_to_install(environ: pytest.MonkeyPatch) -> None:
    environ.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    check_traces(TracesConfig())
    with pytest.raises(ConfigError, match=r"pip install 'alignedserve\[traces\]'"):
        check_traces(TracesConfig(enabled=True))


async def test_variables_that_cannot_be_used_are_named(cluster: FakeCluster, environ: pytest.MonkeyPatch) -> None:
    environ.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL must be one of http/protobuf, grpc"):
        check_traces(TracesConfig(enabled=True))
    environ.delenv("OTEL_EXPORTER_OTLP_PROTOCOL")
    environ.setenv("OTEL_SPAN_EVENT_COUNT_LIMIT", "many")
    with pytest.raises(ConfigError, match=r"OTEL_\*.*OTEL_SPAN_EVENT_COUNT_LIMIT"):
        async with traced_gateway(cluster):
            pass


def test_gateways_on_all_nodes_get_the_variables_of_the_command(environ: pytest.MonkeyPatch) -> None:
    environ.setenv(ENDPOINT, NO_COLLECTOR)
    environ.setenv("OTEL_SERVICE_NAME", "chat")
    assert telemetry_environment() == {ENDPOINT: NO_COLLECTOR, "OTEL_SERVICE_NAME": "chat"}
    assert telemetry_environment().items() <= os.environ.items()
