"""What the gateway of a small cell knows of a request, the length of its answer included."""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.request import RequestKey
from alignedserve.scheduler.events import RequestMeta


@dataclass(slots=True)
class Request:
    """`answer`: tokens until it ends; `most`: its max_tokens. `tokens`: generated so far, over all epochs."""

    request_id: str
    prompt: int
    answer: int
    most: int
    group_id: str
    group_size: int = 1
    epoch: int = 0
    tokens: int = 0
    ended: str = ""  # "finished" or "cancelled"
    waiting_since_s: float | None = None
    longest_wait_s: float = 0.0  # from prefill or eviction to the next decode iteration

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.request_id, self.epoch)

    @property
    def kv_tokens(self) -> int:
        """The KV of the newest token is computed with the next one."""
        return self.prompt + self.tokens - 1

    @property
    def meta(self) -> RequestMeta:
        return RequestMeta(self.key, self.prompt + self.tokens, self.prompt + self.most, self.group_id, "gateway")

    def generate(self, now_s: float) -> bool:
        """One token more. Whether it was the last."""
        self.tokens += 1
        if self.waiting_since_s is not None:
            self.longest_wait_s = max(self.longest_wait_s, now_s - self.waiting_since_s)
            self.waiting_since_s = None
        return self.tokens >= self.answer
