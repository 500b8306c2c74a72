"""What the client hands back: frozen values, no protobuf in sight.

`finish_reason` is a word of `alignedserve.request.FinishReason`: "stop", "length", "cancelled" or "error".
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `role` is a word that the model's chat template knows ("system", "user", …)."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token and the natural logarithm of its probability; `top` are the most likely tokens at its position."""

    token_id: int
    token: str
    logprob: float
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens read and written; `completion_tokens` counts all `n` answers together."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds that the request spent in each stage, and the instances that served it.

    `bubble_s`: of `decode_s`, predicted to be owed to unequal lengths; None where the server has no cost model.
    """

    queue_s: float
    prefill_s: float
    pool_s: float
    prefetch_s: float
    handover_s: float
    decode_s: float
    prefill_id: str
    decode_id: str
    bubble_s: float | None = None

    @property
    def total_s(self) -> float:
        """Seconds in all stages together: from the request's arrival at the gateway to its last token."""
        return self.queue_s + self.prefill_s + self.pool_s + self.prefetch_s + self.handover_s + self.decode_s


@dataclass(frozen=True, slots=True)
class ClientTimings:
    """Seconds as this client measured them from the call on, retries, waits and broken connections included.

    `ttft_s` is the time to the first token; None for an answer that came whole, and before a stream's first token.
    `attempts` counts how often the request was sent (1: everything went well).
    """

    total_s: float
    ttft_s: float | None = None
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole answer. `text` is "" where the model has no tokenizer; `logprobs` is empty unless asked for."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole answer to one request: `n` choices.

    `client_timings` are the seconds that this client has seen; `timings`, those of each stage in the cluster, are None
    unless `include_timings` asked for them.
    """

    request_id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    usage: Usage
    client_timings: ClientTimings
    timings: Timings | None = None

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Generated tokens of the first choice."""
        return self.choices[0].token_ids


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is new of answer `index`. Joined in order, the `text` (or `token_ids`) of an index are the whole answer.

    `finish_reason` is None while more of this answer follows. `prompt_token_ids` comes with the first chunk of the
    stream; `usage`, and `timings` where asked for, with the last, which may carry no text.
    """

    request_id: str
    model: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    logprobs: tuple[Logprob, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    usage: Usage | None = None
    timings: Timings | None = None


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A served model; `max_positions` is the most tokens that prompt and answer may have together."""

    id: str
    max_positions: int
