"""The trace of a request that real workers served: its stages cover its life, and name the instances."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from alignedserve.cluster.local import LocalCluster
from alignedserve.config_sources import from_tree
from alignedserve.gateway.tracing import pipeline
from support.gateway import http_to, joined_gateway
from support.traces import STAGES, TRACE_ID, TRACEPARENT, Traces, ids, names, said, without_gaps

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]

TREE = {
    "cluster": {"device": "cpu", "threads": 1, "prefill": 2, "decode": 2},
    "kv_pool": {"size_gib": 0.1},
    "traces": {"enabled": True},
}


async def test_stages_cover_the_life_of_a_request_and_name_its_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(pipeline, "make_exporter", lambda: exporter)
    async with LocalCluster(from_tree(TREE)) as cluster:
        await cluster.wait_ready()
        async with joined_gateway(cluster.join_info()) as gateway, http_to(gateway, 60.0) as http:

            async def ask(number: int) -> dict[str, Any]:
                body = {"prompt": [100 + number] * 40, "max_tokens": 12, "ignore_eos": True, "include_timings": True}
                answer = await http.post("/v1/completions", json=body, headers={"traceparent": TRACEPARENT})
                assert answer.status_code == 200, answer.text
                return dict(answer.json())

            await gateway.wait_linked(20.0)
            began_ns = time.time_ns()
            answers = {answer["id"]: answer for answer in await asyncio.gather(*map(ask, range(6)))}
            ended_ns = time.time_ns()
    traces = Traces(exporter)
    assert {said(call)["gen_ai.response.id"] for call in traces.calls} == answers.keys()
    assert {ids(span)[0] for span in traces.spans} == {TRACE_ID}
    for call in traces.calls:
        timings = answers[said(call)["gen_ai.response.id"]]["timings"]
        stages = traces.below(call)
        assert names(stages) == STAGES
        assert without_gaps(stages)
        first_ns, last_ns = stages[0].start_time or 0, stages[-1].end_time or 0
        assert began_ns <= first_ns == call.start_time < last_ns <= min(call.end_time or 0, ended_ns)
        assert (call.end_time or 0) - last_ns < 1_000_000_000  # until the answer was sent
        places = {span.name: said(span)["alignedserve.instance"] for span in stages}
        assert (places["gateway"], places["prefill"]) == ("gateway-0", timings["prefill_id"])
        assert {places[name] for name in ("prefetch", "handover", "decode")} == {timings["decode_id"]}
        for span in stages[1:]:
            took_s = ((span.end_time or 0) - (span.start_time or 0)) / 1e9
            assert took_s == pytest.approx(timings[f"{span.name}_s"], abs=0.02)
