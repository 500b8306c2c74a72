"""The client's results: frozen dataclasses without protobuf.

`finish_reason` is a value of `alignedserve.request.FinishReason`: "stop", "length", "cancelled" or "error".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from json import JSONDecodeError
from typing import Any

from alignedserve.errors import IncompleteAnswerError


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `role` is a role of the model's chat template ("system", "user", …)."""

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
    """Token counts; `completion_tokens` is the sum over all `n` answers."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds that the request spent in each stage, and the instances that served it.

    `bubble_s` is the predicted part of `decode_s` lost to unequal prefix lengths; None without a cost model.
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
        """Seconds from the request's arrival at the gateway to its last token."""
        return self.queue_s + self.prefill_s + self.pool_s + self.prefetch_s + self.handover_s + self.decode_s


@dataclass(frozen=True, slots=True)
class ClientTimings:
    """Seconds that this client measured since the call, including retries, waits and broken connections.

    `ttft_s` is the time to the first token; None without streaming, and before a stream's first token.
    `attempts` counts how often the request was sent (1: no retry).
    """

    total_s: float
    ttft_s: float | None = None
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class Choice:
    """One complete answer. `text` is "" if the model has no tokenizer; `logprobs` is empty unless requested."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[Logprob, ...] = ()
    read: Callable[[str], Any] | None = field(default=None, repr=False, compare=False)

    @property
    def parsed(self) -> Any:
        """The answer as an object of `response_format`; None without that option.

        Raises IncompleteAnswerError if the answer was cut, by `max_tokens` or a stop string; for a pydantic model also
        its ValidationError, for what its schema does not say.
        """
        if self.read is None:
            return None
        if self.finish_reason != "stop":
            message = f"the answer ended by {self.finish_reason!r}, not by its own end: raise max_tokens"
            raise IncompleteAnswerError(message, text=self.text)
        try:
            return self.read(self.text)
        except JSONDecodeError as error:
            message = f"the answer was cut, by a stop string or stop token ({error})"
            raise IncompleteAnswerError(message, text=self.text) from error


@dataclass(frozen=True, slots=True)
class Completion:
    """The complete result of one request: `n` choices.

    `client_timings` are the seconds measured by this client. `timings` are the seconds of each stage in the cluster;
    None unless requested by `include_timings`.
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
    def parsed(self) -> Any:
        """The first choice as an object of `response_format`. See `Choice.parsed`."""
        return self.choices[0].parsed

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Generated tokens of the first choice."""
        return self.choices[0].token_ids


@dataclass(frozen=True, slots=True)
class Chunk:
    """New text and tokens of answer `index`. Joined in order, the chunks of an index are the whole answer.

    `finish_reason` is None until the last chunk of this answer. The first chunk of the stream has `prompt_token_ids`.
    The last chunk, which may have no text, has `usage` and, if requested, `timings`.
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
    """A served model; `max_positions` is the maximum number of tokens of prompt and answer together."""

    id: str
    max_positions: int
