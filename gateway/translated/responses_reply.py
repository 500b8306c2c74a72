"""The reply of /v1/responses: a response object, or its events, made of a chat completion's deltas."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from alignedserve.errors import AlignedServeError
from alignedserve.gateway.batches.responses import PREFIX, item_id
from alignedserve.gateway.body.planning import ServedModel
from alignedserve.gateway.body.requests import GenerationRequest
from alignedserve.gateway.failures import error_object
from alignedserve.gateway.ledger.calls import Answer, Call
from alignedserve.gateway.translated.blocks import Block, Kind, Op, Step
from alignedserve.gateway.translated.reply import TranslatedReply
from alignedserve.gateway.translated.responses_request import ResponsesChat

_ITEM = {Kind.TEXT: "msg", Kind.REASONING: "rs", Kind.CALL: "fc"}
_EVENT = {
    Kind.TEXT: "response.output_text",
    Kind.REASONING: "response.reasoning_text",
    Kind.CALL: "response.function_call_arguments",
}
_TOOL = dict.fromkeys(("description", "parameters", "strict"))
_ECHOED = ("instructions", "max_output_tokens", "temperature", "top_p", "reasoning", "user", "safety_identifier",
           "prompt_cache_key", "service_tier")  # fmt: skip


class ResponsesReply(TranslatedReply):
    """Events have consecutive sequence numbers. Each block is one item of the output.

    `stored`: whether the response says that it is stored.
    """

    request: ResponsesChat

    def __init__(
        self, call: Call, model: ServedModel, end: Callable[[Answer], None], request: GenerationRequest
    ) -> None:
        super().__init__(call, model, end, request)
        self.stored = self.request.stored
        self._ended_s: int | None = None

    def opening(self) -> list[dict[str, Any]]:
        response = self._response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def step(self, step: Step) -> list[dict[str, Any]]:
        block = step.block
        where = {"item_id": self._id(block), "output_index": block.index}
        within = where if block.kind is Kind.CALL else {**where, "content_index": 0}
        logprobs = {"logprobs": list(step.logprobs)} if block.kind is Kind.TEXT else {}
        if step.op is Op.ADD:
            return [self._event(f"{_EVENT[block.kind]}.delta", **within, delta=step.piece, **logprobs)]
        if step.op is Op.OPEN:
            item = self._item(block, "in_progress")
            events = [self._event("response.output_item.added", output_index=block.index, item=item)]
            if block.kind is not Kind.CALL:
                events.append(self._event("response.content_part.added", **within, part=_part(block, "")))
            return events
        about: dict[str, Any] = {"name": block.name, "arguments": block.text}
        if block.kind is not Kind.CALL:
            about = {"text": block.text, **({"logprobs": block.logprobs} if block.kind is Kind.TEXT else {})}
        events = [self._event(f"{_EVENT[block.kind]}.done", **within, **about)]
        if block.kind is not Kind.CALL:
            events.append(self._event("response.content_part.done", **within, part=_part(block, block.text)))
        item = self._item(block, self._end_of(block))
        return [*events, self._event("response.output_item.done", output_index=block.index, item=item)]

    def closing(self) -> list[dict[str, Any]]:
        response = self.body()
        return [self._event(f"response.{response['status']}", response=response)]

    def failing(self, error: AlignedServeError) -> list[dict[str, Any]]:
        about = error_object(error)["error"]
        code = "rate_limit_exceeded" if error.http_status == 429 else "server_error"
        output = [self._item(block, "incomplete") for block in self.blocks.all]
        failed = {**self._response("failed"), "output": output, "error": {"code": code, "message": about["message"]}}
        return [self._event("response.failed", response=failed)]

    def body(self) -> dict[str, Any]:
        cut = self.blocks.finish == "length"
        response = self._response("incomplete" if cut else "completed")
        response["output"] = [self._item(block, self._end_of(block)) for block in self.blocks.all]
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self._ended_s = self._ended_s or int(time.time())
            response["completed_at"] = self._ended_s
        usage: dict[str, Any] = self._usage()
        response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": self._parts.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
            },
            "total_tokens": usage["total_tokens"],
        }
        return response

    # internal

    def _response(self, status: str) -> dict[str, Any]:
        given = self.request.body
        return {
            "id": self._id(),
            "object": "response",
            "created_at": self._head["created"],
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._head["model"],
            "output": [],
            **{name: given.get(name) for name in _ECHOED},
            "metadata": given.get("metadata") or {},
            "parallel_tool_calls": given.get("parallel_tool_calls") is not False,
            "previous_response_id": given.get("previous_response_id") or None,
            "background": False,
            "store": self.stored,
            "text": given.get("text") or {"format": {"type": "text"}},
            "tool_choice": given.get("tool_choice") or "auto",
            "tools": [{**_TOOL, **tool} for tool in given.get("tools") or ()],
            "top_logprobs": given.get("top_logprobs") or 0,
            "truncation": "disabled",
            "usage": None,
        }

    def _end_of(self, block: Block) -> str:
        last = block is self.blocks.all[-1]
        return "incomplete" if last and self.blocks.finish == "length" else "completed"

    def _id(self, block: Block | None = None) -> str:
        number = self.call.plan.id.removeprefix("chatcmpl-")
        whole = f"{PREFIX}{number}"
        return whole if block is None else item_id(_ITEM[block.kind], whole, block.index)

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._id(block), "status": status}
        begun = status == "in_progress"
        match block.kind:
            case Kind.TEXT:
                content = [] if begun else [_part(block, block.text)]
                return {**item, "type": "message", "role": "assistant", "content": content}
            case Kind.REASONING:
                content = [] if begun else [_part(block, block.text)]
                return {**item, "type": "reasoning", "summary": [], "content": content}
            case Kind.CALL:
                call = {"call_id": block.call_id, "name": block.name, "arguments": "" if begun else block.text}
                return {**item, "type": "function_call", **call}

    def _event(self, kind: str, **about: Any) -> dict[str, Any]:
        number, self.sent = self.sent, self.sent + 1
        return {"type": kind, "sequence_number": number, **about}


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": block.logprobs if text else []}
