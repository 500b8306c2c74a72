"""Merges the Prometheus text of several processes into one page, and reads samples from it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{|(?= ))", re.MULTILINE)


def merge(pages: Iterable[str]) -> str:
    """Merges pages of prometheus_client: each metric has one group under its first header. Equal groups are merged.

    The exposition format requires all lines of a metric in one group: scrapers refuse a metric with two groups. The
    lines are moved unchanged, because parsing and writing them would take the supervisor 15 times as long.
    """
    families: dict[str, dict[str, None]] = {}
    for page in pages:
        for family in f"\n{page.rstrip()}".split("\n# HELP ")[1:]:
            meaning, kind, *samples = family.split("\n", 2)
            if samples:
                header = f"# HELP {meaning}\n{kind}\n"
                families.setdefault(meaning.partition(" ")[0], {header: None})[f"{samples[0]}\n"] = None
    return "".join(chain.from_iterable(families.values()))


def with_label(page: str, name: str, value: str) -> str:
    """The page with one more label on each sample. `value` must not need escaping."""

    def labelled(match: re.Match[str]) -> str:
        return f'{match[1]}{{{name}="{value}"' + ("," if match[0].endswith("{") else "}")

    return _SAMPLE.sub(labelled, page)


def samples(page: str, *names: str) -> Iterator[Sample]:
    """The samples that have one of these names."""
    for family in text_string_to_metric_families(page):
        yield from (sample for sample in family.samples if sample.name in names)


def value(page: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have the labels; 0 if there are none."""
    return float(sum(found.value for found in samples(page, name) if labels.items() <= found.labels.items()))


def by_instance(page: str, name: str) -> dict[str, float]:
    """A metric's samples, summed by their label `instance`."""
    found: dict[str, float] = {}
    for sample in samples(page, name):
        instance = sample.labels["instance"]
        found[instance] = found.get(instance, 0.0) + sample.value
    return found
