"""Large requests share what they may cost: clients that send many wait, and others are served as if there were none."""

from __future__ import annotations

import asyncio
import time

LARGE_BYTES = 64 << 10  # of a request, what is beyond
BYTES_S = 8 << 20
BURST_BYTES = 8 << 20
_GRAIN_S = 0.05  # less is not waited for: waking up has its price, too


class Pace:
    """So many bytes of large requests are taken in a second. Reading 4 MiB of JSON takes 10 to 30 ms of the event loop,
    so this is a twentieth of its time; two million tokens of text a second are more than anybody's prompts.
    """

    def __init__(self, bytes_s: float = BYTES_S, burst_bytes: float = BURST_BYTES) -> None:
        self._bytes_s = bytes_s
        self._burst_s = burst_bytes / bytes_s
        self._paid_until_s = 0.0

    async def take(self, size: int) -> float:
        """Seconds waited until so many bytes more may be taken: none, after a while in which few were."""
        now_s = time.monotonic()
        self._paid_until_s = max(self._paid_until_s, now_s - self._burst_s) + size / self._bytes_s
        if self._paid_until_s > now_s + _GRAIN_S:
            await asyncio.sleep(self._paid_until_s - now_s)
        return time.monotonic() - now_s
