"""OpenAI's request bodies as typed values. Everything that needs no model is checked here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from alignedserve.errors import InvalidRequestError
from alignedserve.gateway.body import fields as f
from alignedserve.gateway.body import refused
from alignedserve.gateway.body.messages import parse_messages
from alignedserve.gateway.failures import MissingFieldError, UnsupportedFeatureError, WrongTypeError
from alignedserve.request import MAX_LOGPROBS, MAX_SAMPLES, WAIT_OBJECTIVE_S

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 4096

TextPrompt = str
TokenPrompt = tuple[int, ...]

_SAMPLING = (
    f.number("temperature", "0 is greedy.", 0.0, 2.0),
    f.number(
        "top_p", "Draw from the most likely tokens that have this probability together.", 0.0, 1.0, above_low=True
    ),
    f.integer("top_k", "Draw from so many most likely tokens; 0 or -1: no limit.", -1, f.TOKEN_LIMIT),
    f.number("min_p", "Leave out tokens less likely than this share of the most likely one.", 0.0, 1.0),
    f.integer("seed", "Makes the answer repeatable.", *f.INT64),
    f.number(
        "repetition_penalty", "Above 1: tokens of prompt and answer become less likely.", 0.0, 100.0, above_low=True
    ),
    f.number("presence_penalty", "Taken once from the logit of each token in the answer.", -2.0, 2.0),
    f.number("frequency_penalty", "Taken from a token's logit each time the answer has it.", -2.0, 2.0),
    f.biases("logit_bias", "Token id to what is added to its logit.", MAX_LOGIT_BIASES, 100.0),
    f.string_or_strings("stop", "Strings that end the answer; not part of its text.", MAX_STOPS, MAX_STOP_CHARACTERS),
    f.integers("stop_token_ids", "Tokens that end the answer.", MAX_STOP_TOKEN_IDS),
    f.integer("min_tokens", "Fewest tokens before an end token or a stop string may end the answer.", 0, f.TOKEN_LIMIT),
    f.boolean("ignore_eos", "Go on past the model's end tokens."),
)
_COMMON = (
    f.string("model", "A served model; may be left out where there is only one.", 1024),
    f.integer("n", "Answers to each prompt.", 1, MAX_SAMPLES),
    f.boolean("stream", "Server-sent events, one for each piece of an answer."),
    f.boolean("return_token_ids", "Add prompt_token_ids, and token_ids to each choice."),
    f.boolean("include_timings", "Add timings: seconds in each stage."),
    f.number("timeout_s", "The request is given up after so many seconds.", 0.0, 1e9, above_low=True),
    f.number(
        "wait_objective_s",
        "The longest wait, in seconds, between the prompt's prefill (or an eviction) and the next token.",
        *WAIT_OBJECTIVE_S,
    ),
    *_SAMPLING,
)
COMPLETION_FIELDS = (
    *_COMMON,
    f.integer("max_tokens", "Most tokens to generate; 0 only with echo.", 0, f.TOKEN_LIMIT, default=16),
    f.boolean("echo", "Begin each answer with its prompt."),
    f.boolean(
        "allow_special_tokens",
        "What a text prompt spells like a special token is that token; without it, it is text like any other.",
    ),
    f.integer("logprobs", "Log-probabilities of each token and of so many most likely ones.", 0, MAX_LOGPROBS),
    f.integer("best_of", "Must equal n.", 1, MAX_SAMPLES),
)
CHAT_FIELDS = (
    *_COMMON,
    f.integer("max_tokens", "Most tokens to generate; what the model's positions leave by default.", 1, f.TOKEN_LIMIT),
    f.integer("max_completion_tokens", "The newer name of max_tokens.", 1, f.TOKEN_LIMIT),
    f.boolean("logprobs", "Log-probabilities of each token."),
    f.integer("top_logprobs", "And of so many most likely ones; needs logprobs.", 0, MAX_LOGPROBS),
)
STREAM_OPTIONS_FIELDS = (f.boolean("include_usage", "End the stream with a chunk that has only the usage."),)

_COMPLETION_NAMES = frozenset({field.name for field in COMPLETION_FIELDS} | {"prompt", "stream_options"})
_CHAT_NAMES = frozenset({field.name for field in CHAT_FIELDS} | {"messages", "stream_options"})
_STREAM_OPTIONS_NAMES = frozenset(field.name for field in STREAM_OPTIONS_FIELDS)


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How to choose tokens, as far as the client said; None: the model's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    max_tokens: int | None = None
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """What the reply is to hold, and how it is to be sent."""

    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    return_token_ids: bool = False
    include_timings: bool = False


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    model: str | None
    prompts: tuple[TextPrompt | TokenPrompt, ...]
    sampling: SamplingOptions
    reply: ReplyOptions = ReplyOptions()
    n: int = 1
    timeout_s: float | None = None
    wait_objective_s: float | None = None
    allow_special_tokens: bool = False
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """`messages` are plain values for the chat template; each content is one string."""

    model: str | None
    messages: tuple[Mapping[str, Any], ...]
    sampling: SamplingOptions
    reply: ReplyOptions = ReplyOptions()
    n: int = 1
    timeout_s: float | None = None
    wait_objective_s: float | None = None
    ignored: tuple[str, ...] = ()


def parse_completion(body: Any, max_prompts: int = 256) -> CompletionRequest:
    """Raises InvalidRequestError (or one of its kinds) that names the field at fault."""
    body = _object(body)
    for entry in refused.COMPLETION:
        entry.check(body)
    values = f.read_fields(body, COMPLETION_FIELDS)
    prompts = _prompts(body, max_prompts)
    best_of = values.pop("best_of", None)
    if best_of is not None and best_of != values.get("n", 1):
        raise UnsupportedFeatureError("best_of other than n is not supported", param="best_of")
    if values.get("max_tokens") == 0 and not values.get("echo"):
        raise InvalidRequestError("max_tokens must be at least 1 (0 only with echo)", param="max_tokens")
    reply, ignored = _reply(body, values)
    return CompletionRequest(
        model=values.pop("model", None),
        prompts=prompts,
        reply=reply,
        n=values.pop("n", 1),
        timeout_s=values.pop("timeout_s", None),
        wait_objective_s=values.pop("wait_objective_s", None),
        allow_special_tokens=values.pop("allow_special_tokens", False),
        sampling=SamplingOptions(**values),
        ignored=(*(name for name in body if name not in _COMPLETION_NAMES), *ignored),
    )


def parse_chat(body: Any) -> ChatRequest:
    """Raises InvalidRequestError (or one of its kinds) that names the field at fault."""
    body = _object(body)
    for entry in refused.CHAT:
        entry.check(body)
    values = f.read_fields(body, CHAT_FIELDS)
    messages, unread = parse_messages(body.get("messages"))
    limit, newer = values.get("max_tokens"), values.pop("max_completion_tokens", None)
    if limit is not None and newer is not None and limit != newer:
        message = "max_tokens and max_completion_tokens differ; give one of them"
        raise InvalidRequestError(message, param="max_completion_tokens")
    values["max_tokens"] = newer if limit is None else limit
    wanted, top = values.pop("logprobs", False), values.pop("top_logprobs", None)
    if top and not wanted:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    values["logprobs"] = (top or 0) if wanted else None
    reply, ignored = _reply(body, values)
    return ChatRequest(
        model=values.pop("model", None),
        messages=messages,
        reply=reply,
        n=values.pop("n", 1),
        timeout_s=values.pop("timeout_s", None),
        wait_objective_s=values.pop("wait_objective_s", None),
        sampling=SamplingOptions(**values),
        ignored=(*(name for name in body if name not in _CHAT_NAMES), *unread, *ignored),
    )


def _object(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise WrongTypeError("the body must be a JSON object", param=None)
    return body


def _reply(body: Mapping[str, Any], values: dict[str, Any]) -> tuple[ReplyOptions, list[str]]:
    """Takes the reply's options out of `values`; the names within stream_options that nobody reads come second."""
    stream = values.pop("stream", False)
    options = body.get("stream_options")
    chosen: dict[str, Any] = {}
    if options is not None:
        if not isinstance(options, dict):
            raise f.wrong_type("stream_options", "an object", options)
        chosen = f.read_fields(options, STREAM_OPTIONS_FIELDS)
        if not stream:
            raise InvalidRequestError("stream_options needs stream to be true", param="stream_options")
    names = ("echo", "return_token_ids", "include_timings")
    reply = ReplyOptions(
        stream=stream,
        include_usage=chosen.get("include_usage", False),
        **{name: values.pop(name) for name in names if name in values},
    )
    return reply, [f"stream_options.{name}" for name in options or () if name not in _STREAM_OPTIONS_NAMES]


