"""The worth of a token: its cost in a batch of its own length that fills the instance.

If all waiting requests have to be served, taking tokens of short requests first gains nothing, because the long ones
remain. What counts is how much of that work an iteration does in its time. The worths are the prices of the linear
programme "serve all waiting requests in the least time", as if every length ran alone. With them a full batch of equal
lengths does 1 second's work a second. A batch of unequal lengths does less if the kernel waits for the longest. It does
more if short requests alone would leave memory unused, and long ones alone would leave places in the batch unused.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

SHORTEST_TOKENS, STEP = 16, 1.2  # lengths at which the cost is evaluated; linear between them
FULL = 0.93  # the share of its cache that an instance fills with KV while requests wait (measured: 0.91 to 0.95)


class TokenWorth:
    """For an instance that runs at most `max_requests`, with a cache of `cache_tokens` (0: not known, no limit).

    `iteration_s`: the time of an iteration of a batch of these lengths.
    """

    def __init__(
        self,
        iteration_s: Callable[[Sequence[int]], float],
        cache_tokens: int,
        max_requests: int,
        longest_tokens: int,
    ) -> None:
        self._lengths = [SHORTEST_TOKENS]
        while self._lengths[-1] < longest_tokens or len(self._lengths) < 2:  # a line needs two points
            self._lengths.append(int(STEP * self._lengths[-1]) + 1)
        self._seconds = []
        for tokens in self._lengths:
            fit = int(FULL * cache_tokens) // tokens if cache_tokens else max_requests
            requests = max(1, min(max_requests, fit))
            self._seconds.append(iteration_s([tokens] * requests) / requests)

    def of(self, tokens: int) -> float:
        """Worth of a token of a request of this length, in seconds."""
        lengths, seconds = self._lengths, self._seconds
        place = min(max(bisect_right(lengths, tokens), 1), len(lengths) - 1)
        share = (tokens - lengths[place - 1]) / (lengths[place] - lengths[place - 1])
        return max(0.0, seconds[place - 1] + share * (seconds[place] - seconds[place - 1]))
