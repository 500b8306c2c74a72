"""The state that the live page and `alignedserve top` show: the cluster at one moment, from what its processes said."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from alignedserve.errors import OverloadedError
from alignedserve.gateway.failures import FAULT_CODES
from alignedserve.gateway.health import role_entry
from alignedserve.gateway.live.samples import Change, Samples
from alignedserve.proto import supervisor_pb2 as sv

MOST_EVENTS = 100
ENDED = "gateway_requests_total"
_GATEWAY_RATES = (
    "requests_per_s",
    "output_tokens_per_s",
    "prompt_tokens_per_s",
    "failed_per_s",
    "refused_per_s",
    "ttft_s",
    "itl_s",
)
_RATES = (*_GATEWAY_RATES, "bubble_share", "bubble_learned")
_STATES = ("queued", "prefilling", "waiting_in_pool", "prefetched", "decoding")
_BLOCKS = ("free", "owned", "cached")

Json = dict[str, Any]


def live_state(live: sv.LiveState, change: Change) -> Json:
    """The cluster's state as JSON. `change`: of its metrics, up to now. Fields without data are None.

    docs/operations/dashboard.md describes the fields.
    """
    now, status = change.now, live.status
    lives = {name: _read(text) for name, text in live.lives.items()}
    scheduler: Json = next((found for name, found in lives.items() if name.startswith("scheduler")), {})
    peers = {
        role: [peer for peer in status.peers if peer.process.role == role] for role in ("prefill", "decode", "kv_pool")
    }
    return {
        "cluster": status.cluster_id,
        "health": {"state": status.state, "missing": list(status.missing), "degraded": list(status.degraded)},
        "rates": _rates(change),
        "requests": {
            "open": _count(now, "gateway_open_requests"),
            **{state: _count(now, f"requests_{state}") for state in _STATES},
        },
        "waiting": scheduler.get("waiting"),
        "decode": [
            _decode(peer, change, lives.get(peer.process.id, {}), scheduler.get("candidates", {}))
            for peer in peers["decode"]
        ],
        "prefill": [_prefill(peer, change) for peer in peers["prefill"]],
        "pool": [_shard(peer, now) for peer in peers["kv_pool"]],
        "prefix_cache": _prefix_cache(change),
        "channels": _channels(change),
        "roles": [role_entry(peer) for peer in status.peers],
        "events": [{"unix_s": one.unix_s, "level": one.level, "text": one.text} for one in live.events[-MOST_EVENTS:]],
    }


def _read(text: str) -> Json:
    found = json.loads(text)
    return found if isinstance(found, dict) else {}


def _rates(change: Change) -> Json:
    """Those of gateways are None until a new supervisor has heard of one."""
    if change.before is change.now:
        return dict.fromkeys(_RATES)
    gateways = _gateway_rates(change) if change.now.has(ENDED) else dict.fromkeys(_GATEWAY_RATES)
    return {**gateways, **_bubble(change)}


def _gateway_rates(change: Change) -> Json:
    ended = change.grown("outcome", ENDED)
    refused = ended.get(OverloadedError.code, 0.0)
    failed = sum(ended.get(code, 0.0) for code in FAULT_CODES)
    ttft, itl = (change.quantiles(f"gateway_{name}_seconds", 0.5, 0.99) for name in ("ttft", "itl"))
    return {
        "requests_per_s": sum(ended.values()) / change.seconds,
        "output_tokens_per_s": change.rate("gateway_output_tokens_total"),
        "prompt_tokens_per_s": change.rate("gateway_prompt_tokens_total"),
        "failed_per_s": failed / change.seconds,
        "refused_per_s": refused / change.seconds,
        "ttft_s": {"p50": ttft[0], "p99": ttft[1]},
        "itl_s": {"p50": itl[0], "p99": itl[1]},
    }


def _bubble(change: Change, decode_id: str = "") -> Json:
    """The share of iterations' time that unequal lengths cost: as predicted; without a cost model, as learned.

    By two counters that never fall: the histogram's sum may (ADR 25), which looks like a new process.
    """
    labels = {"instance": decode_id} if decode_id else {}
    balanced = change.share("iteration_balanced_seconds_total", "iteration_predicted_seconds_total", **labels)
    if balanced is not None:
        return {"bubble_share": 1 - balanced, "bubble_learned": False}
    labels = {"decode": decode_id} if decode_id else {}
    learned = [value for _, value in change.now.each("decode_unequal_lengths_share", **labels) if value >= 0]  # no NaN
    return {"bubble_share": sum(learned) / len(learned) if learned else None, "bubble_learned": bool(learned)}


def _count(now: Samples, name: str, **labels: str) -> int | None:
    """The sum of these samples; None if no process has any."""
    return round(now.sum(name, **labels)) if any(True for _ in now.each(name, **labels)) else None


def _rate(change: Change, name: str, **labels: str) -> float | None:
    return None if _count(change.now, name, **labels) is None else change.rate(name, **labels)


def _blocks(now: Samples, **labels: str) -> Json:
    counts = now.by("state", "kv_blocks", **labels)
    return {
        **{state: round(counts.get(state, 0.0)) if counts else None for state in _BLOCKS},
        "capacity": _count(now, "kv_capacity_blocks", **labels),
    }


def _decode(peer: sv.Peer, change: Change, live: Mapping[str, Any], candidates: Mapping[str, Any]) -> Json:
    name = peer.process.id
    return {
        "id": name,
        "state": peer.state,
        "lengths": live.get("lengths"),
        "batch": live.get("batch"),
        "switching": live.get("switching", False),
        "max_running": live.get("max_running"),
        "candidates": candidates.get(name),
        "iterations_per_s": _rate(change, "decode_iterations_total", instance=name),
        "evictions_per_s": _rate(change, "decode_evictions_total", instance=name),
        **_bubble(change, name),
        "cache": _blocks(change.now, instance=name, store=f"{name}/cache"),
    }


def _prefill(peer: sv.Peer, change: Change) -> Json:
    name, now = peer.process.id, change.now
    stores = sorted(now.by("store", "kv_capacity_blocks", instance=name))
    return {
        "id": name,
        "state": peer.state,
        "pending_tokens": _count(now, "prefill_pending_tokens", instance=name),
        "passes_per_s": _rate(change, "prefill_passes_total", instance=name),
        "busy_share": _rate(change, "prefill_seconds_total", instance=name),
        "buffers": [{"store": store, **_blocks(now, instance=name, store=store)} for store in stores],
    }


def _shard(peer: sv.Peer, now: Samples) -> Json:
    name = peer.process.id
    disk = _blocks(now, instance=name, store=f"{name}/disk")
    return {
        "id": name,
        "state": peer.state,
        **_blocks(now, instance=name, store=name),
        "pinned": _count(now, "pool_pinned_blocks", instance=name),
        "disk": disk if disk["capacity"] else None,
    }


def _prefix_cache(change: Change) -> Json | None:
    queried = change.rate("prefix_cache_queried_tokens_total")
    if not change.now.by("instance", "prefix_cache_queried_tokens_total"):
        return None
    hits = change.rate("prefix_cache_hit_tokens_total")
    from_disk = change.rate("prefix_cache_hit_tokens_total", tier="disk")
    return {
        "queried_tokens_per_s": queried,
        "hit_share": hits / queried if queried else None,
        "disk_hit_share": from_disk / queried if queried else None,
    }


def _channels(change: Change) -> list[Json]:
    """Those that copied something, the busiest first."""
    names = {"bytes_per_s": "bytes_total", "copies_per_s": "copies_total", "busy_share": "busy_seconds_total"}
    found: dict[tuple[str, ...], Json] = {}
    for field, name in names.items():
        for labels, grown in change.each(f"transfer_{name}"):
            ends = {key: labels[key] for key in ("source", "destination", "channel")}
            channel = found.setdefault((*ends.values(), labels["instance"]), {**ends, **dict.fromkeys(names, 0.0)})
            channel[field] = grown / change.seconds
    busy = (channel for channel in found.values() if channel["bytes_per_s"])
    return sorted(busy, key=lambda channel: -channel["bytes_per_s"])
