"""OpenAI's request bodies, and all checks that do not need the model. /openapi.json is generated from these classes.

To add a sampling option, add a field to SamplingOptions with its name in `request.SamplingParams`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, cast

from pydantic import Field, ValidationError, model_validator

from alignedserve.errors import InvalidRequestError
from alignedserve.gateway.body import refused
from alignedserve.gateway.body.aliases import Aliases
from alignedserve.gateway.body.conversation import ConversationFields
from alignedserve.gateway.body.exclusions import ExclusionFields
from alignedserve.gateway.body.messages import MAX_MESSAGES, EarlierCalls, Message
from alignedserve.gateway.body.structured import StructuredFields
from alignedserve.gateway.body.validation_errors import TOKEN_LIMIT, as_request_error, shown
from alignedserve.gateway.body.values import (
    INT64,
    Between,
    Body,
    LogitBias,
    Prompt,
    StopStrings,
    StopTokens,
    unknown_fields,
)
from alignedserve.request import MAX_LOGPROBS, MAX_SAMPLES, WAIT_OBJECTIVE_S

_Tokens = Annotated[int, Between(0, TOKEN_LIMIT)]
_SomeTokens = Annotated[int, Between(1, TOKEN_LIMIT)]
_Samples = Annotated[int, Between(1, MAX_SAMPLES)]
_Alternatives = Annotated[int, Between(0, MAX_LOGPROBS)]
_Penalty = Annotated[float, Between(-2, 2)]
_OTHER_NAME = "Alias of max_tokens."

_Kind = TypeVar("_Kind", bound="GenerationRequest")


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """The content of the reply, and whether it is streamed.

    `best`: number of answers to each prompt that are returned, those with the highest log-probability a token; None:
    all. `scored`: whether log-probabilities are part of the reply. They may have been computed for `best` only.
    """

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    return_token_ids: bool = False
    include_timings: bool = False
    include_stop: bool = False
    tokens_as_ids: bool = False
    prompt_logprobs: int | None = None
    best: int | None = None
    scored: bool = True


class SamplingOptions(ExclusionFields):
    """The client's options for choosing tokens. None: the model's default."""

    temperature: Annotated[float, Between(0, 2)] | None = Field(None, description="0 is greedy.")
    top_p: Annotated[float, Between(0, 1, above=True)] | None = Field(
        None, description="Sample from the most likely tokens whose probabilities add up to this value."
    )
    top_k: Annotated[int, Between(-1, TOKEN_LIMIT)] | None = Field(
        None, description="Sample from this number of most likely tokens; 0 or -1: no limit."
    )
    min_p: Annotated[float, Between(0, 1)] | None = Field(
        None, description="Exclude tokens whose probability is below this share of the most likely token's."
    )
    seed: Annotated[int, Between(*INT64)] | None = Field(None, description="Makes the answer repeatable.")
    repetition_penalty: Annotated[float, Between(0, 100, above=True)] | None = Field(
        None, description="Values above 1 make tokens of the prompt and the answer less likely."
    )
    presence_penalty: _Penalty | None = Field(
        None, description="Subtracted once from the logit of each token that is in the answer."
    )
    frequency_penalty: _Penalty | None = Field(
        None, description="Subtracted from a token's logit for each time that it is in the answer."
    )
    logit_bias: LogitBias = Field((), description="Maps a token id to the value that is added to its logit.")
    stop: StopStrings = Field((), description="Strings that end the answer; not part of its text.")
    stop_token_ids: StopTokens = Field((), description="Tokens that end the answer.")
    min_tokens: _Tokens | None = Field(
        None, description="The answer has at least this many tokens before an end token or stop string may end it."
    )
    ignore_eos: bool = Field(False, description="Continue past the model's end tokens.")


class StreamOptions(Body):
    include_usage: bool = Field(False, description="Send a last chunk that has only the usage.")
    continuous_usage_stats: bool = Field(
        False, description="With include_usage: send with each chunk the usage of its answer so far."
    )


class Unread(Body):
    """Fields of OpenAI's API that do not affect answers. Their types are checked, and a response header names them."""

    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None


