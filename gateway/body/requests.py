"""OpenAI's request bodies. What needs no model is checked here; /openapi.json is made of the same classes.

A sampling option is one field of SamplingOptions, named as in `request.SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self, TypeVar, cast

from pydantic import BaseModel, Field, ValidationError, model_validator

from alignedserve.errors import InvalidRequestError
from alignedserve.gateway.body import refused
from alignedserve.gateway.body.messages import MAX_MESSAGES, Message
from alignedserve.gateway.body.values import INT64, Between, Body, LogitBias, Prompt, StopStrings, StopTokens
from alignedserve.gateway.body.wrong_values import TOKEN_LIMIT, as_request_error, shown
from alignedserve.gateway.failures import UnsupportedFeatureError
from alignedserve.request import MAX_LOGPROBS, MAX_SAMPLES, WAIT_OBJECTIVE_S

_Tokens = Annotated[int, Between(0, TOKEN_LIMIT)]
_SomeTokens = Annotated[int, Between(1, TOKEN_LIMIT)]
_Samples = Annotated[int, Between(1, MAX_SAMPLES)]
_Alternatives = Annotated[int, Between(0, MAX_LOGPROBS)]
_Penalty = Annotated[float, Between(-2, 2)]
_OTHER_NAME = "Another name of max_tokens."
_OTHER_NAMES = {"max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}

_Kind = TypeVar("_Kind", bound="GenerationRequest")


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """What the reply is to hold, and how it is to be sent."""

    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    return_token_ids: bool = False
    include_timings: bool = False


class SamplingOptions(Body):
    """How to choose tokens, as far as the client said; None: the model's default."""

    temperature: Annotated[float, Between(0, 2)] | None = Field(None, description="0 is greedy.")
    top_p: Annotated[float, Between(0, 1, above=True)] | None = Field(
        None, description="Draw from the most likely tokens that have this probability together."
    )
    top_k: Annotated[int, Between(-1, TOKEN_LIMIT)] | None = Field(
        None, description="Draw from so many most likely tokens; 0 or -1: no limit."
    )
    min_p: Annotated[float, Between(0, 1)] | None = Field(
        None, description="Leave out tokens less likely than this share of the most likely one."
    )
    seed: Annotated[int, Between(*INT64)] | None = Field(None, description="Makes the answer repeatable.")
    repetition_penalty: Annotated[float, Between(0, 100, above=True)] | None = Field(
        None, description="Above 1: tokens of prompt and answer become less likely."
    )
    presence_penalty: _Penalty | None = Field(
        None, description="Taken once from the logit of each token in the answer."
    )
    frequency_penalty: _Penalty | None = Field(
        None, description="Taken from a token's logit each time the answer has it."
    )
    logit_bias: LogitBias = Field((), description="Token id to what is added to its logit.")
    stop: StopStrings = Field((), description="Strings that end the answer; not part of its text.")
    stop_token_ids: StopTokens = Field((), description="Tokens that end the answer.")
    min_tokens: _Tokens | None = Field(
        None, description="Fewest tokens before an end token or a stop string may end the answer."
    )
    ignore_eos: bool = Field(False, description="Go on past the model's end tokens.")


class StreamOptions(Body):
    include_usage: bool = Field(False, description="End the stream with a chunk that has only the usage.")


class Unread(Body):
    """Fields of OpenAI's API that change no answer: their types are checked, and a header names them."""

    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None


