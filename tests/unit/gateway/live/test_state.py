"""The state that people see, made of what processes said at two moments."""

from __future__ import annotations

from alignedserve.gateway.live.samples import Change, Samples
from alignedserve.gateway.live.state import live_state
from alignedserve.metrics import Page
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv

LINK = {"source": "kv_pool-0", "destination": "prefill-0/batch", "channel": "shared-memory"}


def page(scale: float) -> str:
    prefill, gateway = Page(instance="prefill-0"), Page(instance="gateway-0")
    prefill.counter("prefix_cache_queried_tokens_total", "queried", 100 * scale)
    for tier, tokens in (("host", 20), ("disk", 10), ("other node", 30)):
        prefill.counter("prefix_cache_hit_tokens_total", "hits", tokens * scale, tier=tier)
    prefill.counter("transfer_bytes_total", "bytes", 1000 * scale, **LINK)
    prefill.counter("transfer_copies_total", "copies", 4 * scale, **LINK)
    prefill.counter("transfer_busy_seconds_total", "seconds", 0.5 * scale, **LINK)
    prefill.counter("transfer_bytes_total", "bytes", 7, source="idle", destination="x", channel="shared-memory")
    for outcome, count in (("stop", 6), ("length", 2), ("overloaded", 3), ("request_lost", 1)):
        gateway.counter("gateway_requests_total", "requests", count * scale, outcome=outcome)
    return prefill.text() + gateway.text()


def test_rates_shares_and_channels_are_of_what_changed() -> None:
    status = sv.ClusterStatus(cluster_id="c", state="degraded", degraded=["decode-1: starting"])
    status.peers.append(sv.Peer(process=pb.ProcessKey(role="kv_pool", id="kv_pool-0"), state="ready"))
    change = Change(Samples(page(1), 0.0), Samples(page(3), 2.0))
    state = live_state(sv.LiveState(status=status), change)
    assert state["health"] == {"state": "degraded", "missing": [], "degraded": ["decode-1: starting"]}
    assert state["prefix_cache"] == {"queried_tokens_per_s": 100.0, "hit_share": 0.6, "disk_hit_share": 0.1}
    assert state["channels"] == [{**LINK, "bytes_per_s": 1000.0, "copies_per_s": 4.0, "busy_share": 0.5}]
    rates = state["rates"]
    assert (rates["requests_per_s"], rates["refused_per_s"], rates["failed_per_s"]) == (12.0, 3.0, 1.0)
    assert rates["ttft_s"] == {"p50": None, "p99": None}
    assert state["pool"] == [
        {
            "id": "kv_pool-0",
            "state": "ready",
            "free": 0,
            "owned": 0,
            "cached": 0,
            "capacity": 0,
            "pinned": 0,
            "disk": None,
        }
    ]


def test_nothing_is_known_of_a_single_moment() -> None:
    now = Samples(page(1), 0.0)
    state = live_state(sv.LiveState(), Change(now, now))
    assert set(state["rates"].values()) == {None}
    assert state["prefix_cache"]["hit_share"] is None
