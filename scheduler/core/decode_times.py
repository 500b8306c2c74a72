"""When each running request joined, and how many tokens requests decode on average: the basis of the load forecast."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

from alignedserve.errors import AccountingError

GAIN = 0.05  # of the running means: about the last twenty requests


class DecodeTimes:
    """Running means over ended requests. O(log n) for each request, plus the move of a list's tail."""

    def __init__(self) -> None:
        self._starts: list[float] = []  # when each running request joined; sorted
        self.mean_tokens = 0.0  # that a request decodes; 0: no request has ended yet
        self.stay_s = 0.0  # mean time from the start of prefill to the end; 0: not known yet

    def __len__(self) -> int:
        return len(self._starts)

    def begin(self, now_s: float) -> None:
        """A request has joined a running batch."""
        insort(self._starts, now_s)

    def leave(self, since_s: float) -> None:
        """A request that decoded since `since_s` has left. Raises AccountingError if there is none."""
        place = bisect_left(self._starts, since_s)
        if place == len(self._starts) or self._starts[place] != since_s:
            raise AccountingError(f"no request has been decoding since {since_s:g} s")
        del self._starts[place]

    def finish(self, tokens: int, stay_s: float) -> None:
        """A request has ended after `tokens` iterations, `stay_s` after its prefill began."""
        self.mean_tokens += (GAIN if self.mean_tokens else 1.0) * (max(1, tokens) - self.mean_tokens)
        self.stay_s += (GAIN if self.stay_s else 1.0) * (stay_s - self.stay_s)

    def decoding_since(self, since_s: float) -> int:
        """The number of running requests that joined after `since_s`."""
        return len(self._starts) - bisect_right(self._starts, since_s)
