"""A call's prompts and answers as attributes, with `traces.content` only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from alignedserve.gateway.body.messages import Message
    from alignedserve.gateway.body.planning import PromptPlan
    from alignedserve.gateway.ledger.calls import Answer, Call
    from alignedserve.text import Tokenizer

Json = dict[str, Any]


def content_of(call: Call, messages: Sequence[Message], tokenizer: Tokenizer | None) -> dict[str, str]:
    """`messages`: of a chat. JSON, as OpenTelemetry's conventions have it. An answer is what the model has written."""
    sent = [_message(one) for one in messages] or [_prompt(one, tokenizer) for one in call.plan.prompts]
    written = [_answer(one, tokenizer) for one in call.answers]
    return {
        "gen_ai.input.messages": orjson.dumps(sent).decode(),
        "gen_ai.output.messages": orjson.dumps(written).decode(),
    }


def _message(message: Message) -> Json:
    parts: list[Json] = []
    if (thought := message.reasoning_content or message.reasoning) is not None:
        parts.append({"type": "reasoning", "content": thought})
    if message.role in ("tool", "function"):
        parts.append({"type": "tool_call_response", "id": message.tool_call_id, "response": message.content})
    elif message.content is not None:
        parts.append(_text(message.content))
    for call in message.calls:
        function = call["function"]
        said = {"name": function["name"], "arguments": function.get("arguments")}
        parts.append({"type": "tool_call", "id": call.get("id"), **said})
    return {"role": message.role, "parts": parts}


def _prompt(prompt: PromptPlan, tokenizer: Tokenizer | None) -> Json:
    text = prompt.text
    if text is None:
        text = "" if tokenizer is None else tokenizer.decode(prompt.token_ids)
    return {"role": "user", "parts": [_text(text)]}


def _answer(answer: Answer, tokenizer: Tokenizer | None) -> Json:
    text = "" if tokenizer is None else tokenizer.decode(answer.tokens)
    finish = "error" if answer.finish is None else answer.finish.value
    return {"role": "assistant", "parts": [_text(text)], "finish_reason": finish}


def _text(text: str) -> Json:
    return {"type": "text", "content": text}
