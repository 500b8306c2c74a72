"""Restricts expressions of Prometheus to some targets."""

from __future__ import annotations

import re

_METRIC = re.compile(r"\b(alignedserve_\w+)(?:\{([^}]*)\})?")
CLUSTERS = 'job!~".+-roles"'
"""A cluster's whole page, without the pages of its processes, which have the same samples (`--roles`)."""


def restricted(expr: str, selector: str) -> str:
    """The expression, with a selector more for each metric."""
    return _METRIC.sub(lambda found: f"{found[1]}{{{', '.join(filter(None, (selector, found[2])))}}}", expr)
