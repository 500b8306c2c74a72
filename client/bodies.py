"""HTTP bodies: of a request, as a line of an offline batch has it, and of its answer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Any

from alignedserve.client.messages import Read
from alignedserve.client.types import (
    UNKNOWN_TOKEN,
    Choice,
    ClientTimings,
    Completion,
    Logprob,
    Timings,
    ToolCall,
    Usage,
)
from alignedserve.errors import (
    AlignedServeError,
    AuthenticationError,
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RequestError,
    TooLargeError,
    UnavailableError,
    by_code,
)
from alignedserve.proto import inference_pb2 as pb

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_BY_STATUS: dict[int, type[AlignedServeError]] = {
    400: InvalidRequestError,
    401: AuthenticationError,
    404: NotFoundError,
    408: DeadlineError,
    413: TooLargeError,
    415: InvalidRequestError,
    429: OverloadedError,
    499: CancelledError,
    502: UnavailableError,
    503: UnavailableError,
}
_ARGUMENTS = {"function_call": "arguments", "custom_tool_call": "input"}  # of /v1/responses, by kind of item
_TOKEN_ID = "token_id:"  # how `return_tokens_as_token_ids` writes a token
_WRITTEN_OTHERWISE = {
    "request_id", "prompt_token_ids", "conversation", "logit_bias", "bad_words_ids", "grammar", "chat_json", "resume"
}  # fmt: skip


def body_of(message: pb.GenerateRequest) -> dict[str, Any]:
    """The JSON body that asks for the same as the message."""
    body: dict[str, Any] = {
        field.name: value if isinstance(value, bool | int | float | str) else list(value)
        for field, value in message.ListFields()
        if field.name not in _WRITTEN_OTHERWISE
    }
    if message.logit_bias:
        body["logit_bias"] = {str(entry.token_id): entry.bias for entry in message.logit_bias}
    if message.bad_words_ids:
        body["bad_words_ids"] = [list(sequence.ids) for sequence in message.bad_words_ids]
    if message.HasField("grammar"):
        body["structured_outputs"] = _structured(message)
    if message.HasField("prompt_token_ids"):
        body["prompt"] = list(message.prompt_token_ids.ids)
    if message.HasField("conversation"):
        body["messages"] = [{"role": turn.role, "content": turn.content} for turn in message.conversation.messages]
        if "logprobs" in body:
            body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    return body | (json.loads(message.chat_json) if message.chat_json else {})


def _structured(message: pb.GenerateRequest) -> dict[str, Any]:
    grammar = message.grammar
    value = json.loads(grammar.text) if grammar.kind == "choice" else grammar.text
    space = {"whitespace_pattern": grammar.whitespace} if grammar.HasField("whitespace") else {}
    return {grammar.kind: value, **space}


def completion_of(body: Mapping[str, Any], read: Read | None) -> Completion:
    """The answer in a body of any endpoint. It has `token_ids` only if the request asked for `return_token_ids`."""
    if body.get("object") == "response":
        return _of_response(body, read)
    usage = body["usage"]
    thoughts = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    timings = body.get("timings")
    return Completion(
        request_id=body["id"],
        model=body["model"],
        prompt_token_ids=tuple(body.get("prompt_token_ids") or ()),
        choices=tuple(_choice(choice, read) for choice in body["choices"]),
        usage=Usage(usage["prompt_tokens"], usage["completion_tokens"], thoughts, cached),
        client_timings=ClientTimings(0.0),
        timings=None if timings is None else _timings(timings),
    )


def _timings(found: Mapping[str, Any]) -> Timings:
    """Without what a newer server adds."""
    return Timings(**{field.name: found[field.name] for field in fields(Timings) if field.name in found})


def _choice(choice: Mapping[str, Any], read: Read | None) -> Choice:
    message = choice.get("message") or {"content": choice.get("text")}
    calls = [(call["id"], call["function"]) for call in message.get("tool_calls") or ()]
    return Choice(
        index=choice["index"],
        text=message["content"] or "",
        token_ids=tuple(choice.get("token_ids") or ()),
        finish_reason=choice["finish_reason"],
        logprobs=tuple(_logprobs(choice.get("logprobs") or {})),
        reasoning=message.get("reasoning_content") or "",
        tool_calls=tuple(ToolCall(name, function["name"], function["arguments"]) for name, function in calls),
        read=read,
    )


def _logprobs(found: Mapping[str, Any]) -> Iterator[Logprob]:
    """Those of a chat's choice, or of a completion's."""
    for entry in found.get("content") or ():
        top = tuple(_named(one["token"], one["logprob"]) for one in entry.get("top_logprobs") or ())
        yield replace(_named(entry["token"], entry["logprob"]), top=top)
    older = (found.get(name) or () for name in ("tokens", "token_logprobs", "top_logprobs"))
    for token, logprob, likeliest in zip_longest(*older):
        top = tuple(_named(*one) for one in (likeliest or {}).items())
        yield replace(_named(token, math.nan if logprob is None else logprob), top=top)


def _named(token: str, logprob: float) -> Logprob:
    number = token.removeprefix(_TOKEN_ID)
    return Logprob(int(number) if number != token and number.isdigit() else UNKNOWN_TOKEN, token, logprob)


def _of_response(body: Mapping[str, Any], read: Read | None) -> Completion:
    """The answer in a body of /v1/responses: its items are one choice."""
    usage = body["usage"]
    texts = {"message": "", "reasoning": ""}
    calls = []
    for item in body["output"]:
        kind = item["type"]
        if kind in _ARGUMENTS:
            calls.append(ToolCall(item["call_id"], item["name"], item[_ARGUMENTS[kind]]))
        elif kind in texts:
            parts = item.get("content") or item.get("summary") or ()
            texts[kind] += "".join(part.get("text") or part.get("refusal") or "" for part in parts)
    end = "length" if body["status"] == "incomplete" else "tool_calls" if calls else "stop"
    choice = Choice(
        index=0,
        text=texts["message"],
        token_ids=(),
        finish_reason=end,
        reasoning=texts["reasoning"],
        tool_calls=tuple(calls),
        read=read,
    )
    counted = Usage(usage["input_tokens"], usage["output_tokens"], usage["output_tokens_details"]["reasoning_tokens"])
    return Completion(body["id"], body["model"], (), (choice,), counted, ClientTimings(0.0))


def error_of(status: int, body: Any, retry_after_s: float | None = None) -> AlignedServeError:
    """The typed error of an HTTP answer with this status and body."""
    found = body.get("error") if isinstance(body, Mapping) else None
    told = found if isinstance(found, Mapping) else {}
    message = str(told.get("message") or f"the server answered with HTTP {status}")
    code = told.get("code")
    kind = _BY_STATUS.get(status, RequestError if 400 <= status < 500 else AlignedServeError)
    if issubclass(named := by_code(code or ""), kind):
        kind = named
    details: dict[str, Any] = {"http_status": status}
    if code:
        details["code"] = code
    if issubclass(kind, RequestError):
        details["param"] = told.get("param")
    if issubclass(kind, OverloadedError | UnavailableError) and retry_after_s is not None:
        details["retry_after_s"] = retry_after_s
    return kind(message, **details)
