"""The records of a group, written case by case, so that a crash or timeout loses no earlier figures."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import statistics
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_suite.rows import BY_KEY


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Statistics of raw samples, in their unit."""
    ordered = sorted(samples)
    return {
        "count": len(ordered),
        "median": statistics.median(ordered),
        "min": ordered[0],
        "p10": ordered[len(ordered) // 10],
        "p90": ordered[min(len(ordered) - 1, len(ordered) * 9 // 10)],
        "max": ordered[-1],
    }


class Recorder:
    """Appends a JSON line to `file` for each figure and failure. The bound of its row decides if a figure is met."""

    def __init__(self, file: Path, group: str) -> None:
        self.group = group
        self._file = file
        self._case = ""

    @contextlib.contextmanager
    def case(self, name: str, row: str = "") -> Iterator[None]:
        """Record an exception with its traceback instead of raising it. `row`: the row that the case belongs to."""
        self._case = name
        begun_s = time.monotonic()
        print(f"[{self.group}] {name}", flush=True)
        try:
            yield
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            print(traceback.format_exc(), flush=True)
            self._write({"row": row, "error": said[:2000], "traceback": traceback.format_exc()[-6000:]})
        finally:
            self._write({"seconds": round(time.monotonic() - begun_s, 3)})
            self._case = ""

    def figure(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        row: str = "",
        met: bool | None = None,
        samples: Sequence[float] = (),
        **detail: Any,
    ) -> None:
        """Record a figure. `met` replaces the check of the row's limit. `detail`: further values."""
        if row and met is None:
            met = BY_KEY[row].met(value)
        record: dict[str, Any] = {"figure": name, "value": _number(value), "unit": unit, "row": row, "met": met}
        if row:
            record["bound"] = BY_KEY[row].bound
        if samples:
            record["samples"] = summary(samples)
        if detail:
            record["detail"] = detail
        self._write(record)
        print(f"[{self.group}]   {name}: {value:.6g} {unit}{'' if met is None else ' (met)' if met else ' (NOT met)'}")

    def note(self, name: str, **detail: Any) -> None:
        """Record something other than a figure."""
        self._write({"note": name, "detail": detail})

    def _write(self, record: dict[str, Any]) -> None:
        line = json.dumps({"group": self.group, "case": self._case, **record}, default=str)
        with self._file.open("a", encoding="utf-8") as lines:
            lines.write(line + "\n")
            lines.flush()
            os.fsync(lines.fileno())


def read_records(file: Path) -> list[dict[str, Any]]:
    """All complete lines: a killed process may have left a partial one."""
    if not file.is_file():
        return []
    records = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return records


def _number(value: float) -> float | str:
    """JSON has neither NaN nor infinity."""
    return value if math.isfinite(value) else str(value)


@dataclass(slots=True)
class Context:
    """The context of a group's cases. `seed` is new in each run and recorded. Only files in `out` are kept."""

    device: str
    quick: bool
    work: Path
    out: Path
    record: Recorder
    seed: int
    ends_s: float = math.inf
    """Deadline on the monotonic clock, after which no further optional case starts."""
    draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def time_left_s(self) -> float:
        return self.ends_s - time.monotonic()

    @property
    def small(self) -> bool:
        """Toy sizes: enough to prove the code."""
        return self.quick or not self.on_gpu