def _prompts(body: Mapping[str, Any], most: int) -> tuple[TextPrompt | TokenPrompt, ...]:
    """One text, one list of token ids, or a list of either."""
    prompt = body.get("prompt")
    if prompt is None:
        raise MissingFieldError("prompt is required: text, token ids, or a list of either", param="prompt")
    if isinstance(prompt, str):
        return (_text(prompt),)
    if not isinstance(prompt, list):
        raise f.wrong_type("prompt", "text, token ids, or an array of either", prompt)
    if not prompt:
        raise InvalidRequestError("prompt must not be empty", param="prompt")
    if type(prompt[0]) in (int, float):
        return (_token_ids(prompt, "prompt"),)
    if len(prompt) > most:
        raise InvalidRequestError(f"prompt may have {most} prompts at most, got {len(prompt)}", param="prompt")
    return tuple(_entry(entry, number) for number, entry in enumerate(prompt))


def _entry(prompt: Any, number: int) -> TextPrompt | TokenPrompt:
    where = f"prompt[{number}]"
    if isinstance(prompt, str):
        return _text(prompt, where)
    if isinstance(prompt, list):
        return _token_ids(prompt, where)
    kinds = "text or an array of token ids" if number else "text, a token id or an array of token ids"
    raise f.wrong_type(where, kinds, prompt, "prompt")


def _text(prompt: str, where: str = "prompt") -> str:
    if not prompt:
        raise InvalidRequestError(f"{where} must not be empty", param="prompt")
    return prompt


def _token_ids(prompt: list[Any], where: str) -> TokenPrompt:
    if set(map(type, prompt)) - {int}:
        number, entry = next(pair for pair in enumerate(prompt) if type(pair[1]) is not int)
        raise f.not_integer(f"{where}[{number}]", entry, 0, f.TOKEN_LIMIT, "prompt")
    if not prompt:
        raise InvalidRequestError(f"{where} must not be empty", param="prompt")
    return tuple(prompt)
