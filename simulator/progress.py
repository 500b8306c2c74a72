"""Progress of `simulate` on stderr: a bar on a terminal, a line for each run elsewhere."""

from __future__ import annotations

import sys

from tqdm import tqdm


class Steps:
    """A known number of steps. `begin` before each of them; use it as a context."""

    def __init__(self, total: int, unit: str) -> None:
        # disable=None: only where stderr is a terminal
        self._bar = tqdm(total=total, unit=unit, disable=None, dynamic_ncols=True, leave=False, file=sys.stderr)
        self._begun = False

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def begin(self, text: str) -> None:
        """The next step begins, and the one before has ended."""
        self._bar.update(int(self._begun))
        self._begun = True
        if self._bar.disable:
            self.line(text)
        else:
            self._bar.set_description_str(text)

    def line(self, text: str) -> None:
        """A line that stays, above the bar."""
        tqdm.write(text, file=sys.stderr)
