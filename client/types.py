"""The client's results: frozen dataclasses without protobuf.

`finish_reason` is "stop", "length", or "tool_calls" for an answer that ended with calls of tools.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from json import JSONDecodeError
from typing import Any

from alignedserve.errors import IncompleteAnswerError, ToolArgumentsError


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function by the model; `arguments` is JSON text, cut if the answer was."""

    id: str
    name: str
    arguments: str

    @property
    def parsed_arguments(self) -> dict[str, Any]:
        """Raises ToolArgumentsError unless the arguments are a JSON object."""
        try:
            found = json.loads(self.arguments) if self.arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise ToolArgumentsError(f"{self.name}({self.arguments}): not JSON ({error})", call=self) from error
        if not isinstance(found, dict):
            raise ToolArgumentsError(f"{self.name}({self.arguments}): not a JSON object", call=self)
        return found


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """The new part of call number `index` of an answer. `id` and `name` are "" after the first part of a call."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `role` is a role of the model's chat template ("system", "user", …).

    An answer's turn is `Completion.message`. The result of a call is a turn of role "tool" with its `tool_call_id`.
    """

    role: str
    content: str = ""
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str = ""


UNKNOWN_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token and the natural logarithm of its probability; `top` are the most likely tokens at its position.

    `rank` of a prompt's token among the most likely ones, from 1; None for other tokens. `token_id`: UNKNOWN_TOKEN in
    an answer of a batch, unless the request had `return_tokens_as_token_ids`.
    """

    token_id: int
    token: str
    logprob: float
    top: tuple[Logprob, ...] = ()
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts; `completion_tokens` is the sum over all `n` answers (all of `best_of`).

    `reasoning_tokens`: those of them that are reasoning; None if the model has none, and outside of chat.
    `cached_tokens`: those of the prompt whose KV was in the prefix cache; None if there is no cache.
    """

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int | None = None
    cached_tokens: int | None = None

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds that the request spent in each stage, and the instances that served it.

    `bubble_s` is the predicted part of `decode_s` lost to unequal prefix lengths; None without a cost model.
    `cached_tokens`: those of the prompt whose KV was in the prefix cache; None if there is no cache.
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
    cached_tokens: int | None = None

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
    """One complete answer. `text` is "" if the model has no tokenizer; `logprobs` is empty unless requested.

    In a chat, reasoning and calls of tools are apart from `text`.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[Logprob, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    read: Callable[[str], Any] | None = field(default=None, repr=False, compare=False)

    @property
    def message(self) -> Message:
        """The answer as a turn, to go on with the conversation."""
        return Message("assistant", self.text, tool_calls=self.tool_calls, reasoning=self.reasoning)

    @property
    def parsed(self) -> Any:
        """The answer as an object of `response_format`; None without that option, and for calls of tools.

        Raises IncompleteAnswerError if the answer was cut, by `max_tokens` or a stop string; for a pydantic model also
        its ValidationError, for what its schema does not say.
        """
        if self.read is None or self.finish_reason == "tool_calls":
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
    None unless requested by `include_timings`. `prompt_logprobs`: one for each token of the prompt, None for the first;
    empty unless requested.
    """

    request_id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    usage: Usage
    client_timings: ClientTimings
    timings: Timings | None = None
    prompt_logprobs: tuple[Logprob | None, ...] = ()

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def parsed(self) -> Any:
        """The first choice as an object of `response_format`. See `Choice.parsed`."""
        return self.choices[0].parsed

    @property
    def reasoning(self) -> str:
        """Reasoning of the first choice."""
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Calls of tools of the first choice."""
        return self.choices[0].tool_calls

    @property
    def message(self) -> Message:
        """The first choice as a turn, to go on with the conversation."""
        return self.choices[0].message

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Generated tokens of the first choice."""
        return self.choices[0].token_ids


@dataclass(frozen=True, slots=True)
class Chunk:
    """New text and tokens of answer `index`. Joined in order, the chunks of an index are the whole answer.

    In a chat, new reasoning and new parts of calls are apart from `text`.

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
    reasoning: str = ""
    tool_calls: tuple[ToolCallPart, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A served model; `max_positions` is the maximum number of tokens of prompt and answer together."""

    id: str
    max_positions: int
