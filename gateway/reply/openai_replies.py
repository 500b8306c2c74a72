"""OpenAI's two reply formats: completions (with their older logprobs format) and chat completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from alignedserve.gateway.body.requests import ChatRequest
from alignedserve.gateway.ledger.calls import Delta
from alignedserve.gateway.reply.answers import AnswerView, Part, ScoredToken
from alignedserve.gateway.reply.prompt_scores import prompt_scores
from alignedserve.gateway.reply.replies import Reply, event, finite
from alignedserve.gateway.reply.written_calls import written_calls
from alignedserve.request import FinishReason


class CompletionReply(Reply):
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def choice_chunk(self, view: AnswerView, part: Part) -> dict[str, Any]:
        return {
            "index": view.answer.index,
            "text": part.text,
            "logprobs": self._logprobs(part.scored) if view.scored else None,
            "finish_reason": None if part.finish is None else part.finish.value,
        }

    def choice(self, view: AnswerView, part: Part) -> dict[str, Any]:
        return self.choice_chunk(view, part) | prompt_scores(view, self.call.plan, self.tokenizer)

    def _logprobs(self, scored: list[ScoredToken]) -> dict[str, Any]:
        names = [self.token_name(entry.token_id) for entry in scored]
        return {
            "tokens": names,
            "token_logprobs": [None if entry.logprob is None else finite(entry.logprob.logprob) for entry in scored],
            "top_logprobs": [self._top(name, entry) for name, entry in zip(names, scored, strict=True)],
            "text_offset": [entry.offset for entry in scored],
        }

    def _top(self, name: str, entry: ScoredToken) -> dict[str, float] | None:
        """Log-probabilities of the most likely tokens, in descending order, and of the chosen token."""
        if entry.logprob is None:
            return None
        top: dict[str, float] = {}
        for token, logprob in entry.logprob.top:
            top.setdefault(self.token_name(token), finite(logprob))
        top.setdefault(name, finite(entry.logprob.logprob))
        return top


class ChatReply(Reply):
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def choice(self, view: AnswerView, part: Part) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": part.text, "refusal": None}
        if part.reasoning:
            message["reasoning_content"] = part.reasoning
        if part.calls:
            calls = [call.whole for call in written_calls(part.calls)]
            message["content"] = part.text or None
            message |= {"function_call": calls[0]["function"]} if self._older else {"tool_calls": calls}
        return self._choice(view, part, "message", message)

    def body(self) -> dict[str, Any]:
        return super().body() | prompt_scores(self._parts.views[0], self.call.plan, self.tokenizer)

    def choice_chunk(self, view: AnswerView, part: Part) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if part.reasoning:
            delta["reasoning_content"] = part.reasoning
        if part.text or (part.finish is None and not delta and not view.called):
            delta["content"] = part.text
        if part.calls:
            calls = [call.delta for call in written_calls(part.calls)]
            delta |= {"function_call": calls[0]["function"]} if self._older else {"tool_calls": calls}
        return self._choice(view, part, "delta", delta)

    def frames(self, deltas: Iterable[Delta]) -> list[bytes]:
        return [event(one) for chunk in self.chunks(deltas) for one in _one_call_each(chunk)]

    def opening_chunk(self, view: AnswerView) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": view.answer.index, "delta": delta, "logprobs": None, "finish_reason": None}

    @property
    def _older(self) -> bool:
        """Whether calls are written in OpenAI's older form."""
        return isinstance(self.request, ChatRequest) and self.request.older

    def _choice(self, view: AnswerView, part: Part, name: str, content: dict[str, Any]) -> dict[str, Any]:
        logprobs = {"content": [self.logprob(entry) for entry in part.scored], "refusal": None} if view.scored else None
        finish = self.finish_reason(view, part)
        return {"index": view.answer.index, name: content, "logprobs": logprobs, "finish_reason": finish}

    def finish_reason(self, view: AnswerView, part: Part) -> str | None:
        if part.finish is FinishReason.STOP and view.calls_whole:
            return "function_call" if self._older else "tool_calls"
        return None if part.finish is None else part.finish.value

    def _usage(self) -> dict[str, Any]:
        usage = super()._usage()
        reading = self.call.plan.reading
        if reading is not None and reading.dialects.reads_reasoning:
            thought = sum(view.reasoning_tokens for view in self._parts.views)
            usage["completion_tokens_details"] = {"reasoning_tokens": thought}
        return usage

    def logprob(self, entry: ScoredToken) -> dict[str, Any]:
        top = () if entry.logprob is None else entry.logprob.top
        chosen = 0.0 if entry.logprob is None else entry.logprob.logprob
        return {
            **self._token(entry.token_id, chosen),
            "top_logprobs": [self._token(token, logprob) for token, logprob in top],
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        piece = None if self.tokenizer is None else list(self.tokenizer.piece(token))
        return {"token": self.token_name(token), "logprob": finite(logprob), "bytes": piece}


def _one_call_each(chunk: dict[str, Any]) -> list[dict[str, Any]]:
    """Chunks with at most one call each, as OpenAI sends them: some clients read no other."""
    choice = chunk["choices"][0] if chunk["choices"] else {}
    calls: list[Any] = choice.get("delta", {}).get("tool_calls") or []
    if len(calls) < 2:
        return [chunk]
    *others, last = calls
    first = {**choice, "delta": {**choice["delta"], "tool_calls": others[:1]}, "finish_reason": None}
    between = [{**first, "delta": {"tool_calls": [call]}, "logprobs": None} for call in others[1:]]
    ending = {**choice, "delta": {"tool_calls": [last]}, "logprobs": None}
    for one in (*between, ending):
        one.pop("token_ids", None)  # the first has them all
    parts = [{**chunk, "choices": [one]} for one in (first, *between, ending)]
    for part, one in zip(parts[:-1], (first, *between), strict=True):  # the last has them
        part.pop("timings", None)
        one.pop("timings", None)
    for part in parts[1:]:
        part.pop("prompt_token_ids", None)
    return parts
