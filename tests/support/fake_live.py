"""What the supervisor and the scheduler of a FakeCluster tell people who look."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from alignedserve.metrics import Page
from alignedserve.proto import scheduler_pb2 as sc
from alignedserve.proto import supervisor_pb2 as sv

DECODE = {"lengths": [16, 17, 40], "batch": 3, "switching": True, "max_running": 8}
SCHEDULER = {
    "waiting": [(16, 17, 2), (256, 287, 1)],
    "candidates": {"decode-0": {"batch": [100, 120], "requests": []}},
}


def fake_live(peers: Iterable[sv.Peer]) -> sv.LiveState:
    page = Page(instance="decode-0")
    page.counter("decode_iterations_total", "iterations", 7)
    for state, count in (("free", 5), ("owned", 3), ("cached", 0)):
        page.gauge("kv_blocks", "blocks", count, store="decode-0/cache", state=state)
    page.gauge("kv_capacity_blocks", "blocks", 8, store="decode-0/cache")
    gateway = Page(instance="gateway-0")
    gateway.counter("gateway_requests_total", "requests", 1, outcome="length")
    metrics = page.text() + gateway.text()
    status = sv.ClusterStatus(peers=peers, cluster_id="fake", state="ready", metrics=metrics)
    return sv.LiveState(
        status=status,
        lives={"decode-0": json.dumps(DECODE), "scheduler-0": json.dumps(SCHEDULER)},
        events=[sv.ClusterEvent(unix_s=1.0, level="info", text="decode-0 joined")],
    )


def fake_stays(query: sc.StaysQuery, states: Mapping[str, str]) -> sc.StaysFound:
    """`states`: of requests that are open, by id: those that are over began a second before one another."""
    order = ("queued", "prefilling", "waiting", "prefetched", "decoding")
    found: dict[str, Any] = {}
    for request_id in query.request_ids:
        found[request_id] = {"stays": []}
        if state := states.get(request_id):
            reached = order[: order.index(state) + 1]
            ages_s = {name: float(len(reached) - number) for number, name in enumerate(reached)}
            open_one = {"state": state, "ages_s": ages_s, "prefill_id": "prefill-0", "decode_id": ""}
            found[request_id]["open"] = open_one
    return sc.StaysFound(json=json.dumps(found))
