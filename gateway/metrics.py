"""The gateway's Prometheus metrics. Each gateway has its own registry."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from alignedserve.errors import AlignedServeError, DeadlineError, OverloadedError
from alignedserve.gateway.failures import FAULT_CODES
from alignedserve.request import FinishReason, Stage

if TYPE_CHECKING:
    from alignedserve.gateway.ledger.calls import Answer

disable_created_metrics()  # type: ignore[no-untyped-call]  # no `_created` series: they are not used

_TTFT_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
_ITL_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 100, 300)
_LAST = ("completed", "failed", "expired", "cancelled")
_OF_LINE = ("answered", "failed")
_OUTCOMES = {*FinishReason, *FAULT_CODES, OverloadedError.code, DeadlineError.code}
_STAGE_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_TOTAL_S = (0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)


class GatewayMetrics:
    """`instance` is a label of every series, so that one scrape can have the series of several gateways."""

    def __init__(self, instance: str) -> None:
        self.registry = CollectorRegistry()
        self._instance = instance
        self.stale_events = self._counter(
            "stale_events", "late token events: of requests that had ended, or of older epochs"
        )
        self.refused = self.resubmitted = 0  # requests, for the heartbeat
        self._resubmissions = self._counter("resubmissions", "requests that were submitted again after a loss")
        self.prompt_tokens = self._counter("prompt_tokens", "tokens of submitted prompts")
        self.output_tokens = self._counter("output_tokens", "tokens received from workers")
        self.unlogged = self._counter(
            "unlogged_requests", "requests without a line in the request log, because the disk was full or too slow"
        )
        self.open_requests = Gauge(
            "alignedserve_gateway_open_requests",
            "requests held now; lines of batches do not count",
            ["instance"],
            registry=self.registry,
        ).labels(instance)
        self._outcomes = Counter(
            "alignedserve_gateway_requests",
            "requests ended, by finish reason or error code",
            ["instance", "outcome"],
            registry=self.registry,
        )
        for outcome in sorted(_OUTCOMES):  # Prometheus sees no increase from a series' absence to its first 1
            self._outcomes.labels(instance, outcome)
        self.batches_running = self._gauge("batches_running", "batches that this gateway runs now")
        self.lines_in_flight = self._gauge("batch_lines_in_flight", "lines of batches that are being answered")
        self._batches = self._by("batches", "batches ended, by their last status", "status", _LAST)
        self._lines = self._by("batch_lines", "lines of batches answered, by outcome", "outcome", _OF_LINE)
        self._ttft = self._histogram("ttft_seconds", "arrival to first token", _TTFT_S)
        self._itl = self._histogram("itl_seconds", "between two tokens of an answer", _ITL_S)
        self._total = self._histogram("request_seconds", "arrival to last token", _TOTAL_S)
        stages = Histogram(
            "alignedserve_gateway_stage_seconds",
            "seconds of a request in a stage, repetitions after evictions included",
            ["instance", "stage"],
            buckets=_STAGE_S,
            registry=self.registry,
        )
        self._stages = {stage: stages.labels(instance, stage.value) for stage in Stage}

    def _counter(self, name: str, doc: str) -> Counter:
        counter = Counter(f"alignedserve_gateway_{name}", doc, ["instance"], registry=self.registry)
        return counter.labels(self._instance)

    def _gauge(self, name: str, doc: str) -> Gauge:
        gauge = Gauge(f"alignedserve_gateway_{name}", doc, ["instance"], registry=self.registry)
        return gauge.labels(self._instance)

    def _by(self, name: str, doc: str, label: str, values: tuple[str, ...]) -> dict[str, Counter]:
        """One counter with a label: its series by the label's value."""
        counter = Counter(f"alignedserve_gateway_{name}", doc, ["instance", label], registry=self.registry)
        return {value: counter.labels(self._instance, value) for value in values}

    def _histogram(self, name: str, doc: str, buckets: tuple[float, ...]) -> Histogram:
        full_name = f"alignedserve_gateway_{name}"
        histogram = Histogram(full_name, doc, ["instance"], buckets=buckets, registry=self.registry)
        return histogram.labels(self._instance)

    def on_tokens(self, answer: Answer, count: int, now_s: float) -> None:
        """`count` new tokens of an answer have arrived. Call it before `last_token_s` of the answer is updated."""
        self.output_tokens.inc(count)
        if answer.call.plan.offline:
            return
        if answer.last_token_s:
            self._itl.observe((now_s - answer.last_token_s) / count)
        else:
            self._ttft.observe(now_s - answer.call.arrival_s)

    def on_answer_end(self, answer: Answer, finish: FinishReason) -> None:
        """An answer has ended without an error."""
        self._outcomes.labels(self._instance, finish.value).inc()
        if not answer.call.plan.offline:
            self._total.observe(time.monotonic() - answer.call.arrival_s)
            for stage, seconds in answer.stopwatch.spent_s.items():
                self._stages[stage].observe(seconds)

    def on_batch_end(self, status: str) -> None:
        """This gateway has brought a batch into its last status."""
        self._batches[status].inc()

    def on_lines(self, *, answered: int, failed: int) -> None:
        """Answers of lines have been written."""
        self._lines["answered"].inc(answered)
        self._lines["failed"].inc(failed)

    def on_call_failed(self, error: AlignedServeError) -> None:
        """A call has ended with an error, or was refused; it counts once, however many answers it has."""
        self._outcomes.labels(self._instance, error.code).inc()
        self.refused += isinstance(error, OverloadedError)

    def on_resubmission(self) -> None:
        """A request has lost its workers, and is submitted again."""
        self._resubmissions.inc()
        self.resubmitted += 1

    def text(self) -> str:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry).decode()
