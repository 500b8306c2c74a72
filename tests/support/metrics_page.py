"""The metrics as docs/operations/metrics.md lists them. tests/integration/test_metrics_page.py checks it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[2] / "docs/operations/metrics.md"
_ROW = re.compile(r"^\| `(alignedserve_\w+)` \| (\w+) \| ([^|]+) \| (.+) \|$", re.MULTILINE)


class Metric(NamedTuple):
    kind: str
    labels: frozenset[str]
    meaning: str


def described() -> dict[str, Metric]:
    """Those of the page, by name."""
    found: dict[str, Metric] = {}
    labels: frozenset[str] = frozenset()
    for name, kind, told, meaning in _ROW.findall(PAGE.read_text(encoding="utf-8")):
        labels = labels if told == "the same" else frozenset(re.findall(r"`(\w+)`", told))
        found[name] = Metric(kind, labels, meaning.replace("`", ""))
    return found
