"""The state that people see, made of what processes said at two moments."""

from __future__ import annotations

import math

import pytest

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
            "free": None,
            "owned": None,
            "cached": None,
            "capacity": None,
            "pinned": None,
            "disk": None,
        }
    ]


def test_the_bubble_is_as_learned_where_no_cost_model_predicts_it() -> None:
    scheduler = Page(instance="scheduler-0")
    for name, share in (("decode-0", 0.2), ("decode-1", 0.4), ("decode-2", math.nan)):
        scheduler.gauge("decode_unequal_lengths_share", "share", share, decode=name)
    status = sv.ClusterStatus(
        peers=[sv.Peer(process=pb.ProcessKey(role="decode", id=f"decode-{number}")) for number in (0, 2)]
    )

    def bubbles(before: str, now: str) -> list[tuple[float | None, bool]]:
        state = live_state(sv.LiveState(status=status), Change(Samples(before, 0.0), Samples(now, 2.0)))
        return [(one["bubble_share"], one["bubble_learned"]) for one in (state["rates"], *state["decode"])]

    learned = scheduler.text()
    assert bubbles(learned, learned) == [(pytest.approx(0.3), True), (0.2, True), (None, False)]
    pages = []
    for balanced_s, predicted_s in ((1.0, 1.0), (1.5, 2.0)):
        pages.append(meters("decode-0", balanced_s, predicted_s))
    assert bubbles(*pages) == [(0.5, False), (0.5, False), (None, False)]


def meters(instance: str, balanced_s: float, predicted_s: float) -> str:
    """What a decode instance's meter shows of iterations with these predicted times."""
    decode = Page(instance=instance)
    decode.gauge("iteration_bubble_seconds_sum", "seconds", predicted_s - balanced_s)  # a histogram's
    decode.counter("iteration_balanced_seconds_total", "seconds", balanced_s)
    decode.counter("iteration_predicted_seconds_total", "seconds", predicted_s)
    return decode.text()


def test_a_bubble_below_0_is_no_new_process() -> None:
    status = sv.ClusterStatus(peers=[sv.Peer(process=pb.ProcessKey(role="decode", id="decode-0"))])
    change = Change(Samples(meters("decode-0", 60.0, 100.0), 0.0), Samples(meters("decode-0", 61.5, 101.0), 2.0))
    state = live_state(sv.LiveState(status=status), change)  # the sum of bubbles fell from 40 s to 39.5 s
    assert [one["bubble_share"] for one in (state["rates"], *state["decode"])] == [pytest.approx(-0.5)] * 2


def test_nothing_is_known_of_a_single_moment() -> None:
    now = Samples(page(1), 0.0)
    state = live_state(sv.LiveState(), Change(now, now))
    assert set(state["rates"].values()) == {None}
    assert state["prefix_cache"]["hit_share"] is None


def test_rates_of_gateways_are_unknown_while_the_page_has_none() -> None:
    before, now = page(1) + meters("decode-0", 1.0, 1.0), meters("decode-0", 1.5, 2.0)
    rates = live_state(sv.LiveState(), Change(Samples(before, 0.0), Samples(now, 2.0)))["rates"]
    assert (rates.pop("bubble_share"), rates.pop("bubble_learned")) == (0.5, False)
    assert set(rates.values()) == {None}


def test_what_no_process_has_told_is_unknown_and_not_zero() -> None:
    keys = [pb.ProcessKey(role=role, id=f"{role}-0") for role in ("decode", "prefill", "kv_pool")]
    status = sv.ClusterStatus(peers=[sv.Peer(process=key, state="starting") for key in keys])
    unknown = live_state(sv.LiveState(status=status), Change(Samples("", 0.0), Samples("", 1.0)))
    assert set(unknown["requests"].values()) == {None}
    assert unknown["waiting"] is None
    (decode,), (prefill,) = unknown["decode"], unknown["prefill"]
    for name in ("lengths", "batch", "max_running", "candidates", "iterations_per_s", "evictions_per_s"):
        assert decode[name] is None, name
    assert set(decode["cache"].values()) == {None}
    assert {prefill[name] for name in ("pending_tokens", "passes_per_s", "busy_share")} == {None}

    scheduler, instance = Page(instance="scheduler-0"), Page(instance="decode-0")
    scheduler.gauge("requests_queued", "requests", 0)
    instance.gauge("kv_blocks", "blocks", 8, store="decode-0/cache", state="free")
    instance.counter("decode_iterations_total", "iterations", 0)
    page, lives = scheduler.text() + instance.text(), {"scheduler-0": '{"waiting": [], "candidates": {}}'}
    state = live_state(sv.LiveState(status=status, lives=lives), Change(Samples(page, 0.0), Samples(page, 1.0)))
    assert (state["requests"]["queued"], state["requests"]["decoding"], state["waiting"]) == (0, None, [])
    assert state["decode"][0]["cache"] == {"free": 8, "owned": 0, "cached": 0, "capacity": None}
    assert state["decode"][0]["iterations_per_s"] == 0.0
