"""The cluster's metrics in Ray's own: Ray's file discovery and KubeRay's PodMonitor lead to them, too.

Each sample becomes a gauge of the same name and labels, which Ray exports as `ray_alignedserve_…`. Ray's counters and
histograms take observations only, not totals; `rate` and `histogram_quantile` read these gauges as they read those.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Awaitable, Callable

from prometheus_client.parser import text_string_to_metric_families
from ray.util.metrics import Gauge

from alignedserve.gateway.serve.ray_private import export_interval_s

logger = logging.getLogger(__name__)

SWITCH = "RAY_enable_metrics_collection"

Series = tuple[str, tuple[tuple[str, str], ...]]


def ray_collects() -> bool:
    """Whether this Ray cluster collects metrics: a cluster that `alignedserve serve` starts for itself does not."""
    return os.environ.get(SWITCH, "1") not in ("0", "false")


class RayMetrics:
    """For one process; Ray adds its own labels, such as the node."""

    def __init__(self, make: Callable[[str, str, tuple[str, ...]], Gauge] = Gauge) -> None:
        """`make`: another kind of gauge, for tests."""
        self._make = make
        self._gauges: dict[str, Gauge] = {}
        self._set: set[Series] = set()

    def show(self, page: str) -> None:
        """Set the gauges to a page's samples. Samples that are gone become NaN until Ray drops them."""
        found: set[Series] = set()
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels = sample.labels
                gauge = self._gauges.get(sample.name)
                if gauge is None:
                    gauge = self._make(sample.name, family.documentation, tuple(labels))
                    self._gauges[sample.name] = gauge
                gauge.set(sample.value, labels)
                found.add((sample.name, tuple(labels.items())))
        for name, gone in self._set - found:
            self._gauges[name].set(math.nan, dict(gone))
        self._set = found


async def keep_showing(page: Callable[[], Awaitable[str]]) -> None:
    """Show the page twice for each export of Ray, which drops a gauge that was not set for two of them.

    In a thread: the page is large where there are many instances.
    """
    metrics = RayMetrics()
    while True:
        try:
            await asyncio.to_thread(metrics.show, await page())
        except Exception:  # whatever Ray raises while it ends or changes
            logger.warning("Ray's own metrics lack the cluster's", exc_info=True)
        await asyncio.sleep(export_interval_s() / 2)
