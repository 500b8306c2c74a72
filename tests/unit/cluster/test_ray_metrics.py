"""The cluster's metrics as Ray's gauges: names, labels and values stay, and what is gone has none."""

from __future__ import annotations

import math
from typing import Any

from alignedserve.cluster.monitoring.ray_metrics import RayMetrics
from alignedserve.control.samples import merge
from alignedserve.metrics import Histogram, Page


class Recorded:
    made: dict[str, Recorded]

    def __init__(self, name: str, meaning: str, labels: tuple[str, ...]) -> None:
        self.meaning, self.labels = meaning, labels
        self.values: dict[tuple[str, ...], float] = {}
        self.made[name] = self

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert tags.keys() == set(self.labels), "Ray's gauges have fixed labels"
        self.values[tuple(tags[label] for label in self.labels)] = value


def page(*instances: str, requests: float = 3.0) -> str:
    pages = []
    for instance in instances:
        one = Page(instance=instance)
        one.counter("things_total", "things so far", requests, kind="good")
        one.gauge("level", "how high", math.inf)
        histogram = Histogram((0.1, 1.0))
        histogram.observe(0.5)
        one.histogram("wait_seconds", "waits", histogram)
        pages.append(one.text())
    return merge(pages)


def shown(*pages: str) -> dict[str, Recorded]:
    Recorded.made = {}
    make: Any = Recorded
    metrics = RayMetrics(make)
    for text in pages:
        metrics.show(text)
    return Recorded.made


def test_each_sample_is_a_gauge_with_the_same_labels() -> None:
    found = shown(page("decode-0"), page("decode-0", requests=5.0))
    assert found["alignedserve_things_total"].meaning == "things so far"
    assert list(found["alignedserve_things_total"].values.values()) == [5.0]
    assert math.inf in found["alignedserve_level"].values.values()
    buckets = found["alignedserve_wait_seconds_bucket"]
    place = buckets.labels.index("le")
    assert {labels[place]: value for labels, value in buckets.values.items()} == {"0.1": 0.0, "1.0": 1.0, "+Inf": 1.0}
    assert list(found["alignedserve_wait_seconds_count"].values.values()) == [1.0]


def test_what_a_removed_instance_had_is_no_number_any_more() -> None:
    values = shown(page("decode-0", "decode-1"), page("decode-0"))
    of = values["alignedserve_level"]
    place = of.labels.index("instance")
    by_instance = {labels[place]: value for labels, value in of.values.items()}
    assert by_instance["decode-0"] == math.inf
    assert math.isnan(by_instance["decode-1"])
