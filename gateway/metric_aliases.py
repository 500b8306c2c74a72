"""Names under which dashboards, autoscalers and routers of other servers look for metrics (`gateway.metric_aliases`).

vLLM's names, which the endpoint picker of the Gateway API inference extension reads by default. Each is computed from
our own metrics of the whole cluster, with the label `model_name`. The gauges have one series. Counters and histograms
have one for each process, which `engine` names, since a sum over processes falls when one of them ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from alignedserve.gateway.live.samples import Samples

WAITING = ("queued", "prefilling", "waiting_in_pool", "prefetched")
COUNTERS = {
    "prompt_tokens": "gateway_prompt_tokens_total",
    "generation_tokens": "gateway_output_tokens_total",
    "prefix_cache_queries": "prefix_cache_queried_tokens_total",
    "prefix_cache_hits": "prefix_cache_hit_tokens_total",
    "num_preemptions": "decode_evictions_total",
}
HISTOGRAMS: dict[str, tuple[str, dict[str, str]]] = {
    "time_to_first_token_seconds": ("gateway_ttft_seconds", {}),
    "inter_token_latency_seconds": ("gateway_itl_seconds", {}),
    "e2e_request_latency_seconds": ("gateway_request_seconds", {}),
    "request_queue_time_seconds": ("gateway_stage_seconds", {"stage": "queue"}),
    "request_prefill_time_seconds": ("gateway_stage_seconds", {"stage": "prefill"}),
    "request_decode_time_seconds": ("gateway_stage_seconds", {"stage": "decode"}),
}


def vllm_metrics(page: str, model: str) -> str:
    """The page of aliases for a page of the cluster's own metrics, in Prometheus' text format."""
    now = Samples(page, 0.0)
    name = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    lines: list[str] = []
    for alias, value in _gauges(now):
        lines += [*_head(alias, "gauge"), f'vllm:{alias}{{model_name="{name}"}} {value}']
    for alias, ours in COUNTERS.items():
        lines += _head(f"{alias}_total", "counter")
        for engine, value in now.by("instance", ours).items():
            lines.append(f'vllm:{alias}_total{{model_name="{name}",engine="{engine}"}} {value}')
    for alias, (ours, labels) in HISTOGRAMS.items():
        lines += [*_head(alias, "histogram"), *_histogram(now, alias, name, ours, labels)]
    return "\n".join([*lines, ""])


def _histogram(now: Samples, alias: str, name: str, ours: str, labels: Mapping[str, str]) -> Iterator[str]:
    for engine in now.by("instance", f"{ours}_count", **labels):
        mine, own = {**labels, "instance": engine}, f'model_name="{name}",engine="{engine}"'
        for bound, count in now.by("le", f"{ours}_bucket", **mine).items():
            yield f'vllm:{alias}_bucket{{{own},le="{bound}"}} {count}'
        for part in ("count", "sum"):
            yield f"vllm:{alias}_{part}{{{own}}} {now.sum(f'{ours}_{part}', **mine)}"


def _gauges(now: Samples) -> Iterator[tuple[str, float]]:
    """Without those whose source is missing: a page of one gateway alone has no requests of the cluster's."""
    if now.by("instance", "requests_decoding"):
        yield "num_requests_running", now.sum("requests_decoding")
        yield "num_requests_waiting", sum(now.sum(f"requests_{state}") for state in WAITING)
    caches = {
        its["store"]: value for its, value in now.each("kv_capacity_blocks") if its["store"].endswith("/cache")
    }  # what is cached can be taken back, so only owned blocks are in use
    owned = sum(value for its, value in now.each("kv_blocks", state="owned") if its["store"] in caches)
    if capacity := sum(caches.values()):
        yield "kv_cache_usage_perc", owned / capacity


def _head(alias: str, kind: str) -> list[str]:
    return [f"# HELP vllm:{alias} as of AlignedServe's whole cluster", f"# TYPE vllm:{alias} {kind}"]