class GenerationRequest(SamplingOptions, Unread):
    """What both kinds of requests have."""

    model: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="A served model; may be left out where there is only one."
    )
    n: Annotated[int, Between(1, MAX_SAMPLES)] = Field(1, description="Answers to each prompt.")
    stream: bool = Field(False, description="Server-sent events, one for each piece of an answer.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    return_token_ids: bool = Field(False, description="Add prompt_token_ids, and token_ids to each choice.")
    include_timings: bool = Field(False, description="Add timings: seconds in each stage.")
    timeout_s: Annotated[float, Between(0, 1e9, above=True)] | None = Field(
        None, description="The request is given up after so many seconds."
    )
    wait_objective_s: Annotated[float, Between(*WAIT_OBJECTIVE_S)] | None = Field(
        None,
        description="The longest wait, in seconds, between the prompt's prefill (or an eviction) and the next token.",
    )
    min_new_tokens: _Tokens | None = Field(None, description="Another name of min_tokens.")
    do_sample: bool | None = Field(None, description="false is greedy, as temperature 0 is.")
    max_tokens: int | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream to be true", param="stream_options")
        for name, meant in _OTHER_NAMES.items():
            if (value := getattr(self, name)) is not None:
                if getattr(self, meant) not in (None, value):
                    raise InvalidRequestError(f"{meant} and {name} differ; give one of them", param=name)
                setattr(self, meant, value)
        if self.do_sample is not None:
            if self.temperature is not None and self.do_sample == (self.temperature == 0.0):
                given = f"do_sample is {shown(self.do_sample)}, and temperature {self.temperature:g}"
                raise InvalidRequestError(f"{given}: give one of them", param="do_sample")
            self.temperature = self.temperature if self.do_sample else 0.0
        return self

    @property
    def scored(self) -> int | None:
        """Log-probabilities of each token and of so many most likely ones; None: of none."""
        raise NotImplementedError

    @property
    def reply(self) -> ReplyOptions:
        return ReplyOptions(
            stream=self.stream,
            include_usage=self.stream_options is not None and self.stream_options.include_usage,
            return_token_ids=self.return_token_ids,
            include_timings=self.include_timings,
        )

    @property
    def sampling(self) -> dict[str, Any]:
        """Arguments of SamplingParams, as far as the client gave them."""
        values = {name: value for name in SamplingOptions.model_fields if (value := getattr(self, name)) is not None}
        if self.scored is not None:
            values["logprobs"] = self.scored
        return values

    @property
    def ignored(self) -> list[str]:
        """Names of the fields that were given and not read."""
        within = [] if self.stream_options is None else _unknown(self.stream_options, "stream_options.")
        return [*(name for name in Unread.model_fields if getattr(self, name) is not None), *_unknown(self), *within]


class CompletionRequest(GenerationRequest):
    refused = refused.COMPLETION

    prompt: Prompt
    max_tokens: _Tokens | None = Field(
        None, description="Most tokens to generate; 0 only with echo.", json_schema_extra={"default": 16}
    )
    max_completion_tokens: _Tokens | None = Field(None, description=_OTHER_NAME)
    max_new_tokens: _Tokens | None = Field(None, description=_OTHER_NAME)
    echo: bool = Field(False, description="Begin each answer with its prompt.")
    allow_special_tokens: bool = Field(
        False,
        description="What a text prompt spells like a special token is that token; without it, it is text like any "
        "other.",
    )
    logprobs: _Alternatives | None = Field(
        None, description="Log-probabilities of each token and of so many most likely ones."
    )
    best_of: _Samples | None = Field(None, description="Must equal n.")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.best_of not in (None, self.n):
            raise UnsupportedFeatureError("best_of other than n is not supported", param="best_of")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError("max_tokens must be at least 1 (0 only with echo)", param="max_tokens")
        return self

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """Each a text, or token ids."""
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return cast(Sequence[str | list[int]], [self.prompt] if single else self.prompt)

    @property
    def scored(self) -> int | None:
        return self.logprobs

    @property
    def reply(self) -> ReplyOptions:
        return replace(super().reply, echo=self.echo)


class ChatRequest(GenerationRequest):
    refused = refused.CHAT

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: _SomeTokens | None = Field(
        None, description="Most tokens to generate; what the model's positions leave by default."
    )
    max_completion_tokens: _SomeTokens | None = Field(None, description=_OTHER_NAME)
    max_new_tokens: _SomeTokens | None = Field(None, description=_OTHER_NAME)
    logprobs: bool = Field(False, description="Log-probabilities of each token.")
    top_logprobs: _Alternatives | None = Field(None, description="And of so many most likely ones; needs logprobs.")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        for number, message in enumerate(self.messages):
            if message.model_extra:
                message.check(f"messages[{number}]")
        return self

    @property
    def scored(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def ignored(self) -> list[str]:
        within = dict.fromkeys(
            name for message in self.messages if message.model_extra for name in _unknown(message, "messages.")
        )
        return [*super().ignored, *within]


def _unknown(body: BaseModel, prefix: str = "") -> list[str]:
    known = refused.MESSAGE if isinstance(body, Message) else {}
    return [
        f"{prefix}{name}" for name, value in (body.model_extra or {}).items() if value is not None and name not in known
    ]


def parse_completion(body: Any, max_prompts: int = 256) -> CompletionRequest:
    """Raises InvalidRequestError (or one of its kinds) that names the field at fault."""
    request = _checked(CompletionRequest, body)
    if len(request.prompts) > max_prompts:
        message = f"prompt may have {max_prompts} prompts at most, got {len(request.prompts)}"
        raise InvalidRequestError(message, param="prompt")
    return request


def parse_chat(body: Any) -> ChatRequest:
    """Raises InvalidRequestError (or one of its kinds) that names the field at fault."""
    return _checked(ChatRequest, body)


def _checked(kind: type[_Kind], body: Any) -> _Kind:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise as_request_error(error) from None
