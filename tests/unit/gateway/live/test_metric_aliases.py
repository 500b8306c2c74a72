"""The cluster's metrics under vLLM's names."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from alignedserve.gateway.metric_aliases import vllm_metrics
from alignedserve.metrics import Histogram, Page


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
    single = {
        sample.name: sample.value
        for family in found.values()
        for sample in family.samples
        if sample.labels == {"model_name": 'a "model"'}
    }
    assert single["vllm:num_requests_running"] == 8
    assert single["vllm:num_requests_waiting"] == 37
    assert single["vllm:kv_cache_usage_perc"] == 0.5
    assert single["vllm:prompt_tokens_total"] == 200
    assert single["vllm:time_to_first_token_seconds_count"] == 4
    assert single["vllm:time_to_first_token_seconds_sum"] == 1.1
    buckets = {
        sample.labels["le"]: sample.value
        for sample in found["vllm:time_to_first_token_seconds"].samples
        if sample.name.endswith("_bucket")
    }
    assert buckets == {"0.1": 2, "1.0": 4, "+Inf": 4}
    kinds = {name: family.type for name, family in found.items()}
    assert kinds["vllm:kv_cache_usage_perc"] == "gauge"
    assert kinds["vllm:prompt_tokens"] == "counter"
    assert kinds["vllm:request_queue_time_seconds"] == "histogram"


def test_an_empty_page_gives_zeros() -> None:
    text = vllm_metrics("", "tiny")
    values = [sample.value for family in text_string_to_metric_families(text) for sample in family.samples]
    assert values
    assert not any(values)
