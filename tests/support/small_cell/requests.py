"""The gateway's state of a request in a small cell, including the length of its answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from alignedserve.request import RequestKey
from alignedserve.scheduler.core.events import RequestMeta


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait, from a request's prefill or eviction to the end of its next iteration."""

    request_id: str
    since_s: float
    until_s: float
    evicted: bool


@dataclass(frozen=True, slots=True)
class Service:
    """The time in which a request held blocks of a decode cache: from its join to its end, or that of its eviction."""

    request_id: str
    decode_id: str
    begin_s: float
    end_s: float


@dataclass(slots=True)
class Request:
    """`answer`: its number of tokens. `most`: its max_tokens. `tokens`: generated so far in all epochs."""

    request_id: str
    prompt: int
    answer: int
    most: int
    group_id: str
    group_size: int = 1
    epoch: int = 0
    tokens: int = 0
    ended: str = ""  # "finished" or "cancelled"
    wait_objective_s: float = 0.0
    priority: int = 0
    waiting_since_s: float | None = None
    evicted: bool = False  # it waits because of an eviction
    waits: list[Wait] = field(default_factory=list)

    @property
    def longest_wait_s(self) -> float:
        """The longest wait for a decode iteration."""
        return max((wait.until_s - wait.since_s for wait in self.waits), default=0.0)

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.request_id, self.epoch)

    @property
    def kv_tokens(self) -> int:
        """The KV of the newest token is computed with the next token, so it is not counted."""
        return self.prompt + self.tokens - 1

    @property
    def meta(self) -> RequestMeta:
        return RequestMeta(
            key=self.key,
            prefix_tokens=self.prompt + self.tokens,
            max_total_tokens=self.prompt + self.most,
            group_id=self.group_id,
            gateway_id="gateway",
            wait_objective_s=self.wait_objective_s,
            priority=self.priority,
        )

    def wait(self, now_s: float, *, evicted: bool) -> None:
        """The request waits from now on."""
        self.waiting_since_s, self.evicted = now_s, evicted

    def generate(self, now_s: float) -> bool:
        """Count one more token. Returns whether it was the last."""
        self.tokens += 1
        if self.waiting_since_s is not None:
            self.waits.append(Wait(self.request_id, self.waiting_since_s, now_s, self.evicted))
            self.waiting_since_s = None
        return self.tokens >= self.answer
