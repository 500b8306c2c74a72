"""Options of a request. They are the same for all methods that generate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

from alignedserve.client.structured import ResponseFormat
from alignedserve.client.tools import ToolChoice, ToolLike
from alignedserve.client.types import Message

ChatTurn: TypeAlias = Message | Mapping[str, Any]
"""A turn as `Message("user", "Hello")` or as `{"role": "user", "content": "Hello"}`, with the HTTP API's fields."""


class Options(TypedDict, total=False):
    """Keyword arguments of `generate`, `stream`, `chat` and `chat_stream`.

    An option that is None or left out takes the model's default, or the client's for `model` and `timeout_s`.
    The server checks ranges. `InvalidRequestError.param` names an invalid option.
    """

    model: str | None
    """Name of a served model; optional if only one model is served."""
    request_id: str | None
    """An id of your own, for `cancel`, logs and errors; unique among running requests. By default it is generated."""
    timeout_s: float | None
    """Seconds until the request fails with `DeadlineError`; for streams up to the last chunk. `math.inf`: never."""
    max_retries: int | None
    """Maximum retries after a refusal; see `Client`. It is not sent to the server."""
    wait_objective_s: float | None
    """Wait objective: longest time between prefill (or an eviction) and the next token; 0.01 to 86,400 s."""
    priority: int | None
    """Of the requests that wait, one with a lower priority goes first (default 0; a signed 64-bit integer). From
    1,000,000 on a request only takes what others leave."""
    cache_salt: str | None
    """Only prompts with the same salt share cached KV; at most 1,024 characters."""
    session_id: str | None
    """Names the conversation, so that the prefix cache learns when it goes on; at most 256 characters."""

    max_tokens: int | None
    """Maximum tokens to generate (default for prompts: 16; for chat: all positions that the model has left)."""
    min_tokens: int | None
    """Minimum tokens before an end token or a stop string may end the answer."""
    temperature: float | None
    """0 (greedy) to 2."""
    top_p: float | None
    """Sample from the most likely tokens whose probabilities add up to this; above 0, up to 1."""
    top_k: int | None
    """Sample from this many most likely tokens; 0: no limit."""
    min_p: float | None
    """Exclude tokens below this fraction of the most likely token's probability; 0 to 1."""
    seed: int | None
    """Makes sampling repeatable; a signed 64-bit integer."""
    repetition_penalty: float | None
    """Above 1 makes tokens of prompt and answer less likely; above 0, up to 100."""
    presence_penalty: float | None
    """Subtracted once from the logit of each token in the answer; -2 to 2."""
    frequency_penalty: float | None
    """Subtracted from a token's logit each time the answer has it; -2 to 2."""
    logit_bias: Mapping[int, float] | None
    """Values added to logits, by token id."""
    logprobs: int | None
    """Return log probabilities of the generated tokens, each with this many alternatives (0: none); up to 20."""
    stop: str | Iterable[str] | None
    """Strings that end the answer. They are not part of its text."""
    stop_token_ids: Iterable[int] | None
    """Tokens that end the answer."""
    ignore_eos: bool | None
    """Continue after the model's end tokens."""
    allowed_token_ids: Iterable[int] | None
    """Choose from these tokens only."""
    bad_words: str | Iterable[str] | None
    """Words that the answer may not contain, each with and without a space before it."""
    bad_words_ids: Iterable[Iterable[int]] | None
    """Token sequences that may not be completed; tokens of the prompt count."""
    suppress_tokens: Iterable[int] | None
    """Tokens that may not be chosen."""
    begin_suppress_tokens: Iterable[int] | None
    """Tokens that the answer may not begin with."""
    forced_bos_token_id: int | Iterable[int] | None
    """The answer to a prompt of one token begins with one of these."""
    forced_eos_token_id: int | Iterable[int] | None
    """The token at the last place that `max_tokens` allows is one of these."""
    no_repeat_ngram_size: int | None
    """No sequence of this many tokens occurs twice in prompt and answer; 0: no limit."""
    min_length: int | None
    """Least number of tokens of prompt and answer together; `min_tokens` overrides it."""
    logprob_token_ids: Iterable[int] | None
    """With `logprobs`: the tokens whose log probabilities are returned, in place of the most likely ones."""
    skip_special_tokens: bool | None
    """Leave special tokens out of the text (the default)."""
    spaces_between_special_tokens: bool | None
    """Separate special tokens in the text by spaces, if the tokenizer does so for tokens (the default)."""
    include_stop_str_in_output: bool | None
    """The text ends with the stop string that ended it."""
    truncate_prompt_tokens: int | None
    """Use the last tokens of a longer prompt only; -1: as many as leave room for the answer."""
    truncation_side: Literal["left", "right"] | None
    """The side from which a longer prompt is cut; "left" by default."""
    prompt_logprobs: int | None
    """Return log probabilities of the prompt's tokens, each with this many alternatives; up to 20. Not in streams."""
    best_of: int | None
    """Generate this many answers to a prompt, and return the `n` with the highest log probability a token. Not in
    streams, not for conversations."""
    suffix: str | None
    """The text that follows the answer; needs a model with tokens for it. Not for conversations."""
    response_format: ResponseFormat | None
    """The answer is JSON of this pydantic model, dataclass or JSON schema; `Completion.parsed` is the object."""
    structured_outputs: Mapping[str, Any] | None
    """The answer follows one of `json` (as `response_format`), `regex`, `choice`, `grammar` and `structural_tag`;
    `whitespace_pattern` is what may stand between tokens of JSON."""
    tools: Iterable[ToolLike] | None
    """Functions that the model may call; in conversations, as the options below."""
    tool_choice: ToolChoice | None
    """"auto" (the default), "none", "required", or one function: the answer is then a call of it."""
    parallel_tool_calls: bool | None
    """False: an answer has at most one call."""
    reasoning_effort: str | None
    """A variable of the chat template: "low", "medium", "high" and others. "none" turns reasoning off."""
    enable_thinking: bool | None
    """A variable of the chat template: reasoning on or off."""
    chat_template_kwargs: Mapping[str, Any] | None
    """Variables of the chat template."""
    include_reasoning: bool | None
    """False: leave reasoning out of the answer; its tokens are counted all the same."""
    separate_reasoning: bool | None
    """False: reasoning is a part of the text."""
    thinking_token_budget: int | None
    """After this many tokens of reasoning, the marker that ends it is forced."""
    continue_final_message: bool | None
    """True: the answer goes on with the last message, which is the assistant's."""
    n: int | None
    """Number of answers to the prompt; 1 to 16."""
    include_timings: bool | None
    """Return `timings`: seconds in each stage."""
    allow_special_tokens: bool | None
    """Treat the spelling of a special token in a text prompt as that token, not as text. Not for conversations."""


class Request(Options, total=False):
    """One request of a batch, as a dict: exactly one of the three inputs, and its own options."""

    prompt: str | None
    """Text, tokenised by the server."""
    prompt_token_ids: Iterable[int] | None
    """Token ids instead of text."""
    messages: Iterable[ChatTurn] | None
    """A conversation instead of a prompt."""


BatchItem: TypeAlias = str | Sequence[int] | Request
"""An item of `generate_many`: a prompt, a prompt's token ids, or a `Request`."""

ChatItem: TypeAlias = Sequence[ChatTurn] | Request
"""An item of `chat_many`: a conversation, or a `Request`."""

Progress: TypeAlias = bool | Callable[[int, int | None], object]
"""True: a `tqdm` progress bar. A function is called with the finished and the total requests (None: unknown)."""
