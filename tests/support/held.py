"""Waits until no request holds a block in any store of a cluster."""

from __future__ import annotations

import asyncio
import time

from alignedserve.cluster.local import LocalCluster
from alignedserve.control.samples import value
from alignedserve.scheduler.process.pool_audit import SETTLE_S


def nothing_held(metrics: str) -> bool:
    """Whether every block of every store is free or cached."""
    capacity = value(metrics, "alignedserve_kv_capacity_blocks")
    return sum(value(metrics, "alignedserve_kv_blocks", state=state) for state in ("free", "cached")) == capacity > 0


async def wait_nothing_held(cluster: LocalCluster, timeout_s: float = SETTLE_S + 15.0) -> str:
    """Wait until no block is held, by default as long as the pool's audit needs. Returns the metrics."""
    deadline = time.monotonic() + timeout_s
    while True:
        metrics = (await cluster.status()).metrics
        if nothing_held(metrics):
            return metrics
        blocks = [line for line in metrics.splitlines() if line.startswith("alignedserve_kv_")]
        assert time.monotonic() < deadline, "\n".join(blocks)
        await asyncio.sleep(0.1)
