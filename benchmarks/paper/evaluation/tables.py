"""Markdown tables of figures with confidence intervals, and of the paper's figures beside ours."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from alignedserve.simulator.report.seeds import mean_and_interval

NOT_STATED = "not stated in the text"
NOTHING = "–"
PAPER = "the paper's text"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table. The first column has names, the others figures."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def claims(what: str, columns: Sequence[str], stated: Sequence[str], ours: Iterable[tuple[str, Sequence[str]]]) -> str:
    """A table of `what`: the paper's figures in the first row, then ours, a row for each condition."""
    rows = [[PAPER, *stated], *([f"ours: {condition}", *figures] for condition, figures in ours)]
    return table([what, *columns], rows)


def with_interval(values: Sequence[float], digits: int = 3, scale: float = 1.0) -> str:
    """The mean and half its 95 % confidence interval over the seeds, to `digits` significant digits: `25.1 ± 0.3`."""
    known = [value * scale for value in values]
    if not known or any(math.isnan(value) for value in known):
        return NOTHING
    mean, half = mean_and_interval(known)
    return _shown(mean, half, decimals(mean, digits))


def in_csv(values: Sequence[float]) -> tuple[str, str]:
    """The mean and half its 95 % confidence interval, for a CSV file; empty if there is no value."""
    if any(math.isnan(value) for value in values):
        return "", ""
    mean, half = mean_and_interval(values)
    return f"{mean:.5g}", "" if half is None else f"{half:.2g}"


def gain(values: Sequence[float]) -> str:
    """The mean of ratios near 1 with its interval, to three decimal places."""
    if not values or any(math.isnan(value) for value in values):
        return NOTHING
    return _shown(*mean_and_interval(values), 3)


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """The ratio for each seed: with the same seed both had the same requests."""
    return [value / other for value, other in zip(values, others, strict=True)]


def percent(values: Sequence[float]) -> str:
    """The mean of shares with its interval, in percent, to two decimal places."""
    if not values or any(math.isnan(value) for value in values):
        return NOTHING
    return f"{_shown(*mean_and_interval([100 * value for value in values]), 2)} %"


def _shown(mean: float, half: float | None, places: int) -> str:
    shown = f"{mean:,.{places}f}"
    return shown if half is None else f"{shown} ± {half:,.{places}f}"


def number(value: float, digits: int = 3) -> str:
    return NOTHING if math.isnan(value) else f"{value:,.{decimals(value, digits)}f}"


def decimals(value: float, digits: int) -> int:
    """Decimal places for `digits` significant digits."""
    return max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else digits - 1
