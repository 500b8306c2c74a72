"""Copies of lost requests stay in the pool for their next epoch. Where the gateway is gone as well, there is none."""

from __future__ import annotations

from collections.abc import Iterable

from alignedserve.request import RequestKey

KEPT = 4096  # the newest of each gateway; the pool's audit finds what is older


class LeftBehind:
    """Which requests each gateway was told to be lost. What has gone on since has a new key: it is not meant."""

    def __init__(self) -> None:
        self._keys: dict[str, dict[RequestKey, None]] = {}

    def note(self, gateway_id: str, keys: Iterable[RequestKey]) -> None:
        known = self._keys.setdefault(gateway_id, {})
        known.update(dict.fromkeys(keys))
        while len(known) > KEPT:
            del known[next(iter(known))]

    def take(self, gateway_id: str) -> tuple[RequestKey, ...]:
        """Those of a gateway that does not come back."""
        return tuple(self._keys.pop(gateway_id, ()))
