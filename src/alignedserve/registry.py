"""A registry of named choices, imported on demand. Unknown names are refused."""

from __future__ import annotations

import importlib
from typing import Generic, TypeVar, cast

from alignedserve.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps a name from the configuration to `module:attribute`, which is imported on first use."""

    def __init__(self, kind: str, entries: dict[str, str]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def names(self) -> list[str]:
        return sorted(self._entries)

    def register(self, name: str, target: str) -> None:
        """Add `module:attribute` under `name`. Raises ConfigError if the name is taken."""
        if name in self._entries:
            raise ConfigError(f"{self.kind} {name!r} is registered twice")
        self._entries[name] = target

    def module(self, name: str) -> str:
        """The name of the module that has `name`. Raises ConfigError, which lists the choices, if there is none."""
        if name not in self._entries:
            raise ConfigError(f"unknown {self.kind} {name!r}; choose one of: {', '.join(self.names())}")
        return self._entries[name].partition(":")[0]

    def get(self, name: str) -> T:
        """The object called `name`. Raises ConfigError as `module` does."""
        module = self.module(name)
        attribute = self._entries[name].partition(":")[2]
        return cast(T, getattr(importlib.import_module(module), attribute))
