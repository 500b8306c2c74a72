"""A call's reply, whole or in chunks: the part that OpenAI's two formats and gRPC have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import orjson

from alignedserve.errors import AlignedServeError
from alignedserve.gateway.body.planning import ServedModel
from alignedserve.gateway.body.requests import GenerationRequest
from alignedserve.gateway.failures import error_object
from alignedserve.gateway.ledger.calls import Answer, Call, Delta
from alignedserve.gateway.reply.answers import AnswerView, Part
from alignedserve.gateway.reply.best import best_views
from alignedserve.request import FinishReason, Stage, TokenLogprobs

SIGN_OF_LIFE = 64  # parts
LEAST_LOGPROB = -9999.0  # JSON has no infinity
_DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


class Parts:
    """Converts a call's deltas to parts of its answers.

    `end` is called for an answer whose stop string was found here before its worker reported the end. An answer with
    echo and logprobs waits for its prompt's log-probabilities, which may come with another answer to the same prompt.
    """

    def __init__(self, call: Call, model: ServedModel, end: Callable[[Answer], None]) -> None:
        self.call = call
        self.views = [AnswerView(answer, call.plan, model.tokenizer) for answer in call.answers]
        self._end = end
        self._held: dict[int, Delta] = {}
        self._scores: dict[int, list[TokenLogprobs]] = {}  # by index of the prompt

    def take(self, deltas: Iterable[Delta]) -> list[tuple[AnswerView, Part]]:
        found: list[tuple[AnswerView, Part]] = []
        for delta in self._with_held(deltas):
            view = self.views[delta.answer.index]
            if view.finish is not None:
                continue
            prompt = delta.answer.index // self.call.plan.n
            if view.wants_prompt_scores and prompt not in self._scores and self.call.open:
                self._held[delta.answer.index] = delta
                continue
            part = view.push(delta, self._scores.get(prompt, ()))
            delta.answer.calls_tools = part.finish is FinishReason.STOP and view.calls_whole
            if part.finish is not None and delta.finish is None:
                self._end(delta.answer)
            found.append((view, part))
        return found

    def _with_held(self, deltas: Iterable[Delta]) -> list[Delta]:
        fresh = list(deltas)
        for delta in fresh:
            if delta.prompt_logprobs:
                self._scores.setdefault(delta.answer.index // self.call.plan.n, delta.prompt_logprobs)
        if not self._held:
            return fresh
        held, self._held = self._held, {}
        for delta in fresh:
            if (earlier := held.get(delta.answer.index)) is None:
                held[delta.answer.index] = delta
            else:
                earlier.extend(delta)
        return list(held.values())

    @property
    def ended(self) -> bool:
        """Whether all answers have ended: then the last part that was taken ends the call."""
        return all(view.finish is not None for view in self.views)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.call.plan.prompts)

    @property
    def cached_tokens(self) -> int:
        """Of the prompts' tokens, those whose KV was in the prefix cache."""
        found = [0] * len(self.call.plan.prompts)
        for answer in self.call.answers:
            place = answer.index // self.call.plan.n
            found[place] = max(found[place], answer.cached_tokens)
        return sum(found)

    @property
    def completion_tokens(self) -> int:
        return sum(view.tokens for view in self.views)


def timings(answer: Answer) -> dict[str, Any]:
    """Seconds in each stage, the instances that served the request, and what is known of bubble and cache."""
    spent = {f"{stage}_s": round(answer.stopwatch.spent_s.get(stage, 0.0), 6) for stage in Stage}
    if answer.stopwatch.bubble_s is not None:
        spent["bubble_s"] = round(answer.stopwatch.bubble_s, 6)
    if answer.call.plan.cache is not None:
        spent["cached_tokens"] = answer.cached_tokens
    return {**spent, "prefill_id": answer.prefill_id, "decode_id": answer.decode_id}