class GenerationRequest(SamplingOptions, StructuredFields, Aliases, Unread, ABC):
    """The fields that completion and chat requests have in common."""

    model: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="The served model's name; may be omitted."
    )
    n: Annotated[int, Between(1, MAX_SAMPLES)] = Field(1, description="Number of answers to each prompt.")
    stream: bool = Field(False, description="Send the answer in pieces, as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    return_token_ids: bool = Field(False, description="Add prompt_token_ids, and token_ids to each choice.")
    include_timings: bool = Field(False, description="Add timings: the seconds spent in each stage.")
    timeout_s: Annotated[float, Between(0, 1e9, above=True)] | None = Field(
        None, description="The request fails after this many seconds."
    )
    wait_objective_s: Annotated[float, Between(*WAIT_OBJECTIVE_S)] | None = Field(
        None,
        description="The longest wait, in seconds, between the prompt's prefill (or an eviction) and the next token.",
    )
    min_length: _Tokens | None = Field(
        None, description="Least number of tokens of prompt and answer together; min_tokens overrides it."
    )
    include_stop_str_in_output: bool = Field(False, description="The text ends with the stop string that ended it.")
    prompt_logprobs: _Alternatives | None = Field(
        None, description="Return the log-probabilities of the prompt's tokens and of this number of likeliest ones."
    )
    return_tokens_as_token_ids: bool = Field(False, description="In log-probabilities, name tokens token_id:ID.")
    truncate_prompt_tokens: Annotated[int, Between(-1, TOKEN_LIMIT)] | None = Field(
        None, description="Use the last tokens of a longer prompt only; -1: as many as leave room for the answer."
    )
    truncation_side: Literal["left", "right"] = Field("left", description="The side from which prompts are truncated.")
    priority: Annotated[int, Between(*INT64)] | None = Field(
        None,
        description="Of the requests that wait, one with a lower priority goes first. From 1000000 on a request only "
        "takes what others leave.",
        json_schema_extra={"default": 0},
    )
    cache_salt: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="Only prompts with the same salt share cached KV (kv_pool.prefix_cache)."
    )
    session_id: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="Names the conversation, so that the prefix cache learns when it goes on; or x-session-id."
    )
    do_sample: bool | None = Field(None, description="false means greedy decoding, like temperature 0.")
    max_tokens: int | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options requires stream to be true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
        if self.truncate_prompt_tokens == 0:
            message = "truncate_prompt_tokens must be at least 1, or -1: a prompt without tokens cannot be continued"
            raise InvalidRequestError(message, param="truncate_prompt_tokens")
        if self.logprob_token_ids and self.scored is None:
            raise InvalidRequestError("logprob_token_ids requires logprobs", param="logprob_token_ids")
        if self.do_sample is not None:
            if self.temperature is not None and self.do_sample == (self.temperature == 0.0):
                given = f"do_sample is {shown(self.do_sample)}, and temperature is {self.temperature:g}"
                raise InvalidRequestError(f"{given}; set only one of them", param="do_sample")
            self.temperature = self.temperature if self.do_sample else 0.0
        return self

    @property
    @abstractmethod
    def scored(self) -> int | None:
        """Number of most likely tokens whose log-probabilities are returned with each token's; None: none at all."""

    @property
    def reply(self) -> ReplyOptions:
        return ReplyOptions(
            stream=self.stream,
            include_usage=self.stream_options is not None and self.stream_options.include_usage,
            continuous_usage=self.stream_options is not None and self.stream_options.continuous_usage_stats,
            return_token_ids=self.return_token_ids,
            include_timings=self.include_timings,
            include_stop=self.include_stop_str_in_output,
            tokens_as_ids=self.return_tokens_as_token_ids,
            prompt_logprobs=self.prompt_logprobs,
            scored=self.scored is not None,
        )

    @property
    def generated(self) -> int:
        """Number of answers to each prompt that are generated."""
        return self.n

    @property
    def sampling(self) -> dict[str, Any]:
        """The arguments of SamplingParams that the client set."""
        values = {name: value for name in SamplingOptions.model_fields if (value := getattr(self, name)) is not None}
        if self.scored is not None:
            values["logprobs"] = self.scored
        if self.prompt_logprobs is not None:
            values["prompt_logprobs"] = self.prompt_logprobs
        return values

    @property
    def ignored(self) -> list[str]:
        """Names of the fields that the client sent and the server ignores."""
        unread = [name for name in Unread.model_fields if getattr(self, name) is not None]
        within = [] if self.stream_options is None else unknown_fields(self.stream_options, "stream_options.")
        return [*unread, *unknown_fields(self), *within, *self.unread_formats, *self.unread_whitespace]


