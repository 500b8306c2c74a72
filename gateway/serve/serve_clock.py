"""Ray Serve times its health checks by the clock that people set. Set back by an hour, it asks no gateway and no proxy
for an hour whether it lives, so none that dies is replaced; set forward, checks that are under way count as missed.

Its modules get a clock that goes on whatever becomes of that one.
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
    """Unix seconds, as if the clock had not been set since this process began."""
    return _BEHIND_S + time.monotonic()


class _Finder(importlib.abc.MetaPathFinder):
    """Of CLOCKED, which most workers of Ray never import."""

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
    """At the start of a worker of Ray, before it knows what it will be."""
    give_steady_timer(steady_time)
    for name in CLOCKED & sys.modules.keys():
        give_steady_clock(sys.modules[name], steady_time)
    sys.meta_path.insert(0, _Finder())