class Reply(ABC):
    """One call's reply: `frames` and then `ending` or `broken`, or `collect` and then `body`."""

    object_name: str
    chunk_object_name: str
    error_body = staticmethod(error_object)

    def __init__(
        self, call: Call, model: ServedModel, end: Callable[[Answer], None], request: GenerationRequest
    ) -> None:
        self.call = call
        self.request = request
        self.tokenizer = model.tokenizer
        self._parts = Parts(call, model, end)
        self._head = {"id": call.plan.id, "created": call.arrival_ns // 1_000_000_000, "model": model.name}
        self._options = call.plan.reply
        self._whole: dict[int, Part] = {}
        self._last_ended: Answer | None = None
        self._begun = False

    # ---- implemented by each format

    @abstractmethod
    def choice(self, view: AnswerView, part: Part) -> dict[str, Any]:
        """A choice of the whole reply."""

    @abstractmethod
    def choice_chunk(self, view: AnswerView, part: Part) -> dict[str, Any]:
        """A choice of a chunk, with its new part."""

    def opening_chunk(self, view: AnswerView) -> dict[str, Any] | None:
        """A choice that is sent before a view's first chunk; None: there is none."""
        return None

    # ---- as server-sent events

    def frames(self, deltas: Iterable[Delta]) -> list[bytes]:
        return [event(chunk) for chunk in self.chunks(deltas)]

    def ending(self) -> bytes:
        """What follows the last frame."""
        last = self.last_chunk()
        return (event(last) if last is not None else b"") + _DONE

    def broken(self, error: AlignedServeError) -> bytes:
        """What follows the last frame of a call that fails."""
        return event(self.error_body(error))

    # ---- in chunks

    def chunks(self, deltas: Iterable[Delta]) -> list[dict[str, Any]]:
        """One chunk for each answer with a new part. In chat, an answer's first part has two chunks."""
        chunks: list[dict[str, Any]] = []
        for view, part in self._parts.take(deltas):
            if view.parts == 1 and (opening := self.opening_chunk(view)) is not None:
                chunks.append(self._chunk(self._with_extensions(opening, view, Part()), view, 0))
            if self._says_nothing(view, part):
                continue
            choice = self._with_extensions(self.choice_chunk(view, part), view, part)
            chunk = self._chunk(choice, view, view.tokens)
            if part.finish is not None:
                self._last_ended = view.answer
            chunks.append(chunk)
        if chunks and self._parts.ended and not self._options.include_usage:
            self._add_timings(chunks[-1])
        return chunks

    def _says_nothing(self, view: AnswerView, part: Part) -> bool:
        """Whether its text is part of a marker or held back. Of many such parts one is sent: a sign of life."""
        told = part.text or part.reasoning or part.calls or part.scored or part.finish is not None
        asked = self._options.return_token_ids or self._options.continuous_usage
        if not view.reads or told or asked or view.hides:
            view.silent = 0
            return False
        view.silent = (view.silent + 1) % SIGN_OF_LIFE
        return view.silent > 0

    def last_chunk(self) -> dict[str, Any] | None:
        """The chunk that has only the usage; None if the client did not ask for it."""
        if not self._options.include_usage:
            return None
        chunk = {**self._head, "object": self.chunk_object_name, "choices": [], "usage": self._usage()}
        self._add_timings(chunk)
        return chunk

    def _chunk(self, choice: dict[str, Any], view: AnswerView, tokens: int) -> dict[str, Any]:
        """`tokens`: of the answer so far."""
        chunk = {**self._head, "object": self.chunk_object_name, "choices": [choice]}
        if self._options.include_usage:
            prompt = len(view.answer.prompt.token_ids)
            chunk["usage"] = _usage(prompt, tokens) if self._options.continuous_usage else None
        if not self._begun:
            self._begun = True
            self._add_prompt_tokens(chunk)
        return chunk

    # ---- as a whole

    def collect(self, deltas: Iterable[Delta]) -> None:
        for view, part in self._parts.take(deltas):
            self._whole.setdefault(view.answer.index, Part()).extend(part)
            if part.finish is not None:
                self._last_ended = view.answer

    def body(self) -> dict[str, Any]:
        choices = []
        for index, view in enumerate(best_views(self._parts.views, self.call.plan)):
            part = self._whole.get(view.answer.index, Part())
            choices.append({**self._with_extensions(self.choice(view, part), view, part), "index": index})
        body = {**self._head, "object": self.object_name, "choices": choices, "usage": self._usage()}
        self._add_prompt_tokens(body)
        self._add_timings(body)
        return body

    # ---- extensions

    def _with_extensions(self, choice: dict[str, Any], view: AnswerView, part: Part) -> dict[str, Any]:
        if self._options.return_token_ids:
            choice["token_ids"] = part.token_ids
        if self._options.include_timings and part.finish is not None and len(self._parts.views) > 1:
            choice["timings"] = timings(view.answer)
        return choice

    def _add_prompt_tokens(self, target: dict[str, Any]) -> None:
        """Adds `prompt_token_ids`: a list of token ids, or a list of such lists if there are several prompts."""
        if self._options.return_token_ids:
            prompts = [list(prompt.token_ids) for prompt in self.call.plan.prompts]
            target["prompt_token_ids"] = prompts[0] if len(prompts) == 1 else prompts

    def _add_timings(self, target: dict[str, Any]) -> None:
        """Adds the timings of the answer that ended last. With several answers, each choice has its own timings too."""
        if self._options.include_timings and self._last_ended is not None:
            target["timings"] = timings(self._last_ended)

    def _usage(self) -> dict[str, Any]:
        usage: dict[str, Any] = _usage(self._parts.prompt_tokens, self._parts.completion_tokens)
        if self.call.plan.cache is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self._parts.cached_tokens}
        return usage

    def token_name(self, token: int) -> str:
        """A token as log-probabilities name it."""
        if self.tokenizer is None or self._options.tokens_as_ids:
            return f"token_id:{token}"
        return self.tokenizer.token_text(token)


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def finite(logprob: float) -> float:
    """The log-probability, but at least LEAST_LOGPROB."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
