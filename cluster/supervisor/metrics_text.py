"""Merges the Prometheus texts of many processes into one page, with each metric family once."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_SUFFIXES = ("_bucket", "_sum", "_count", "_total", "_created")


def merge(texts: Iterable[str]) -> str:
    """Merge pages that may have the same families. A family's first HELP and TYPE are kept; exact repeats are dropped.

    Families of AlignedServe without a TYPE get it from their name. The exposition format requires all lines of a family
    in one group: scrapers refuse a repeated family.
    """
    headers: dict[str, dict[str, str]] = {}
    samples: dict[str, dict[str, None]] = {}
    for text in texts:
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                _, kind, family, *_ = line.split(" ", 3)
                headers.setdefault(family, {}).setdefault(kind, line)
                samples.setdefault(family, {})
            elif (match := _NAME.match(line)) is not None:
                samples.setdefault(_family(match.group(), headers), {})[line] = None
    lines = []
    for family, found in samples.items():
        if found:
            lines += [headers.get(family, {})[kind] for kind in ("HELP", "TYPE") if kind in headers.get(family, {})]
            if family.startswith("alignedserve_") and "TYPE" not in headers.get(family, {}):
                lines.append(f"# TYPE {family} {'counter' if family.endswith('_total') else 'gauge'}")
            lines += found
    return "\n".join(lines) + "\n" if lines else ""


def with_label(page: str, name: str, value: str) -> str:
    """The page with one more label on each sample. `value` needs no escaping."""
    lines = [_labelled(line, f'{name}="{value}"') for line in page.splitlines()]
    return "\n".join(lines) + "\n" if lines else ""


def _labelled(line: str, label: str) -> str:
    match = _NAME.match(line)
    if match is None:
        return line
    rest = line[match.end() :]
    return f"{match.group()}{{{label}" + (f",{rest[1:]}" if rest.startswith("{") else "}" + rest)


def _family(sample: str, headers: dict[str, dict[str, str]]) -> str:
    if sample in headers:
        return sample
    for suffix in _SUFFIXES:
        if sample.endswith(suffix) and sample.removesuffix(suffix) in headers:
            return sample.removesuffix(suffix)
    return sample
