"""Limits the rate at which large requests are read, so that they do not delay small requests."""

from __future__ import annotations

import asyncio

from alignedserve.errors import OverloadedError

LARGE_BYTES = 64 << 10  # smaller requests do not wait
BYTES_S = 8 << 20
BURST_BYTES = 8 << 20
MOST_WAITING_BYTES = 256 << 20
_GRAIN_S = 0.05  # shorter waits are skipped: a wake-up costs time as well


class Pace:
    """Limits large requests to `bytes_s` bytes a second, after a burst of `burst_bytes`.

    Reading 4 MiB of JSON takes 10 to 30 ms of the event loop, so the default limit takes about a twentieth of its time.
    It allows about two million tokens of text a second, which is more than a gateway's clients need.
    """

    def __init__(
        self, bytes_s: float = BYTES_S, burst_bytes: float = BURST_BYTES, most_waiting_bytes: float = MOST_WAITING_BYTES
    ) -> None:
        self._bytes_s = bytes_s
        self._burst_s = burst_bytes / bytes_s
        self._longest_s = most_waiting_bytes / bytes_s
        self._paid_until_s = 0.0

    async def take(self, size: int) -> None:
        """Returns when a request of `size` bytes may be read; immediately if few bytes were taken recently.

        A request that is cancelled while it waits takes none of the rate. Raises OverloadedError if large requests of
        more than `most_waiting_bytes` would be waiting.
        """
        now_s = asyncio.get_running_loop().time()
        cost_s = size / self._bytes_s
        due_s = max(self._paid_until_s, now_s - self._burst_s) + cost_s
        if due_s > now_s + self._longest_s:
            message = "too many large requests are waiting at this gateway; try again later"
            raise OverloadedError(message, retry_after_s=due_s - now_s - self._longest_s)
        self._paid_until_s = due_s
        if due_s > now_s + _GRAIN_S:
            try:
                await asyncio.sleep(due_s - now_s)
            except asyncio.CancelledError:
                self._paid_until_s -= cost_s
                raise
