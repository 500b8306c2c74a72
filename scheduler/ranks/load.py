"""What a rank's load consists of, in tokens of KV that take as long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.scheduler.ranks.base import Rank, Ready


@dataclass(frozen=True, slots=True)
class Weights:
    """Seconds of a token of KV; how many tokens take as long as one more request beside its KV; and how many as each
    token by which a request is shorter than the longest.
    """

    token_s: float
    request: float
    unequal: float


def added(rank: Rank, tokens: int, weights: Weights) -> float:
    """The load that a request of so many tokens adds to the rank."""
    count, longest = rank.requests, rank.longest if rank.requests else 0
    shorter = (count + 1) * max(longest, tokens) - count * longest - tokens
    return tokens + weights.request + weights.unequal * shorter


def freed(rank: Rank, tokens: int, longest: int, weights: Weights) -> float:
    """The load that the rank loses with a request of so many tokens. `longest`: of those that stay."""
    shorter = rank.requests * rank.longest - (rank.requests - 1) * longest - tokens
    return tokens + weights.request + weights.unequal * shorter


def leave(rank: Rank, request: Ready, others: Sequence[Ready]) -> None:
    """The request is about to leave. `others`: of those that stay, in order of length."""
    rank.requests -= 1
    rank.tokens -= request.tokens
    rank.slots += 1
    if request.tokens >= rank.longest:
        rank.longest = others[-1].tokens if others else rank.shortest
    if request.tokens <= rank.shortest:
        rank.shortest = others[0].tokens if others else rank.longest
