"""The values of a paper's figure as a CSV file: ours, and those that the paper's text states.

A file holds one figure. Writing replaces the rows of the same machine, kernel mode, topology and load, and keeps the
others: a figure may take several commands. tools/docs/plot_paper.py draws from these files.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from alignedserve.simulator.report.seeds import mean_and_interval
from evaluation.grid import Case, Grid
from evaluation.options import load_name
from evaluation.runs import Variant

PLACE = ("machine", "kernel_mode", "topology", "load")
COLUMNS = (
    *PLACE,
    *("workload", "instances", "system", "quantity", "x", "value", "low", "high", "unit", "seeds", "stated"),
)
Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class Stated:
    """A value that the paper's text states. `said`: as it says it; `where`: its section. Nothing is read from plots."""

    value: float
    said: str
    where: str
    system: str = ""
    quantity: str = ""
    unit: str = ""
    workload: str = ""
    x: str = ""

    def row(self) -> Row:
        known = (self.system, self.quantity, self.unit, self.workload, self.x, f"{self.value:g}")
        row = dict(zip(("system", "quantity", "unit", "workload", "x", "value"), known, strict=True))
        return {**dict.fromkeys(COLUMNS, ""), **row, "stated": f"{self.where}, text: {self.said}"}


def place_of(case: Case, grid: Grid) -> Row:
    """The columns that say what a value of this case is of."""
    return {
        "machine": Path(case.machine.cost_model).name,
        "kernel_mode": case.machine.mode,
        "topology": case.topology,
        "load": load_name(case.load),
        "workload": case.source.name,
        "instances": str(grid.topology(case)),
    }


def point(
    place: Row, system: str, quantity: str, values: Sequence[float], unit: str = "", x: str = "", scale: float = 1.0
) -> Row:
    """A row of ours: the mean of `values`, one for each seed, and the ends of its 95 % confidence interval."""
    found = {"system": system, "quantity": quantity, "unit": unit, "x": x, "seeds": str(len(values))}
    if not any(math.isnan(value) for value in values):
        mean, half = mean_and_interval([scale * value for value in values])
        found["value"] = f"{mean:.5g}"
        if half is not None:
            found |= {"low": f"{mean - half:.4g}", "high": f"{mean + half:.4g}"}
    return {**dict.fromkeys(COLUMNS, ""), **place, **found}


def metric_point(
    grid: Grid, case: Case, variant: Variant, metric: str, quantity: str, unit: str = "", scale: float = 1.0
) -> Row:
    """The row of a metric of the simulator's summary."""
    values = grid.values(case, variant, metric)
    return point(place_of(case, grid), variant.label, quantity, values, unit, scale=scale)


def add_csv(found: argparse.ArgumentParser) -> None:
    found.add_argument("--csv", type=Path, metavar="FILE", help=(
        "write the figure's values there, as CSV; rows of other machines, kernel modes, topologies and loads stay"
    ))  # fmt: skip


def write(file: Path | None, stated: Iterable[Stated], ours: Iterable[Row]) -> None:
    """Write the CSV file, if one is asked for: what the paper states first, then ours, sorted by place."""
    if file is None:
        return
    rows = list(ours)
    replaced = {_place(row) for row in rows}
    kept = [row for row in read(file) if not row["stated"] and _place(row) not in replaced] if file.is_file() else []
    with file.open("w", encoding="utf-8", newline="") as to:
        writer = csv.DictWriter(to, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([one.row() for one in stated])
        writer.writerows(sorted([*kept, *rows], key=_place))


def read(file: Path) -> list[Row]:
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def _place(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in PLACE)
