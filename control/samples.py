"""Reads samples out of Prometheus text."""

from __future__ import annotations

import re

_INSTANCE = re.compile(r'instance="([^"]*)"')


def value(metrics: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples that carry the labels; 0 where there is none."""
    total = 0.0
    for line in metrics.splitlines():
        if line.startswith((name + "{", name + " ")) and all(f'{k}="{v}"' in line for k, v in labels.items()):
            total += float(line.rsplit(" ", 1)[1])
    return total


def by_instance(metrics: str, name: str) -> dict[str, float]:
    """A metric's samples, summed by their label `instance`."""
    found: dict[str, float] = {}
    for line in metrics.splitlines():
        if line.startswith(name + "{") and (match := _INSTANCE.search(line)):
            found[match[1]] = found.get(match[1], 0.0) + float(line.rsplit(" ", 1)[1])
    return found
