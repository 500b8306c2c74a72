"""A parsed trace, and how a workload is made from it."""

from __future__ import annotations

import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from alignedserve.errors import ConfigError
from alignedserve.simulator.traces.load import Load
from alignedserve.simulator.workload import Arrival, Workload


@dataclass(frozen=True, slots=True)
class Row:
    """A request of the file. `arrival_s`: on the file's own clock. `request_id`: "" if the file names none.

    `wait_objective_s`: 0 if it has none. `blocks`, `answer_blocks`: as in `Arrival`.
    """

    input_tokens: int
    output_tokens: int
    arrival_s: float = 0.0
    request_id: str = ""
    wait_objective_s: float = 0.0
    priority: int = 0
    blocks: tuple[int, ...] = ()
    answer_blocks: tuple[int, ...] = ()


class Trace(ABC):
    """A source of workloads. `timed`: it has its own arrivals."""

    timed: bool

    @abstractmethod
    def workload(self, load: Load, seed: int) -> Workload:
        """The workload; the same for the same arguments. Arrivals begin at 0.

        Raises ConfigError for an impossible load.
        """

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """Source, format, hash. JSON."""


@dataclass(frozen=True, slots=True)
class TimedTrace(Trace):
    """Requests with their own arrival times. Rows are ordered by time, the first at 0.

    `measured`: figures of the cluster that wrote the log, if the trace is one that has them. `block_tokens`: as in
    `Workload`.
    """

    source: str
    format: str
    sha256: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    measured: Mapping[str, object] | None = None
    block_tokens: int = 0
    timed: bool = field(default=True, init=False)

    def workload(self, load: Load, seed: int) -> Workload:
        if load.cv is not None:
            raise ConfigError(f"--cv is for generated arrivals; {self.source} has its own (--rate stretches them)")
        rows = self.rows[: load.limit]
        times = [0.0] * len(rows) if load.clients else load.stretch([row.arrival_s for row in rows])
        notes = self.notes
        if load.clients:
            notes += (f"arrivals of the trace were replaced: {load.process}",)
        if load.rate_per_s is not None:
            notes += (f"arrivals of the trace were stretched to {load.rate_per_s:g} requests a second on average",)
        description = {**self.describe(), "requests": len(rows)}
        return Workload(_arrivals(rows, times), description, notes, load.clients, self.block_tokens)

    def describe(self) -> dict[str, object]:
        measured = {} if self.measured is None else {"measured": dict(self.measured)}
        return {**_describe(self.source, self.format, self.sha256, len(self.rows)), **measured}


@dataclass(frozen=True, slots=True)
class LengthsTrace(Trace):
    """Lengths only. The seed shuffles them, because neighbours in a file are often similar."""

    source: str
    format: str
    sha256: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    timed: bool = field(default=False, init=False)

    def workload(self, load: Load, seed: int) -> Workload:
        rows = list(self.rows)
        random.Random(f"alignedserve lengths {seed}").shuffle(rows)
        rows = rows[: load.limit]
        made = {"requests": len(rows), "order": "shuffled by the seed", "arrivals": load.process, "seed": seed}
        arrivals = _arrivals(rows, load.draw(len(rows), seed))
        return Workload(arrivals, {**self.describe(), **made}, self.notes, load.clients)

    def describe(self) -> dict[str, object]:
        return _describe(self.source, self.format, self.sha256, len(self.rows))


def _describe(source: str, name: str, sha256: str, rows: int) -> dict[str, object]:
    return {"source": source, "format": name, "sha256": sha256, "rows": rows}


def _arrivals(rows: Iterable[Row], times: Iterable[float]) -> tuple[Arrival, ...]:
    rows = tuple(rows)
    taken = {row.request_id for row in rows}
    names = (row.request_id or _made_up(number, taken) for number, row in enumerate(rows))
    return tuple(_arrival(name, row, time) for name, row, time in zip(names, rows, times, strict=True))


def _arrival(name: str, row: Row, time_s: float) -> Arrival:
    named = row.blocks, row.answer_blocks
    return Arrival(name, time_s, row.input_tokens, row.output_tokens, row.wait_objective_s, row.priority, *named)


def _made_up(number: int, taken: set[str]) -> str:
    """`rNUMBER`, with one or more apostrophes appended if a request of the trace already has that name."""
    name = f"r{number}"
    while name in taken:
        name += "'"
    taken.add(name)
    return name


def in_order(rows: list[Row]) -> tuple[tuple[Row, ...], bool]:
    """Rows sorted by arrival, ties as in the file, shifted to begin at 0; and whether they were already in order."""
    ordered = sorted(rows, key=lambda row: row.arrival_s)
    first = ordered[0].arrival_s if ordered else 0.0
    moved = tuple(replace(row, arrival_s=row.arrival_s - first) for row in ordered)
    return moved, all(a.arrival_s <= b.arrival_s for a, b in itertools.pairwise(rows))
