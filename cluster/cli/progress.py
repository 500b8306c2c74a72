"""Bars for work whose length or number of steps is known, on stderr if that is a terminal."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from tqdm import tqdm

TICK_S = 0.5


class Steps:
    """Steps of a work: a bar on stderr if that is a terminal, else a line on stdout for each.

    `total`: how many things the work is done for; None: unknown. `unit`: one of them. `prefix`: of the lines.
    """

    def __init__(self, total: int | None, unit: str, prefix: str = "") -> None:
        self._bar = tqdm(total=total, unit=unit, disable=None, dynamic_ncols=True, leave=False, file=sys.stderr)
        self._prefix = prefix
        self.shown = ""  # the last step

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.close()

    def show(self, doing: str, done: int) -> None:
        """`doing`: the step that goes on; "": the same one. `done`: number of things that are done."""
        new = doing not in ("", self.shown)
        if new:
            self.shown = doing
        if self._bar.disable:
            if new:
                print(self._prefix + doing, flush=True)
        elif new or done != self._bar.n:
            self._bar.n = done
            self._bar.set_description_str(self.shown)


@contextlib.contextmanager
def for_about(seconds: float, text: str) -> Iterator[None]:
    """Shows the time that work of a known length has taken."""
    print(text, file=sys.stderr, flush=True)
    bar = tqdm(
        total=round(seconds, 1),
        disable=None,
        dynamic_ncols=True,
        leave=False,
        file=sys.stderr,
        bar_format="{bar} {n:.0f} of about {total:.0f} s",
    )
    ended, begun_s = threading.Event(), time.monotonic()

    def tick() -> None:
        while not ended.wait(TICK_S):
            bar.update(min(seconds, time.monotonic() - begun_s) - bar.n)

    thread = threading.Thread(target=tick, name="progress", daemon=True)
    if not bar.disable:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if thread.is_alive():
            thread.join()
        bar.close()
