"""Ray Serve times its health checks by the clock that people set. Set back by an hour, it asks no gateway and no proxy
for an hour whether it lives, so none that dies is replaced; set forward, checks that are under way count as missed.

Its modules get a clock that goes on whatever becomes of that one.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

MODULES = frozenset({"ray.serve._private.deployment_state", "ray.serve._private.haproxy"})
_BEHIND_S = time.time() - time.monotonic()


def steady_time() -> float:
    """Unix seconds, as if the clock had not been set since this process began."""
    return _BEHIND_S + time.monotonic()


class SteadyTime(ModuleType):
    """The module `time`, with a `time()` that nobody sets."""

    def __init__(self) -> None:
        super().__init__("time")
        self.time = steady_time

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class _Loader(importlib.abc.Loader):
    """Another loader, after which the module has a steady clock."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        give_steady_clock(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Of MODULES, which most workers of Ray never import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name in MODULES else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def give_steady_clock(module: ModuleType) -> None:
    if getattr(module, "time", None) is time:
        module.time = SteadyTime()  # type: ignore[attr-defined]


def steady() -> None:
    """At the start of a worker of Ray, before it knows what it will be."""
    from ray._common import utils

    if isinstance(timer := getattr(utils, "Timer", None), type):  # of Serve's proxies
        timer.time = lambda self: steady_time()  # type: ignore[attr-defined]
    for name in MODULES & sys.modules.keys():
        give_steady_clock(sys.modules[name])
    sys.meta_path.insert(0, _Finder())
