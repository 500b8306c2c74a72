"""The checks of a client's program: they run one after the other, and each says as a line of JSON whether it held.

Only Python's own library: every program runs in an environment of its own, by `python NAME_checks.py URL [CHECK ...]`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

Check = Callable[[str], Any]
CHECKS: list[Check] = []
MODEL = "tiny"


def check(function: Check) -> Check:
    """A check gets the server's URL, and may be a coroutine function."""
    CHECKS.append(function)
    return function


@dataclass(slots=True)
class Raised:
    """`error` is there after the `with` block."""

    error: Any = None


@contextmanager
def raises(kind: type[Exception]) -> Iterator[Raised]:
    found = Raised()
    try:
        yield found
    except kind as error:
        found.error = error
    else:
        raise AssertionError(f"{kind.__name__} was not raised")


def main() -> None:
    url, *chosen = sys.argv[1:]
    with asyncio.Runner() as runner:  # one loop for all: clients keep connections
        for function in CHECKS:
            if chosen and function.__name__ not in chosen:
                continue
            begun, failed = time.monotonic(), ""
            try:
                found = function(url)
                if inspect.isawaitable(found):
                    runner.run(_wait(found))
            except Exception:
                failed = traceback.format_exc()
            line = {"check": function.__name__, "failed": failed, "seconds": round(time.monotonic() - begun, 2)}
            print(json.dumps(line), flush=True)


async def _wait(found: Any) -> None:
    await found
