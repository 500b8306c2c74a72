"""Reads which metrics and labels an expression in PromQL names, and finds those that do not exist."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from support.metrics_page import Metric

TARGET = frozenset({"job", "instance"})  # Prometheus gives them to every series
# What Prometheus itself adds, with our rules' label.
OWN = {"up": frozenset[str](), "ALERTS": frozenset({"alertname", "alertstate", "component"})}
_GROUPING = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_RANGE = re.compile(r"\[[^\]]*\]")
_NAME = re.compile(r"\b([a-zA-Z_:][\w:]*)\b(?!\s*\()(?:\{([^}]*)\})?")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"")
_WORDS = {"and", "or", "unless", "bool", "offset"}
_OF_HISTOGRAM = {"bucket": frozenset({"le"}), "sum": frozenset[str](), "count": frozenset[str]()}


@dataclass(frozen=True, slots=True)
class Expression:
    """`metrics`: names, with the labels in their selectors. `by`: labels that the result is grouped by."""

    metrics: list[tuple[str, frozenset[str]]]
    grouped: frozenset[str]
    by: frozenset[str]


def read(expr: str) -> Expression:
    """The names in an expression that has no braces in its strings."""
    groupings = [(word, frozenset(re.findall(r"\w+", labels))) for word, labels in _GROUPING.findall(expr)]
    bare = _RANGE.sub(" ", _GROUPING.sub(" ", expr))
    metrics = [
        (name, frozenset(_MATCHER.findall(selector))) for name, selector in _NAME.findall(bare) if name not in _WORDS
    ]
    by = [labels for word, labels in groupings if word == "by"]
    return Expression(metrics, frozenset().union(*(labels for _, labels in groupings)), frozenset().union(*by))


def problems(expr: str, known: Mapping[str, Metric], shown: Iterable[str] = ()) -> list[str]:
    """What does not exist: metrics, labels in selectors and groupings, and labels that are `shown` of the result."""
    expression = read(expr)
    found = []
    there = set(TARGET)
    for name, labels in expression.metrics:
        if (has := labels_of(name, known)) is None:
            found.append(f"no metric {name}")
        else:
            there |= has
            found += [f"{name} has no label {label}" for label in sorted(labels - has - TARGET)]
    found += [f"nothing has the label {label}" for label in sorted(expression.grouped - there)]
    return found + [f"the result has no label {label}" for label in shown if label not in (expression.by or there)]


def labels_of(name: str, known: Mapping[str, Metric]) -> frozenset[str] | None:
    """The labels of a series' name; None if there is no such series."""
    if name in OWN:
        return OWN[name]
    base, _, part = name.rpartition("_")
    if part in _OF_HISTOGRAM and base in known and known[base].kind == "histogram":
        return known[base].labels | _OF_HISTOGRAM[part]
    return known[name].labels if name in known and known[name].kind != "histogram" else None
