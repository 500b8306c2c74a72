"""Who decodes since when, and for how many tokens on average: what a forecast of the decode load rests on."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

from alignedserve.errors import AccountingError

GAIN = 0.05  # of the running means: the last twenty requests or so


class DecodeTimes:
    """Running means are over requests that ended. O(log n) a request, but for the move of a list's tail."""

    def __init__(self) -> None:
        self._starts: list[float] = []  # when each request that decodes now has joined; sorted
        self.mean_tokens = 0.0  # that a request decodes; 0: none has ended yet
        self.stay_s = 0.0  # mean time from the start of prefill to the end; 0: not known yet

    def __len__(self) -> int:
        return len(self._starts)

    def begin(self, now_s: float) -> None:
        """A request has joined a running batch."""
        insort(self._starts, now_s)

    def leave(self, since_s: float) -> None:
        """One that decoded since `since_s` does not any more."""
        place = bisect_left(self._starts, since_s)
        if place == len(self._starts) or self._starts[place] != since_s:
            raise AccountingError(f"no request decodes since {since_s:g} s")
        del self._starts[place]

    def finish(self, tokens: int, stay_s: float) -> None:
        """A request has ended after `tokens` iterations, `stay_s` after its prefill was begun."""
        self.mean_tokens += (GAIN if self.mean_tokens else 1.0) * (max(1, tokens) - self.mean_tokens)
        self.stay_s += (GAIN if self.stay_s else 1.0) * (stay_s - self.stay_s)

    def decoding_since(self, since_s: float) -> int:
        """How many of those that decode now began after `since_s`."""
        return len(self._starts) - bisect_right(self._starts, since_s)
