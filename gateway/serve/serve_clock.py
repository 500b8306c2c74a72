"""Gives Ray Serve a clock that does not change when the system clock is set.

Ray Serve times its health checks by the system clock. If the clock is set back by an hour, Serve checks no gateway and
no proxy for an hour, so it replaces none that dies. If the clock is set forward, pending checks count as missed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType

from alignedserve.gateway.serve.ray_private import CLOCKED, give_steady_clock, give_steady_timer

_BEHIND_S = time.time() - time.monotonic()


def steady_time() -> float:
    """Unix time in seconds, ignoring changes of the system clock since this process started."""
    return _BEHIND_S + time.monotonic()


class _Finder(importlib.abc.MetaPathFinder):
    """Replaces the clock in modules of CLOCKED when they are imported; most Ray workers never import them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name in CLOCKED else None
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(_execute, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _execute(load: Callable[[ModuleType], None], module: ModuleType) -> None:
    load(module)
    give_steady_clock(module, steady_time)


def steady() -> None:
    """Replaces Serve's clocks. Call it at the start of a Ray worker, before its role is known."""
    give_steady_timer(steady_time)
    for name in CLOCKED & sys.modules.keys():
        give_steady_clock(sys.modules[name], steady_time)
    sys.meta_path.insert(0, _Finder())
