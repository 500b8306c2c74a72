"""The cluster's metrics under vLLM's names."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from alignedserve.gateway.metric_aliases import COUNTERS, HISTOGRAMS, WAITING, vllm_metrics
from alignedserve.metrics import Histogram, Page
from support.metrics_page import described


def page() -> str:
    scheduler, pages = Page(instance="scheduler-0"), []
    for state, count in (("queued", 1), ("prefilling", 2), ("waiting_in_pool", 30), ("prefetched", 4), ("decoding", 8)):
        scheduler.gauge(f"requests_{state}", "requests", count)
    for number in range(2):
        gateway, decode = Page(instance=f"gateway-{number}"), Page(instance=f"decode-{number}")
        ttft = Histogram((0.1, 1.0))
        for seconds in (0.05, 0.5):
            ttft.observe(seconds)
        gateway.histogram("gateway_ttft_seconds", "ttft", ttft)
        gateway.counter("gateway_prompt_tokens_total", "tokens", 100)
        for state, count in (("free", 40), ("owned", 50), ("cached", 10)):
            decode.gauge("kv_blocks", "blocks", count, store=f"decode-{number}/cache", state=state)
        decode.gauge("kv_capacity_blocks", "blocks", 100, store=f"decode-{number}/cache")
        decode.gauge("kv_capacity_blocks", "blocks", 1000, store="kv_pool-0")
        pages += [gateway.text(), decode.text()]
    return "".join([scheduler.text(), *pages])


def test_each_alias_is_of_the_whole_cluster_and_readable() -> None:
    text = vllm_metrics(page(), 'a "model"')
    found = {family.name: family for family in text_string_to_metric_families(text)}
    samples = [sample for family in found.values() for sample in family.samples]
    assert {sample.labels["model_name"] for sample in samples} == {'a "model"'}
    single = {sample.name: sample.value for sample in samples if sample.labels.keys() == {"model_name"}}
    assert single["vllm:num_requests_running"] == 8
    assert single["vllm:num_requests_waiting"] == 37
    assert single["vllm:kv_cache_usage_perc"] == 0.5
    counted: dict[str, list[tuple[str, float]]] = {}
    for sample in samples:
        if "engine" in sample.labels and "le" not in sample.labels:
            counted.setdefault(sample.name, []).append((sample.labels["engine"], sample.value))
    assert counted["vllm:prompt_tokens_total"] == [("gateway-0", 100), ("gateway-1", 100)]
    assert counted["vllm:time_to_first_token_seconds_count"] == [("gateway-0", 2), ("gateway-1", 2)]
    assert counted["vllm:time_to_first_token_seconds_sum"] == [("gateway-0", 0.55), ("gateway-1", 0.55)]
    buckets = [
        (sample.labels["engine"], sample.labels["le"], sample.value)
        for sample in found["vllm:time_to_first_token_seconds"].samples
        if sample.name.endswith("_bucket")
    ]
    bounds = (("0.1", 1), ("1.0", 2), ("+Inf", 2))
    assert buckets == [(f"gateway-{number}", *each) for number in range(2) for each in bounds]
    kinds = {name: family.type for name, family in found.items()}
    assert kinds["vllm:kv_cache_usage_perc"] == "gauge"
    assert kinds["vllm:prompt_tokens"] == "counter"
    assert kinds["vllm:request_queue_time_seconds"] == "histogram"


def test_names_are_those_of_metrics_that_there_are() -> None:
    """A wrong one would give zeros."""
    ours = {*COUNTERS.values(), *(name for name, _ in HISTOGRAMS.values())}
    ours |= {*(f"requests_{state}" for state in (*WAITING, "decoding")), "kv_capacity_blocks", "kv_blocks"}
    assert ours <= {name.removeprefix("alignedserve_") for name in described()}


def test_a_gauge_whose_source_is_missing_is_left_out() -> None:
    """As on the page of one gateway, while there is no supervisor: a 0 would draw requests to a full cluster."""
    gateway = Page(instance="gateway-0")
    gateway.counter("gateway_prompt_tokens_total", "tokens", 7)
    for text in ("", gateway.text()):
        families = list(text_string_to_metric_families(vllm_metrics(text, "tiny")))
        assert not [family.name for family in families if family.type == "gauge"]
        counted = [sample.value for family in families for sample in family.samples]
        assert counted == ([7] if text else [])