class CompletionRequest(GenerationRequest):
    refused = refused.COMPLETION

    prompt: Prompt
    max_tokens: _Tokens | None = Field(
        None, description="Maximum number of tokens to generate; 0 only with echo.", json_schema_extra={"default": 16}
    )
    max_completion_tokens: _Tokens | None = Field(None, description=_OTHER_NAME)
    max_new_tokens: _Tokens | None = Field(None, description=_OTHER_NAME)
    echo: bool = Field(False, description="Start each answer with its prompt.")
    allow_special_tokens: bool = Field(
        False,
        description="Read special tokens' names in a text prompt as these tokens. If false, they are ordinary text.",
    )
    logprobs: _Alternatives | None = Field(
        None, description="Return the log-probabilities of each token and of this number of most likely tokens."
    )
    best_of: _Samples | None = Field(
        None, description="Generate this many answers to each prompt; return the n of the highest logprob a token."
    )
    suffix: Annotated[str, Field(max_length=1 << 20)] = Field(
        "", description="The text that follows the answer. Needs a model with tokens for it (fill in the middle)."
    )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequestError(f"best_of must be at least n, {self.n}, got {self.best_of}", param="best_of")
        if self.stream and self.generated != self.n:
            raise InvalidRequestError("the answers of best_of cannot be streamed", param="best_of")
        if self.suffix and self.echo:
            raise InvalidRequestError("a prompt with a suffix cannot be echoed", param="echo")
        if self.suffix and self.truncate_prompt_tokens is not None:
            message = "a prompt with a suffix cannot be truncated"
            raise InvalidRequestError(message, param="truncate_prompt_tokens")
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompts):
            raise InvalidRequestError("a suffix needs prompts as text", param="suffix")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError("max_tokens must be at least 1 (0 only with echo)", param="max_tokens")
        return self

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, each as text or as token ids."""
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return cast(Sequence[str | list[int]], [self.prompt] if single else self.prompt)

    @property
    def scored(self) -> int | None:
        return self.logprobs

    @property
    def reply(self) -> ReplyOptions:
        return replace(super().reply, echo=self.echo, best=None if self.generated == self.n else self.n)

    @property
    def generated(self) -> int:
        return self.n if self.best_of is None else self.best_of


class ChatRequest(GenerationRequest, ConversationFields):
    refused = refused.CHAT
    fills_room: ClassVar[bool] = False
    """Whether `max_tokens` may be more than the model has room for."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: _SomeTokens | None = Field(
        None, description="Maximum number of tokens to generate; by default, as many as the model's positions allow."
    )
    max_completion_tokens: _SomeTokens | None = Field(None, description=_OTHER_NAME)
    max_new_tokens: _SomeTokens | None = Field(None, description=_OTHER_NAME)
    logprobs: bool = Field(False, description="Return the log-probability of each token.")
    top_logprobs: _Alternatives | None = Field(
        None, description="Also return this number of most likely tokens; requires logprobs."
    )
    add_generation_prompt: bool | None = Field(None, description="The opposite of continue_final_message.")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs requires logprobs to be true", param="top_logprobs")
        if self.add_generation_prompt is False and not self.continue_final_message:
            reason = "requires continue_final_message: true; else the answer is a new turn"
            raise InvalidRequestError(f"add_generation_prompt: false {reason}", param="add_generation_prompt")
        self.check_end(self.messages, new_turn=self.add_generation_prompt)
        if self.continue_final_message and (asked := self.grammar_spec()) is not None:
            reason = "holds for a whole answer: the last message must not be the beginning of one"
            raise InvalidRequestError(f"{asked[1]} {reason}", param=asked[1])
        calls = EarlierCalls()
        for number, message in enumerate(self.messages):
            if not message.plain:
                message.check(f"messages[{number}]")
            if message.role == "tool" and message.tool_call_id is not None:
                calls.check(message.tool_call_id, f"messages[{number}].tool_call_id")
            elif message.role == "assistant":
                for call in message.calls:
                    calls.add(call.get("id"))
        return self

    @property
    def scored(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def ignored(self) -> list[str]:
        within = dict.fromkeys(
            name
            for message in self.messages
            if message.model_extra
            for name in unknown_fields(message, "messages.", refused.MESSAGE)
        )
        return [*super().ignored, *within, *self.unread, *self.unread_settings]


def parse_completion(body: Any, max_prompts: int = 256) -> CompletionRequest:
    """Validates a JSON body. Raises InvalidRequestError, or a subclass of it, that names the invalid field."""
    request = checked(CompletionRequest, body)
    if len(request.prompts) > max_prompts:
        message = f"prompt may have at most {max_prompts} prompts, got {len(request.prompts)}"
        raise InvalidRequestError(message, param="prompt")
    return request


def parse_chat(body: Any) -> ChatRequest:
    """Validates a JSON body. Raises InvalidRequestError, or a subclass of it, that names the invalid field."""
    return checked(ChatRequest, body)


def checked(kind: type[_Kind], body: Any) -> _Kind:
    """The request of a JSON body. Raises InvalidRequestError, or a subclass of it, that names the invalid field."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise as_request_error(error) from None
