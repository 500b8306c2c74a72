"""Converts between Python values and the protobuf messages of `proto/inference.proto`, without I/O."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from alignedserve.client.chat_fields import CHAT_OPTIONS, chat_fields, is_plain, turn_json, written
from alignedserve.client.options import ChatTurn, Options
from alignedserve.client.structured import FORMAT, OUTPUTS, asked
from alignedserve.client.types import (
    Choice,
    Chunk,
    ClientTimings,
    Completion,
    Logprob,
    ModelCard,
    Timings,
    ToolCall,
    ToolCallPart,
    Usage,
)
from alignedserve.errors import InvalidRequestError
from alignedserve.proto import inference_pb2 as pb
from alignedserve.proto.common_pb2 import LogitBias

Read = Callable[[str], Any]


def prompt_request(prompt: str | None, prompt_token_ids: Iterable[int] | None, options: Options) -> pb.GenerateRequest:
    """A request for exactly one of the two; raises InvalidRequestError, which names the invalid argument."""
    if (prompt is None) == (prompt_token_ids is None):
        raise InvalidRequestError("give either prompt or prompt_token_ids", param="prompt")
    message = _with_options(options)
    if isinstance(prompt_token_ids, bytes | bytearray):  # bytes would be read as small token ids
        raise InvalidRequestError("prompt_token_ids must be token ids, not bytes", param="prompt_token_ids")
    if prompt_token_ids is not None:
        message.prompt_token_ids.SetInParent()  # an empty list is sent, so that the server refuses it
        _extend(message.prompt_token_ids.ids, "prompt_token_ids", prompt_token_ids)
    elif isinstance(prompt, str):
        _assign(message, "prompt", prompt)
    else:
        kind = type(prompt).__name__
        raise InvalidRequestError(f"prompt must be str, not {kind}; use prompt_token_ids for tokens", param="prompt")
    if fields := chat_fields(options):
        message.chat_json = written(fields)  # the server says which of them a prompt may have
    return message


def chat_request(messages: Iterable[ChatTurn], options: Options) -> pb.GenerateRequest:
    """A request for the next turn of a conversation; raises InvalidRequestError, which names the invalid argument."""
    message = _with_options(options)
    message.conversation.SetInParent()
    try:
        numbered = enumerate(messages)
    except TypeError as error:
        kind = type(messages).__name__
        raise InvalidRequestError(f"messages must be an iterable of turns, not {kind}", param="messages") from error
    turns = [turn_json(turn, number) for number, turn in numbered]
    fields = chat_fields(options)
    if all(map(is_plain, turns)):
        for number, turn in enumerate(turns):
            try:
                message.conversation.messages.add(**turn)
            except (TypeError, ValueError) as error:  # not encodable
                raise InvalidRequestError(f"messages[{number}]: {error}", param="messages") from error
    else:
        fields["messages"] = turns
    message.chat_json = written(fields)  # also without a field: then reasoning is apart from the text
    return message


_LISTS = (
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "logprob_token_ids",
)


def _with_options(options: Options) -> pb.GenerateRequest:
    message = pb.GenerateRequest()
    for name, value in options.items():
        if not isinstance(name, str):  # a key of a batch's dict
            raise InvalidRequestError(f"names of options must be strings, got {name!r}", param=str(name))
        if name not in Options.__annotations__:
            near = difflib.get_close_matches(name, Options.__annotations__, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidRequestError(f"unknown option {name!r}{hint}", param=name)
        if value is not None and name not in (*CHAT_OPTIONS, FORMAT, OUTPUTS):
            _set_option(message, name, value)
    if (found := asked(options)) is not None:
        message.grammar.kind, message.grammar.text = found.kind, found.text
        if found.whitespace is not None:
            message.grammar.whitespace = found.whitespace
    return message


def _set_option(message: pb.GenerateRequest, name: str, value: Any) -> None:
    if name == "stop":
        _extend(message.stop, name, [value] if isinstance(value, str) else value)
    elif name in _LISTS:
        alone = (name == "bad_words" and isinstance(value, str)) or (name.startswith("forced") and type(value) is int)
        _extend(getattr(message, name), name, [value] if alone else value)
    elif name == "bad_words_ids":
        if not isinstance(value, Iterable):
            raise InvalidRequestError("bad_words_ids must be a list of lists of token ids", param=name)
        for sequence in value:
            _extend(message.bad_words_ids.add().ids, name, sequence)
    elif name == "logit_bias":
        if not isinstance(value, Mapping):
            raise InvalidRequestError("logit_bias must map token ids to numbers", param=name)
        for token_id, bias in value.items():
            entry = message.logit_bias.add()
            _assign(entry, "token_id", token_id, name)
            _assign(entry, "bias", bias, name)
    elif name == "n" and value == 0:  # on the wire 0 means "not given"
        raise InvalidRequestError("n must be at least 1", param=name)
    else:
        _assign(message, name, value)


def _assign(message: pb.GenerateRequest | LogitBias, name: str, value: Any, param: str | None = None) -> None:
    try:
        setattr(message, name, value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(f"{param or name}: {error}", param=param or name) from error


def _extend(target: Any, name: str, values: Iterable[Any]) -> None:
    try:
        target.extend(values)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{name}: {error}", param=name) from error


def parse_completion(
    message: pb.GenerateResponse, client_timings: ClientTimings, read: Read | None = None
) -> Completion:
    """`read`: of the choices."""
    return Completion(
        request_id=message.request_id,
        model=message.model,
        prompt_token_ids=tuple(message.prompt_token_ids),
        choices=tuple(_choice(choice, read) for choice in message.choices),
        usage=_usage(message.usage),
        client_timings=client_timings,
        timings=_timings(message.timings) if message.HasField("timings") else None,
        prompt_logprobs=_prompt_logprobs(message),
    )


def _prompt_logprobs(message: pb.GenerateResponse) -> tuple[Logprob | None, ...]:
    found = tuple(_logprob(entry) for entry in message.prompt_logprobs)
    return (None, *found) if found else ()


def parse_chunk(message: pb.GenerateChunk, client_timings: ClientTimings) -> Chunk:
    choice = message.choice
    return Chunk(
        request_id=message.request_id,
        model=message.model,
        index=choice.index,
        text=choice.text,
        token_ids=tuple(choice.token_ids),
        finish_reason=choice.finish_reason or None,
        logprobs=tuple(_logprob(logprob) for logprob in choice.logprobs),
        prompt_token_ids=tuple(message.prompt_token_ids),
        usage=_usage(message.usage) if message.HasField("usage") else None,
        timings=_timings(message.timings) if message.HasField("timings") else None,
        reasoning=choice.reasoning,
        tool_calls=_parts(choice),
    )


def _parts(choice: pb.Choice) -> tuple[ToolCallPart, ...]:
    return tuple(ToolCallPart(call.index, call.id, call.name, call.arguments) for call in choice.tool_calls)


def _joined_calls(parts: Iterable[ToolCallPart]) -> tuple[ToolCall, ...]:
    """Whole calls from their parts, by index."""
    calls: dict[int, ToolCall] = {}
    for part in parts:
        before = calls.get(part.index, ToolCall("", "", ""))
        arguments = before.arguments + part.arguments
        calls[part.index] = ToolCall(before.id or part.id, before.name or part.name, arguments)
    return tuple(calls[index] for index in sorted(calls))


def parse_models(message: pb.ModelList, client_timings: ClientTimings) -> tuple[ModelCard, ...]:
    return tuple(ModelCard(card.id, card.max_positions) for card in message.models)


def parse_found(message: pb.CancelResponse, client_timings: ClientTimings) -> bool:
    return message.found


def join_chunks(chunks: Sequence[Chunk], client_timings: ClientTimings, read: Read | None = None) -> Completion:
    """The complete result from all chunks of a stream, in order. `read`: of the choices."""
    last = chunks[-1]
    assert last.usage is not None, "only the last chunk has it"
    choices = []
    for index in sorted({chunk.index for chunk in chunks}):
        mine = [chunk for chunk in chunks if chunk.index == index]
        ends = [chunk.finish_reason for chunk in mine if chunk.finish_reason]
        choices.append(
            Choice(
                index=index,
                text="".join(chunk.text for chunk in mine),
                token_ids=tuple(token for chunk in mine for token in chunk.token_ids),
                finish_reason=ends[-1],
                logprobs=tuple(entry for chunk in mine for entry in chunk.logprobs),
                reasoning="".join(chunk.reasoning for chunk in mine),
                tool_calls=_joined_calls(part for chunk in mine for part in chunk.tool_calls),
                read=read,
            )
        )
    prompt = next((chunk.prompt_token_ids for chunk in chunks if chunk.prompt_token_ids), ())
    return Completion(last.request_id, last.model, prompt, tuple(choices), last.usage, client_timings, last.timings)


def _choice(message: pb.Choice, read: Read | None) -> Choice:
    return Choice(
        index=message.index,
        text=message.text,
        token_ids=tuple(message.token_ids),
        finish_reason=message.finish_reason,
        logprobs=tuple(_logprob(logprob) for logprob in message.logprobs),
        reasoning=message.reasoning,
        tool_calls=_joined_calls(_parts(message)),
        read=read,
    )


def _logprob(message: pb.TokenLogprobText) -> Logprob:
    top = tuple(_logprob(logprob) for logprob in message.top)
    return Logprob(message.token_id, message.token, message.logprob, top, message.rank or None)


def _usage(message: pb.Usage) -> Usage:
    reasoning = message.reasoning_tokens if message.HasField("reasoning_tokens") else None
    cached = message.cached_tokens if message.HasField("cached_tokens") else None
    return Usage(message.prompt_tokens, message.completion_tokens, reasoning, cached)


def _timings(message: pb.RequestTimings) -> Timings:
    known = {field.name: getattr(message, field.name) for field in fields(Timings)}
    absent = {name: None for name in ("bubble_s", "cached_tokens") if not message.HasField(name)}
    return Timings(**known | absent)
