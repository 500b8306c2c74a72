"""What waits in the pool by prefix length, and what went first while a request waited: for the live page."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from alignedserve.request import RequestKey

SUB_BITS = 3  # buckets for each doubling: 8, so that a bucket is at most an eighth wide
MOST_SENT = 1 << 16  # sent requests whose lengths are remembered
MOST_STAYS = 1 << 14  # ended stays that are remembered
MOST_OF_ONE = 64  # of one request


def bucket_of(tokens: int) -> int:
    """The number of a length's bucket. Lengths below 16 have one each."""
    shift = max(0, tokens.bit_length() - SUB_BITS - 1)
    return (shift << SUB_BITS) + (tokens >> shift)


def bounds_of(bucket: int) -> tuple[int, int]:
    """The first and the last length in a bucket."""
    shift = max(0, (bucket >> SUB_BITS) - 1)
    first = (bucket - (shift << SUB_BITS)) << shift
    return first, first + (1 << shift) - 1


class WaitingLengths:
    """Counts by bucket. O(1) for each change; some 150 buckets up to a million tokens."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def add(self, tokens: int, change: int) -> None:
        bucket = bucket_of(tokens)
        count = self._counts.get(bucket, 0) + change
        if count:
            self._counts[bucket] = count
        else:
            self._counts.pop(bucket, None)

    def rows(self) -> list[tuple[int, int, int]]:
        """(first length, last length, requests) of each bucket that is not empty, shortest first."""
        return [(*bounds_of(bucket), count) for bucket, count in sorted(self._counts.items())]

    def same(self, other: WaitingLengths) -> bool:
        return self._counts == other._counts


@dataclass(frozen=True, slots=True)
class Arrival:
    """The state of the pool when a request entered it.

    `ahead`: requests that waited already. `sent`: requests that had been sent since the start.
    """

    ahead: int = 0
    sent: int = 0


Waiting = tuple[int, Arrival, int, float]
"""Of a request in the pool: its epoch, its arrival there, the tokens of its KV, and how long it has waited."""


@dataclass(frozen=True, slots=True)
class Stay:
    """One stay in the pool. `sent_first`: requests that left it meanwhile for a decode instance.

    Of them `shorter` and `longer` by prefix length, as far as they are remembered. Not `joined`: it came back, or was
    lost, before it decoded. `epoch`: of the request then. Not `over`: up to now. `decode_id`: "" if it ended there.
    """

    epoch: int
    decode_id: str
    kv_tokens: int
    waited_s: float
    ahead: int
    sent_first: int
    shorter: int
    longer: int
    joined: bool
    over: bool


@dataclass(slots=True)
class _Left:
    epoch: int
    arrival: Arrival
    sent: int
    kv_tokens: int
    waited_s: float
    decode_id: str
    joined: bool = False
    over: bool = True


class PoolStays:
    """Remembers the newest stays by request id, all epochs together. O(1) for each request; `of` counts."""

    def __init__(self) -> None:
        self._sent = 0
        self._lengths: deque[int] = deque(maxlen=MOST_SENT)  # of the last requests that were sent, the newest last
        self._left: OrderedDict[str, list[_Left]] = OrderedDict()  # by request id, the one that left last at the end
        self._count = 0

    def arrive(self, ahead: int) -> Arrival:
        return Arrival(ahead, self._sent)

    def leave(self, key: RequestKey, arrival: Arrival, kv_tokens: int, waited_s: float, decode_id: str) -> None:
        """The request is sent to a decode instance."""
        self.end(key, arrival, kv_tokens, waited_s, decode_id)
        self._sent += 1
        self._lengths.append(kv_tokens)

    def end(self, key: RequestKey, arrival: Arrival, kv_tokens: int, waited_s: float, decode_id: str = "") -> None:
        """The request leaves the pool; without `decode_id` it ends there."""
        request_id = key.request_id
        stays = self._left.setdefault(request_id, [])
        stays.append(_Left(key.epoch, arrival, self._sent, kv_tokens, waited_s, decode_id))
        self._left.move_to_end(request_id)
        self._count += 1
        while self._count > MOST_STAYS and len(self._left) > 1:
            self._count -= len(self._left.popitem(last=False)[1])
        if len(stays) > MOST_OF_ONE:
            del stays[0]
            self._count -= 1

    def join(self, request_id: str) -> None:
        """The request decodes after its newest stay."""
        if stays := self._left.get(request_id):
            stays[-1].joined = True

    def of(self, request_id: str, waiting: Waiting | None = None) -> Iterator[Stay]:
        """The request's stays, the first one first. `waiting`: its present one, if it is in the pool."""
        stays = list(self._left.get(request_id, ()))
        if waiting is not None:
            epoch, arrival, kv_tokens, waited_s = waiting
            stays.append(_Left(epoch, arrival, self._sent, kv_tokens, waited_s, "", over=False))
        oldest = self._sent - len(self._lengths)
        lengths = list(self._lengths) if stays else []
        for left in stays:
            known = lengths[max(0, left.arrival.sent - oldest) : max(0, left.sent - oldest)]
            yield Stay(
                left.epoch,
                left.decode_id,
                left.kv_tokens,
                left.waited_s,
                left.arrival.ahead,
                left.sent - left.arrival.sent,
                sum(tokens < left.kv_tokens for tokens in known),
                sum(tokens > left.kv_tokens for tokens in known),
                left.joined,
                left.over,
            )
