"""What a request may ask for, the same for every method that generates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias, TypedDict

from alignedserve.client.types import Message

ChatTurn: TypeAlias = Message | Mapping[str, str]
"""A turn as `Message("user", "Hello")` or as `{"role": "user", "content": "Hello"}`."""


class Options(TypedDict, total=False):
    """Keyword arguments of `generate`, `stream`, `chat` and `chat_stream`.

    None, or leaving an option out, takes the model's own default (or the client's, for `model` and `timeout_s`).
    The server checks ranges: `InvalidRequestError.param` then names the option.
    """

    model: str | None
    """A served model's name; may be left out where only one is served."""
    request_id: str | None
    """A name of your own, for `cancel`, logs and errors; unique among running requests. Otherwise one is made up."""
    timeout_s: float | None
    """Seconds until the request is given up with `DeadlineError`, a stream's last chunk included. `math.inf`: never."""
    max_retries: int | None
    """How often it is asked for again after a refusal; see `Client`. The server does not hear of it."""
    wait_objective_s: float | None
    """The longest that it should wait between its prefill (or an eviction) and its next token; 0.01 to 86,400 s."""

    max_tokens: int | None
    """Most tokens to generate (prompts: 16; chat: what the model's positions leave)."""
    min_tokens: int | None
    """Fewest tokens before an end token or a stop string may end the answer."""
    temperature: float | None
    """0 (greedy) to 2."""
    top_p: float | None
    """Draw from the most likely tokens that have this probability together; above 0, up to 1."""
    top_k: int | None
    """Draw from so many most likely tokens; 0: no limit."""
    min_p: float | None
    """Leave out tokens less likely than this fraction of the most likely one's probability; 0 to 1."""
    seed: int | None
    """Makes the draws repeatable; a signed 64-bit integer."""
    repetition_penalty: float | None
    """Above 1 makes tokens of prompt and answer less likely; above 0, up to 100."""
    presence_penalty: float | None
    """Subtracted once from the logit of each token in the answer; -2 to 2."""
    frequency_penalty: float | None
    """Subtracted from a token's logit each time the answer has it; -2 to 2."""
    logit_bias: Mapping[int, float] | None
    """Token id to what is added to its logit."""
    logprobs: int | None
    """Log-probabilities of the generated tokens, each with so many most likely alternatives (0: none); up to 20."""
    stop: str | Iterable[str] | None
    """Strings that end the answer; they are not part of its text."""
    stop_token_ids: Iterable[int] | None
    """Tokens that end the answer."""
    ignore_eos: bool | None
    """Go on past the model's end tokens."""
    n: int | None
    """Answers to the same prompt; 1 to 16."""
    include_timings: bool | None
    """Ask for `timings`: seconds in each stage."""
    allow_special_tokens: bool | None
    """What a text prompt spells like a special token is that token; otherwise it is text. Not for conversations."""


class Request(Options, total=False):
    """One request of a batch, as a dict: exactly one of the three inputs, and options of its own."""

    prompt: str | None
    """Text, tokenised by the server."""
    prompt_token_ids: Iterable[int] | None
    """Tokens instead."""
    messages: Iterable[ChatTurn] | None
    """A conversation instead."""


BatchItem: TypeAlias = str | Sequence[int] | Request
"""What `generate_many` takes: a prompt, a prompt's token ids, or a `Request`."""

ChatItem: TypeAlias = Sequence[ChatTurn] | Request
"""What `chat_many` takes: a conversation, or a `Request`."""

Progress: TypeAlias = bool | Callable[[int, int | None], object]
"""True: a progress bar of `tqdm`. A function: called with how many have ended, and of how many (None: not known)."""
