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

MODULES = frozenset({"ray.serve._private.deployment_state", "ray.serve._private.haproxy"})
_BEHIND_S = time.time() - time.monotonic()


def steady_time() -> float:
    """Unix seconds, as if the clock had not been set since this process began."""
    return _BEHIND_S + time.monotonic()


class _Finder(importlib.abc.MetaPathFinder):
    """Of MODULES, which most workers of Ray never import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name in MODULES else None
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(_execute, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _execute(load: Callable[[ModuleType], None], module: ModuleType) -> None:
    load(module)
    give_steady_clock(module)


def give_steady_clock(module: ModuleType) -> None:
    if getattr(module, "time", None) is time:
        # A module itself, and no class of ours: Serve pickles actors whose methods refer to it, by its name.
        steady_module = ModuleType("time")
        steady_module.__dict__.update(vars(time), time=steady_time)
        module.time = steady_module  # type: ignore[attr-defined]


def steady() -> None:
    """At the start of a worker of Ray, before it knows what it will be."""
    from ray._common import utils

    if isinstance(timer := getattr(utils, "Timer", None), type):  # of Serve's proxies
        timer.time = lambda self: steady_time()  # type: ignore[attr-defined]
    for name in MODULES & sys.modules.keys():
        give_steady_clock(sys.modules[name])
    sys.meta_path.insert(0, _Finder())
