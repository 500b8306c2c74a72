"""Large requests share what they may cost: clients that send many wait, and others are served as if there were none."""

from __future__ import annotations

import asyncio

from alignedserve.errors import OverloadedError

LARGE_BYTES = 64 << 10  # smaller requests do not wait
BYTES_S = 8 << 20
BURST_BYTES = 8 << 20
MOST_WAITING_BYTES = 256 << 20
_GRAIN_S = 0.05  # less is not waited for: waking up has its price, too


class Pace:
    """So many bytes of large requests are taken in a second. Reading 4 MiB of JSON takes 10 to 30 ms of the event loop,
    so this is a twentieth of its time; two million tokens of text a second are more than anybody's prompts.
    """

    def __init__(
        self, bytes_s: float = BYTES_S, burst_bytes: float = BURST_BYTES, most_waiting_bytes: float = MOST_WAITING_BYTES
    ) -> None:
        self._bytes_s = bytes_s
        self._burst_s = burst_bytes / bytes_s
        self._longest_s = most_waiting_bytes / bytes_s
        self._paid_until_s = 0.0

    async def take(self, size: int) -> None:
        """Returns once a request of `size` bytes may be taken: at once, after a while in which few were.

        Who is cancelled while it waits has taken nothing. Raises OverloadedError where too much waits already.
        """
        now_s = asyncio.get_running_loop().time()
        cost_s = size / self._bytes_s
        due_s = max(self._paid_until_s, now_s - self._burst_s) + cost_s
        if due_s > now_s + self._longest_s:
            message = "too many large requests wait at this gateway; try again later"
            raise OverloadedError(message, retry_after_s=due_s - now_s - self._longest_s)
        self._paid_until_s = due_s
        if due_s > now_s + _GRAIN_S:
            try:
                await asyncio.sleep(due_s - now_s)
            except asyncio.CancelledError:
                self._paid_until_s -= cost_s
                raise
