"""What the scheduler tells of itself: its heartbeat, and what went first while a request waited."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict
from itertools import islice
from typing import Any

from alignedserve.metrics import Page
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.scheduler.core.scheduler_core import SchedulerCore
from alignedserve.scheduler.systems import decides

MOST_SHOWN = 1024  # candidates of one buffer
MOST_TOLD = 16  # requests of one query, which is answered between two events


def heartbeat_of(core: SchedulerCore, scheduler_id: str) -> sv.Heartbeat:
    now_s = time.monotonic()
    holds = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in core.describe().items() if count)
    alarm = core.alarm(now_s)
    page = Page(instance=scheduler_id)
    core.show_metrics(page, now_s)
    page.gauge("scheduler_policy", "1; the label names the class that forms batches", 1, policy=decides(core.policy))
    return sv.Heartbeat(
        holds=holds or "no requests",
        metrics=page.text(),
        alarms=[alarm] if alarm else [],
        drained=core.drained(),
        live=json.dumps(live_of(core), separators=(",", ":")),
    )


def live_of(core: SchedulerCore) -> dict[str, Any]:
    """`waiting`: (first length, last length, requests) by bucket. `candidates`: lengths by instance and buffer."""
    return {
        "waiting": core.table.waiting.rows(),
        "candidates": {
            decode.decode_id: {
                kind.name.lower(): sorted(record.kv_tokens for record in list(held.values())[:MOST_SHOWN])
                for kind, held in decode.candidates.items()
            }
            for decode in core.decodes()
        },
    }


def stays_json(core: SchedulerCore, request_ids: Iterable[str]) -> str:
    """By request id: `stays` in the pool, and `open`, if it is, with when it last entered each state.

    Of the first MOST_TOLD only.
    """
    return json.dumps({request_id: _told(core, request_id) for request_id in islice(request_ids, MOST_TOLD)})


def _told(core: SchedulerCore, request_id: str) -> dict[str, Any]:
    key, now_s = core.table.latest(request_id), time.monotonic()
    record = core.table.get(key) if key is not None else None
    waiting = None if record is None else record.waiting(now_s)
    told: dict[str, Any] = {"stays": [asdict(stay) for stay in core.table.stays.of(request_id, waiting)]}
    if record is not None:
        told["open"] = {
            "state": record.state.value,
            "ages_s": {state.value: now_s - at_s for state, at_s in record.entered_s.items()},
            "prefill_id": record.prefill_id,
            "decode_id": record.decode_id,
        }
    return told
