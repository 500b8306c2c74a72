"""The reply of /v1/messages, Anthropic's API, made of the blocks of an answer."""

from __future__ import annotations

import json
from typing import Any

import orjson

from alignedserve.errors import AlignedServeError
from alignedserve.gateway.failures import ContextLengthError, error_object
from alignedserve.gateway.ledger.calls import MESSAGE, id_of_answer
from alignedserve.gateway.translated.blocks import Block, Kind, Op, Step
from alignedserve.gateway.translated.messages_request import MessagesChat
from alignedserve.gateway.translated.reply import TranslatedReply

_STOPS = {"length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {Kind.TEXT: ("text_delta", "text"), Kind.REASONING: ("thinking_delta", "thinking"),
           Kind.CALL: ("input_json_delta", "partial_json")}  # fmt: skip
_KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
          408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}  # fmt: skip
SIGNATURE = "YWxpZ25lZHNlcnZl"
"""Of all thinking: clients leave thinking without a signature out of the conversation."""


def messages_error(error: AlignedServeError) -> dict[str, Any]:
    """Anthropic's error object."""
    status = error.http_status
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message = error_object(error)["error"]["message"]
    if isinstance(error, ContextLengthError):  # agents shorten the conversation when they read these words
        tokens, limit = error.details.get("tokens"), error.details.get("limit")
        message = f"prompt is too long: {f'{tokens} tokens > {limit} maximum' if tokens else message}"
    return {"type": "error", "error": {"type": kind, "message": message}}


class MessagesReply(TranslatedReply):
    request: MessagesChat
    error_body = staticmethod(messages_error)

    def opening(self) -> list[dict[str, Any]]:
        return [{"type": "message_start", "message": {**self._message(), "content": []}}, {"type": "ping"}]

    def step(self, step: Step) -> list[dict[str, Any]]:
        block = step.block
        match step.op:
            case Op.OPEN:
                return [
                    {"type": "content_block_start", "index": block.index, "content_block": _block(block, begun=True)}
                ]
            case Op.ADD:
                kind, name = _DELTAS[block.kind]
                return [
                    {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: step.piece}}
                ]
            case Op.CLOSE:
                signed = {"type": "signature_delta", "signature": SIGNATURE}
                signing = {"type": "content_block_delta", "index": block.index, "delta": signed}
                stop = {"type": "content_block_stop", "index": block.index}
                return [signing, stop] if block.kind is Kind.REASONING else [stop]

    def closing(self) -> list[dict[str, Any]]:
        delta = {"type": "message_delta", "delta": self._stop(), "usage": self._usage_so_far()}
        return [delta, {"type": "message_stop"}]

    def failing(self, error: AlignedServeError) -> list[dict[str, Any]]:
        return [messages_error(error)]

    def body(self) -> dict[str, Any]:
        content = [_block(block) for block in self.blocks.all]
        return {**self._message(), "content": content, **self._stop()}

    # internal

    def _message(self) -> dict[str, Any]:
        return {
            "id": id_of_answer(self.call.plan.id, MESSAGE),
            "type": "message",
            "role": "assistant",
            "model": self._head["model"],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage_so_far(),
        }

    def _stop(self) -> dict[str, Any]:
        stop, wanted = self._parts.views[0].stop_string, self.request.max_tokens
        reason = "stop_sequence" if stop is not None else _STOPS.get(self.blocks.finish or "", "end_turn")
        if reason == "max_tokens" and wanted is not None and self.call.plan.prompts[0].sampling.max_tokens < wanted:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _usage_so_far(self) -> dict[str, int]:
        usage = self._usage()
        cached = self._parts.cached_tokens
        return {
            "input_tokens": usage["prompt_tokens"] - cached,  # Anthropic counts cached ones apart
            "output_tokens": usage["completion_tokens"],
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
        }


def _block(block: Block, *, begun: bool = False) -> dict[str, Any]:
    text = "" if begun else block.text
    match block.kind:
        case Kind.TEXT:
            return {"type": "text", "text": text}
        case Kind.REASONING:
            return {"type": "thinking", "thinking": text, "signature": "" if begun else SIGNATURE}
        case Kind.CALL:
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _arguments(text)}


def _arguments(text: str) -> orjson.Fragment | dict[str, Any]:
    """A call's arguments as they were written: orjson cannot write every JSON text's value. {} for cut ones."""
    try:
        found = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return {}
    return orjson.Fragment(text) if isinstance(found, dict) else {}


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
