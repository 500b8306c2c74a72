"""A bar for work of a known length, on stderr if that is a terminal."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

from tqdm import tqdm

TICK_S = 0.5


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
