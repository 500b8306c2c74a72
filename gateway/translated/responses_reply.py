"""The reply of /v1/responses: a response object, or its events, made of the blocks of an answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from alignedserve.errors import AlignedServeError
from alignedserve.gateway.batches.responses import item_id
from alignedserve.gateway.body.planning import ServedModel
from alignedserve.gateway.body.requests import GenerationRequest
from alignedserve.gateway.failures import error_object
from alignedserve.gateway.ledger.calls import RESPONSE, Answer, Call, id_of_answer
from alignedserve.gateway.translated.blocks import Block, Kind, Op, Step
from alignedserve.gateway.translated.reply import TranslatedReply, named
from alignedserve.gateway.translated.responses_request import ResponsesChat
from alignedserve.gateway.translated.responses_tools import text_input

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
        if block.kind is Kind.REASONING and self.request.summarises:
            return self._summary_step(step)
        if block.kind is Kind.CALL and block.name in self.request.tool_names.custom:
            return self._custom_step(step)
        where = {"item_id": self._id(block), "output_index": block.index}
        within = where if block.kind is Kind.CALL else {**where, "content_index": 0}
        logprobs = {"logprobs": list(step.logprobs)} if block.kind is Kind.TEXT else {}
        if step.op is Op.ADD:
            return [self._event(f"{_EVENT[block.kind]}.delta", **within, delta=step.piece, **logprobs)]
        if step.op is Op.OPEN:
            events = [self._added(block)]
            if block.kind is not Kind.CALL:
                events.append(self._event("response.content_part.added", **within, part=_part(block, "")))
            return events
        about: dict[str, Any] = {"text": block.text}
        if block.kind is Kind.TEXT:
            about["logprobs"] = block.logprobs
        elif block.kind is Kind.CALL:
            about = self.request.tool_names.item(block.name, block.text)
            del about["type"]
        events = [self._event(f"{_EVENT[block.kind]}.done", **within, **about)]
        if block.kind is not Kind.CALL:
            events.append(self._event("response.content_part.done", **within, part=_part(block, block.text)))
        return [*events, self._done(block)]

    def _summary_step(self, step: Step) -> list[dict[str, Any]]:
        """Reasoning as one part of a summary."""
        block, kind = step.block, "response.reasoning_summary"
        within = {"item_id": self._id(block), "output_index": block.index, "summary_index": 0}
        match step.op:
            case Op.OPEN:
                part = {"type": "summary_text", "text": ""}
                return [self._added(block), self._event(f"{kind}_part.added", **within, part=part)]
            case Op.ADD:
                return [self._event(f"{kind}_text.delta", **within, delta=step.piece)]
            case Op.CLOSE:
                part = {"type": "summary_text", "text": block.text}
                events = [self._event(f"{kind}_text.done", **within, text=block.text)]
                return [*events, self._event(f"{kind}_part.done", **within, part=part), self._done(block)]

    def _custom_step(self, step: Step) -> list[dict[str, Any]]:
        """The call of a tool that takes a text, which is known once its JSON is whole."""
        block, kind = step.block, "response.custom_tool_call_input"
        if step.op is Op.OPEN:
            return [self._added(block)]
        if step.op is Op.ADD:
            return []
        text = text_input(block.text)
        within = {"item_id": self._id(block), "output_index": block.index}
        events = [self._event(f"{kind}.delta", **within, delta=text)] if text else []
        return [*events, self._event(f"{kind}.done", **within, input=text), self._done(block)]

    def _added(self, block: Block) -> dict[str, Any]:
        item = self._item(block, "in_progress")
        return self._event("response.output_item.added", output_index=block.index, item=item)

    def _done(self, block: Block) -> dict[str, Any]:
        item = self._item(block, self._end_of(block))
        return self._event("response.output_item.done", output_index=block.index, item=item)

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
            "text": {"format": {"type": "text"}, **(given.get("text") or {})},
            "tool_choice": given.get("tool_choice") or "auto",
            "tools": [(_TOOL if tool["type"] == "function" else {}) | tool for tool in given.get("tools") or ()],
            "top_logprobs": given.get("top_logprobs") or 0,
            "truncation": "disabled",
            "usage": None,
        }

    def _end_of(self, block: Block) -> str:
        last = block is self.blocks.all[-1]
        return "incomplete" if last and self.blocks.finish == "length" else "completed"

    def _id(self, block: Block | None = None) -> str:
        whole = id_of_answer(self.call.plan.id, RESPONSE)
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
                if self.request.summarises:
                    summary = [{"type": "summary_text", "text": block.text}] if content else []
                    return {**item, "type": "reasoning", "summary": summary}
                return {**item, "type": "reasoning", "summary": [], "content": content}
            case Kind.CALL:
                call = self.request.tool_names.item(block.name, "" if begun else block.text)
                return {**item, "call_id": block.call_id, **call}

    def _event(self, kind: str, **about: Any) -> dict[str, Any]:
        number, self.sent = self.sent, self.sent + 1
        return {"type": kind, "sequence_number": number, **about}


def failed_at_once(error: AlignedServeError, model: str) -> bytes:
    """The events of a response that could not begin."""
    response = {
        "id": f"{RESPONSE}{uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
    }
    failed = {**response, "status": "failed", "error": {"code": error.code, "message": error.message}}
    created = {"type": "response.created", "sequence_number": 0, "response": response}
    return named(created) + named({"type": "response.failed", "sequence_number": 1, "response": failed})


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": block.logprobs if text else []}
