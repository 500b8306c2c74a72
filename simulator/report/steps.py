"""Every pass of every instance, recorded during the run and merged afterwards."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from alignedserve.simulator.report.results import StepColumns


@dataclass(slots=True)
class StepRecorder:
    """The passes of one instance, in columns. `add_decodes` is called once for many of them."""

    start_s: array[float] = field(default_factory=lambda: array("d"))
    seconds: array[float] = field(default_factory=lambda: array("d"))
    balanced_s: array[float] = field(default_factory=lambda: array("d"))
    decodes: array[int] = field(default_factory=lambda: array("I"))
    prefill_tokens: array[int] = field(default_factory=lambda: array("I"))
    shortest: array[int] = field(default_factory=lambda: array("I"))
    longest: array[int] = field(default_factory=lambda: array("I"))
    total: array[int] = field(default_factory=lambda: array("Q"))
    switching: array[int] = field(default_factory=lambda: array("B"))

    def __len__(self) -> int:
        return len(self.start_s)

    def add_prefill(self, start_s: float, seconds: float, tokens: int) -> None:
        for column in (self.decodes, self.shortest, self.longest, self.total, self.switching):
            column.append(0)
        self.start_s.append(start_s)
        self.seconds.append(seconds)
        self.balanced_s.append(seconds)
        self.prefill_tokens.append(tokens)

    def add_mixed(
        self, start_s: float, seconds: float, balanced_s: float, tokens: int, lengths: tuple[int, int, int, int]
    ) -> None:
        """One pass of prompt tokens and decodes; either may be none. `lengths` as in `add_decodes`, of this pass."""
        self.start_s.append(start_s)
        self.seconds.append(seconds)
        self.balanced_s.append(balanced_s)
        self.prefill_tokens.append(tokens)
        for column, figure in zip((self.decodes, self.shortest, self.longest, self.total), lengths, strict=True):
            column.append(figure)
        self.switching.append(0)

    def add_decodes(
        self,
        start_s: Sequence[float],
        seconds: Sequence[float],
        balanced_s: Sequence[float],
        lengths: tuple[int, int, int, int],
        switching: bool,
    ) -> None:
        """Passes of the same requests, whose lengths grow by one token in each.

        `lengths`: their number, and the shortest, longest and sum of their lengths in the first pass.
        """
        count, shortest, longest, total = lengths
        passes = len(start_s)
        self.start_s.extend(start_s)
        self.seconds.extend(seconds)
        self.balanced_s.extend(balanced_s)
        self.decodes.extend([count] * passes)
        self.prefill_tokens.extend([0] * passes)
        self.shortest.extend(range(shortest, shortest + passes))
        self.longest.extend(range(longest, longest + passes))
        self.total.extend(range(total, total + count * passes, count))
        self.switching.extend([switching] * passes)


def merge(recorders: Sequence[StepRecorder], gaps_s: Sequence[float]) -> StepColumns:
    """All passes in order of their start; simultaneous passes in order of their instances.

    `gaps_s`: the time charged before each pass, for each recorder.
    """
    columns = StepColumns()
    start_s = np.concatenate([np.array(recorder.start_s) for recorder in recorders])
    instance = np.repeat(np.arange(len(recorders)), [len(recorder) for recorder in recorders])
    order = np.lexsort((instance, start_s))
    for name in StepRecorder.__slots__:
        whole = np.concatenate([np.array(getattr(recorder, name)) for recorder in recorders])
        column = getattr(columns, name)
        column.frombytes(whole[order].astype(column.typecode).tobytes())
    columns.instance.frombytes(instance[order].astype(columns.instance.typecode).tobytes())
    columns.gap_s.frombytes(np.array(gaps_s, dtype=np.float64)[instance[order]].tobytes())
    return columns
