"""How much slower this machine runs Python than the one on which the tests' limits were chosen."""

from __future__ import annotations

import argparse
import functools
import inspect
import time

USUAL_S = 0.0105  # CPU time of `_compiling_s` on two cores of an Intel Xeon that had nothing else to do
REPEATED = 10


@functools.cache
def slowness() -> float:
    """At least 1. A limit on what is mostly starts of Python is multiplied by it: no test fails because a machine is
    slow, and none has more time on the usual one."""
    source = inspect.getsource(argparse)
    return max(1.0, min(_compiling_s(source) for _ in range(REPEATED)) / USUAL_S)


def _compiling_s(source: str) -> float:
    """CPU time, so that other processes count as little as they can."""
    begun_s = time.thread_time()
    compile(source, "argparse.py", "exec")
    return time.thread_time() - begun_s
