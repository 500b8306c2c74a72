"""Traces as CSV: a header names the columns, in any order and among others."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from alignedserve.errors import TraceError
from alignedserve.simulator import trace_formats
from alignedserve.simulator.traces.fields import Place, objective_of, priority_of, seconds_of, stamp_of, tokens_of
from alignedserve.simulator.traces.load import LONGEST_S
from alignedserve.simulator.traces.trace import Row


@dataclass(slots=True)
class Found:
    """The parsed trace. `any_order`: the format does not promise order of time. The last two: as in `TimedTrace`."""

    format: str
    timed: bool
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    any_order: bool = False
    measured: Mapping[str, object] | None = None
    block_tokens: int = 0

    def add(self, row: Row, place: Place) -> None:
        """`place`: of its arrival.

        Raises TraceError if it is more than a year from the first, too far for virtual time.
        """
        first_s = self.rows[0].arrival_s if self.rows else row.arrival_s
        if not abs(row.arrival_s - first_s) <= LONGEST_S:
            place.fail("the arrival is more than a year from the first line's")
        self.rows.append(row)


@dataclass(frozen=True, slots=True)
class _Format:
    name: str
    arrival: str  # its column, or ""
    inputs: str
    outputs: str
    seconds: Callable[[str, Place], float] = seconds_of
    objective: str = ""  # optional columns, or ""
    priority: str = ""

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.arrival, self.inputs, self.outputs)))


def _calendar_s(text: str, place: Place) -> float:
    stamp = stamp_of(text, place)
    return stamp.timestamp()


_AZURE = _Format("azure", "timestamp", "contexttokens", "generatedtokens", _calendar_s)
_PLAIN = _Format(
    "csv",
    "arrival_time_s",
    "input_tokens",
    "output_tokens",
    objective="wait_objective_s",
    priority="priority",
)
_LENGTHS = _Format("lengths", "", "num_prefill_tokens", "num_decode_tokens")
_ALL = (_AZURE, _PLAIN, _LENGTHS)


def parse(text: str, file: str) -> Found:
    """Parse the file. Raises TraceError."""
    lines = _lines(text, file)
    try:
        number, header = next(lines)
    except StopIteration:
        raise TraceError(f"{file}, line 1, column 1: there is no header", file=file, line=1, column=1) from None
    names = [name.strip() for name in header]
    known = {name.lower(): position for position, name in enumerate(names)}
    chosen = next((entry for entry in _ALL if set(entry.columns) <= set(known)), None)
    if chosen is None:
        shown = ",".join(names)
        Place(file, number, 1).fail(
            f"the header {shown!r} matches no known trace format; a header has {trace_formats.CSV_HEADERS}"
        )
    found = Found(chosen.name, timed=bool(chosen.arrival))
    optional = chosen.objective, chosen.priority
    wanted = filter(None, (*chosen.columns, *optional))  # "" would match the column of a table's index
    at = {name: known[name] for name in wanted if name in known}
    if unread := [name for name in names if name and name.lower() not in at]:
        found.notes.append(f"columns of the trace that are not read: {', '.join(unread)}")
    for number, cells in lines:
        column = at[chosen.arrival] if chosen.arrival else 0
        place = Place(file, number, column + 1, names[column])
        found.add(_row(chosen, at, names, cells, file, number), place)
    return found


def _row(chosen: _Format, at: Mapping[str, int], names: list[str], cells: list[str], file: str, line: int) -> Row:
    if len(cells) != len(names):
        Place(file, line, min(len(cells), len(names)) + 1).fail(
            f"the line has {len(cells)} fields, but the header has {len(names)}"
        )

    def cell(column: str) -> tuple[str, Place]:
        position = at[column]
        return cells[position], Place(file, line, position + 1, names[position])

    arrival_s = chosen.seconds(*cell(chosen.arrival)) if chosen.arrival else 0.0
    objective_s = objective_of(*cell(chosen.objective)) if chosen.objective in at else 0.0
    inputs, outputs = tokens_of(*cell(chosen.inputs)), tokens_of(*cell(chosen.outputs))
    priority = priority_of(*cell(chosen.priority)) if chosen.priority in at else 0
    return Row(inputs, outputs, arrival_s, wait_objective_s=objective_s, priority=priority)


def _lines(text: str, file: str) -> Iterator[tuple[int, list[str]]]:
    """Every line that is not empty or a comment, with its number."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            Place(file, reader.line_num, 1).fail(f"not CSV: {error}")
        if any(cell.strip() for cell in cells) and not cells[0].startswith("#"):
            yield reader.line_num, cells
