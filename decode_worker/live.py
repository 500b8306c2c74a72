"""What a decode instance shows of its running batch (`Heartbeat.live`)."""

from __future__ import annotations

import json
from collections.abc import Sequence

from alignedserve.scheduler.instance.plan import IterationStatus


def live_decode(status: IterationStatus, lengths: Sequence[int]) -> str:
    """JSON: `lengths` of the last iteration's requests, shortest first, the batch's number, and whether it switches."""
    shown = {
        "lengths": sorted(lengths),
        "batch": status.batch_id,
        "switching": status.switching,
        "max_running": status.max_running,
    }
    return json.dumps(shown, separators=(",", ":"))
