"""How the processes of a Gloo group find each other: by values that they exchange, so that no store port is open."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

from torch._C._distributed_c10d import Store


class Values(Protocol):
    """Values by key, for all processes of a group: for example a `Rendezvous`."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout_s: float) -> bytes:
        """Waits for the value. Raises TransferError, RuntimeError."""


class GroupStore(Store):
    """The values of one group. It also notes what this process has published, which contains its listening address."""

    def __init__(self, values: Values, name: str, timeout_s: float) -> None:
        super().__init__()
        self.name = name
        self.own = b""
        self._values, self._timeout_s = values, timeout_s

    def set(self, key: str, value: Any) -> None:
        said = value.encode() if isinstance(value, str) else bytes(value)
        self.own += said
        self._values.set(f"{self.name}/{key}", said)

    def get(self, key: str) -> bytes:
        return self._values.get(f"{self.name}/{key}", self._timeout_s)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)
