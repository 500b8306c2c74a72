"""The contract of a placement: which rank of a decode instance a request runs on.

With data-parallel attention and expert-parallel layers an iteration of the instance takes as long as its slowest rank
(arXiv 2601.17855). A placement decides by counters that a scheduler has: numbers and lengths, no length of an answer.
It has no clock and does no I/O; the caller carries out what it returns and keeps the counters up to date.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey
from alignedserve.scheduler.cost.step import StepCost

ASKED_AFTER = 64  # plans without a change after which a placement is asked again: unequal numbers grow apart


@dataclass(frozen=True, slots=True)
class Ready:
    """A request that can decode: it has `tokens` tokens of KV, and takes `blocks` blocks to join a rank.

    `number`: its place in the order in which requests could first decode; a preempted request keeps it.
    """

    key: RequestKey
    tokens: int
    blocks: int
    number: int


@dataclass(slots=True)
class Rank:
    """Counters of one rank at an iteration boundary.

    `requests` run or are being copied in, and have `tokens` tokens of KV, the longest `longest` and the shortest
    `shortest` (0 without requests). `queued` requests with `queued_tokens` were placed here and wait. `slots` more
    requests and `room_blocks` blocks can join now.
    """

    number: int
    requests: int = 0
    tokens: int = 0
    longest: int = 0
    shortest: int = 0
    queued: int = 0
    queued_tokens: int = 0
    slots: int = 0
    room_blocks: int = 0

    def takes(self, request: Ready) -> bool:
        return self.slots > 0 and request.blocks <= self.room_blocks

    def take(self, request: Ready) -> None:
        """The request is about to join."""
        self.shortest = min(self.shortest, request.tokens) if self.requests else request.tokens
        self.longest = max(self.longest, request.tokens)
        self.requests += 1
        self.tokens += request.tokens
        self.slots -= 1
        self.room_blocks -= request.blocks


@dataclass(frozen=True, slots=True)
class Place:
    """The request joins the rank with this boundary."""

    key: RequestKey
    rank: int


@dataclass(frozen=True, slots=True)
class Move:
    """The running request goes to another rank; its KV is copied."""

    key: RequestKey
    from_rank: int
    to_rank: int


class Members(ABC):
    """The running requests of each rank."""

    @abstractmethod
    def of(self, rank: int) -> Iterable[Ready]:
        """Those that may move: they have run since they joined. `blocks`: what they would take elsewhere."""


class Placement(ABC):
    """Placement for one decode instance. `add` each request once it can decode.

    `moves` and then `refill` are called at each boundary before which a request came, joined, left or ended,
    in a cluster also after `ASKED_AFTER` boundaries without.

    A request that was placed and is preempted comes back by `add`, unless the placement is `STICKY`: then it waits at
    its rank, before all others.
    """

    STICKY: ClassVar[bool] = True
    LOOKS_AT_RANKS: ClassVar[bool] = True  # `add` reads the counters; otherwise they need not be up to date

    def __init__(self, ranks: int) -> None:
        """`ranks`: their number, at least 1."""
        self.ranks = ranks

    def use_cost(self, cost: StepCost) -> None:
        """The cost model of a rank, if there is one. Called once, before the first request. The base ignores it."""
        return

    def share_cache(self) -> None:
        """The ranks have one cache, so that a move copies nothing. Called once, at first. The base ignores it."""
        return

    @abstractmethod
    def add(self, request: Ready, ranks: Sequence[Rank]) -> int | None:
        """The rank that the request waits at, first come, first served; None: it waits here until `refill`."""

    def refill(self, ranks: Sequence[Rank]) -> list[Place]:
        """Which of the requests that wait here join which rank now, after `moves`. Changes the counters accordingly."""
        return []

    def choose(self, request: Ready, ranks: Sequence[Rank]) -> int:
        """The rank that a request joins now: one that takes it, of which there must be one. Changes the counters.

        For a caller that keeps the waiting requests itself, and does not `add` them. Raises AccountingError if the
        placement places it nowhere.
        """
        number = self.add(request, [rank for rank in ranks if rank.takes(request)])
        if number is None:
            places = self.refill(ranks)
            if [place.key for place in places] != [request.key]:
                raise AccountingError(f"{type(self).__name__} does not place {request.key}, for which ranks have room")
            return places[0].rank
        ranks[number].take(request)
        return number

    def moves(self, ranks: Sequence[Rank], members: Members) -> list[Move]:
        """Running requests to give to other ranks. Changes the counters of `ranks` accordingly."""
        return []

    def waiting(self) -> int:
        """The number of requests that wait here."""
        return 0
