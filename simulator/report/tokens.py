"""Token times of a run as columns: the basis of every latency, in each of its definitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alignedserve.simulator.report.results import RequestResult

Floats = NDArray[np.float64]
_LONG_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """Requests that got their tokens, one row each. Seconds; NaN if a request has too few tokens for the value.

    `gaps`: all times between two tokens of one answer, pooled. `gap_p99`: the 99th percentile of a request's own gaps
    (Apt-Serve). `longest_tenth`: the mean of the longest tenth of them, at least one (Mooncake). `tpot`: the mean of
    them, (last - first) / (n - 1) (DistServe). `tpot_without_pool_wait`: the same minus its wait in the pool.
    """

    arrival: Floats
    ttft: Floats
    second_token: Floats
    last: Floats
    tpot: Floats
    tpot_without_pool_wait: Floats
    gap_p99: Floats
    longest_tenth: Floats
    pool_wait: Floats
    gaps: Floats
    stamps: Floats
    lengths: NDArray[np.int64]
    """Prefix lengths that each token's pass read; for the first token of an answer, its prompt length."""


def token_times(requests: Sequence[RequestResult]) -> TokenTimes:
    served = [request for request in requests if len(request.token_s)]
    counts = np.array([len(request.token_s) for request in served], dtype=np.int64)
    stamps = np.concatenate([np.frombuffer(request.token_s) for request in served] or [np.empty(0)])
    ends = np.cumsum(counts)
    starts = ends - counts
    arrival = _column(request.arrival.arrival_s for request in served)
    wait = _column(request.pool_wait_s for request in served)
    prompts = np.array([request.arrival.input_tokens for request in served], dtype=np.int64)
    row = np.repeat(np.arange(len(served)), counts)
    place = np.arange(len(stamps)) - starts[row]
    gaps = np.diff(stamps)[row[1:] == row[:-1]] if len(stamps) else stamps
    first, last = stamps[starts], stamps[ends - 1]
    several = counts > 1
    steps = np.maximum(counts - 1, 1)
    gap_p99, longest_tenth = _tails(gaps, counts - 1)
    return TokenTimes(
        arrival=arrival,
        ttft=first - arrival,
        second_token=np.where(several, stamps[np.minimum(starts + 1, ends - 1)] - arrival, np.nan),
        last=last,
        tpot=np.where(several, (last - first) / steps, np.nan),
        tpot_without_pool_wait=np.where(several, (last - first - wait) / steps, np.nan),
        gap_p99=gap_p99,
        longest_tenth=longest_tenth,
        pool_wait=wait,
        gaps=gaps,
        stamps=stamps,
        lengths=prompts[row] + place,
    )


def _column(values: Any) -> Floats:
    return np.fromiter(values, dtype=np.float64)


def _tails(gaps: Floats, counts: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Each request's P99 gap (linear interpolation) and mean of its longest tenth. `counts`: gaps of each request."""
    p99 = np.full(len(counts), np.nan)
    longest = np.full(len(counts), np.nan)
    some = np.flatnonzero(counts > 0)
    if not len(some):
        return p99, longest
    ordered = gaps[np.lexsort((gaps, np.repeat(np.arange(len(counts)), counts)))]
    ends = np.cumsum(counts)[some]
    size = counts[some]
    rank = 0.99 * (size - 1)
    low = np.floor(rank).astype(np.int64)
    below = ordered[ends - size + low]
    above = ordered[ends - size + np.minimum(low + 1, size - 1)]
    p99[some] = below + (above - below) * (rank - low)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    taken = np.maximum(np.ceil(_LONG_SHARE * size - 1e-9).astype(np.int64), 1)
    longest[some] = (sums[ends] - sums[ends - taken]) / taken
    return p99, longest
