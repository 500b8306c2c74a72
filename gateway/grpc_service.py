"""The public gRPC service. It shares validation, planning and ledger with HTTP, and differs only in its messages."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import orjson

from alignedserve import logs
from alignedserve.errors import InvalidRequestError
from alignedserve.gateway.body.planning import CallPlan, ServedModel, plan_chat, plan_completion
from alignedserve.gateway.body.requests import CompletionRequest, parse_chat, parse_completion
from alignedserve.gateway.failures import MalformedJsonError, grpc_status
from alignedserve.gateway.http.asgi import report
from alignedserve.gateway.http.body_reader import too_large
from alignedserve.gateway.http.pacing import LARGE_BYTES, Pace
from alignedserve.gateway.ledger.calls import Answer, Call, caller
from alignedserve.gateway.ledger.intake import Intake
from alignedserve.gateway.ledger.ledger import Ledger
from alignedserve.gateway.ledger.resume import with_resume
from alignedserve.gateway.reply.answers import AnswerView, Part
from alignedserve.gateway.reply.best import best_views
from alignedserve.gateway.reply.replies import LEAST_LOGPROB, Parts, timings
from alignedserve.gateway.reply.written_calls import WrittenCall, written_calls
from alignedserve.gateway.tracing.grpc_calls import traced
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import inference_pb2 as inf
from alignedserve.proto import inference_pb2_grpc as inf_grpc
from alignedserve.request import FinishReason, GrammarKind, TokenLogprobs
from alignedserve.text import Tokenizer

if TYPE_CHECKING:
    from alignedserve.gateway.tracing.tracing import Tracing

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
TOOL_CALLS = "tool_calls"  # a finish reason of replies only
_WRITTEN_OTHERWISE = {"prompt", "logit_bias", "bad_words_ids", "grammar"}  # in another form than in an HTTP body
_AS_IN_A_BODY = CompletionRequest.model_fields.keys() - _WRITTEN_OTHERWISE


class InferenceService:
    """The service's four methods. They raise AlignedServeError, which the caller converts to a gRPC status."""

    def __init__(
        self,
        ledger: Ledger,
        intake: Intake,
        model: ServedModel,
        max_body_bytes: int,
        cancel_call: Callable[[str, bytes | None], Awaitable[bool]],
    ) -> None:
        self._cancel_call = cancel_call
        self._ledger = ledger
        self._intake = intake
        self._max_body_bytes = max_body_bytes
        self._model = model
        self._pace = Pace()

    async def generate(self, request: inf.GenerateRequest) -> inf.GenerateResponse:
        call = await self._open(request)
        logs.request_id.set(call.plan.id)
        parts = Parts(call, self._model, self._ledger.end)
        whole = [Part() for _ in parts.views]
        last: Answer | None = None
        try:
            while deltas := await call.next():
                for view, part in parts.take(deltas):
                    whole[view.answer.index].extend(part)
                    last = view.answer if part.finish is not None else last
        finally:
            self._ledger.close(call)
        views = best_views(parts.views, call.plan)
        choices = [self._choice(view, whole[view.answer.index]) for view in views]
        for index, choice in enumerate(choices):
            choice.index = index
        return inf.GenerateResponse(
            request_id=call.plan.id,
            model=self._model.name,
            prompt_token_ids=call.plan.prompts[0].token_ids,
            choices=choices,
            usage=_usage(parts),
            timings=_timings(call.plan, last),
            prompt_logprobs=self._prompt_logprobs(parts.views[0], call.plan),
        )

    async def stream(self, request: inf.GenerateRequest) -> AsyncGenerator[inf.GenerateChunk, None]:
        call = await self._open(request, stream=True)
        logs.request_id.set(call.plan.id)
        parts = Parts(call, self._model, self._ledger.end)
        prompt: tuple[int, ...] | None = call.plan.prompts[0].token_ids
        try:
            while deltas := await call.next():
                taken = parts.take(deltas)
                for number, (view, part) in enumerate(taken, 1):
                    chunk = inf.GenerateChunk(
                        request_id=call.plan.id, model=self._model.name, choice=self._choice(view, part)
                    )
                    if prompt is not None:
                        chunk.prompt_token_ids.extend(prompt)
                        chunk.seed = call.plan.prompts[0].sampling.seed
                        chunk.max_tokens = call.plan.prompts[0].sampling.max_tokens
                        prompt = None
                    if number == len(taken) and parts.ended:
                        chunk.usage.CopyFrom(_usage(parts))
                        if (spent := _timings(call.plan, view.answer)) is not None:
                            chunk.timings.CopyFrom(spent)
                    yield chunk
        finally:
            self._ledger.close(call)

    async def cancel(self, request: inf.CancelRequest) -> inf.CancelResponse:
        return inf.CancelResponse(found=await self._cancel_call(request.request_id, caller.get()))

    def list_models(self) -> inf.ModelList:
        positions = self._model.limit[0] if self._model.info is not None else 0
        return inf.ModelList(models=[inf.ModelCard(id=self._model.name, max_positions=positions)])

    async def _open(self, request: inf.GenerateRequest, *, stream: bool = False) -> Call:
        again = any(entry.token_ids for entry in request.resume)
        if not again:
            self._intake.check(len(self._ledger))
        size = request.ByteSize()
        if size > self._max_body_bytes:
            raise too_large(self._max_body_bytes)
        if size > LARGE_BYTES:
            await self._pace.take(size)
        with self._intake.admit(len(self._ledger), again=again):
            return self._ledger.open(await self._plan(request, stream=stream))

    async def _plan(self, request: inf.GenerateRequest, *, stream: bool) -> CallPlan:
        if request.request_id and not _REQUEST_ID.fullmatch(request.request_id):
            message = "request_id must be 1 to 128 letters, digits, or one of . _ : / -"
            raise InvalidRequestError(message, param="request_id")
        body = body_of(request)
        body["stream"] = stream
        if "messages" in body:
            plan = await plan_chat(self._model, parse_chat(body), request.request_id)
            if not request.chat_json:  # clients that do not know the fields for reasoning have it in the text
                plan = replace(plan, reading=None)
        else:
            plan = await plan_completion(self._model, parse_completion(body), request.request_id)
        return with_resume(plan, request, self._model)

    def _choice(self, view: AnswerView, part: Part) -> inf.Choice:
        return inf.Choice(
            index=view.answer.index,
            text=part.text,
            token_ids=part.token_ids,
            finish_reason=_finish_reason(view, part),
            reasoning=part.reasoning,
            tool_calls=[_call(call) for call in written_calls(part.calls)],
            logprobs=[
                _logprob(self._model.tokenizer, e.token_id, e.logprob) for e in part.scored if e.logprob is not None
            ],
        )

    def _prompt_logprobs(self, view: AnswerView, plan: CallPlan) -> list[inf.TokenLogprobText]:
        count, tokens = plan.reply.prompt_logprobs, view.answer.prompt.token_ids[1:]
        if count is None:
            return []
        found = [entry.most(count) for entry in view.prompt_scores]
        return [_logprob(self._model.tokenizer, *scored) for scored in zip(tokens, found, strict=False)]


def body_of(request: inf.GenerateRequest) -> dict[str, Any]:
    """The JSON body that corresponds to the request, so that gRPC and HTTP requests are checked by the same rules."""
    body: dict[str, Any] = {
        field.name: value if isinstance(value, bool | int | float | str) else list(value)
        for field, value in request.ListFields()
        if field.name in _AS_IN_A_BODY
    }
    if request.logit_bias:
        body["logit_bias"] = {str(entry.token_id): entry.bias for entry in request.logit_bias}
    if request.bad_words_ids:
        body["bad_words_ids"] = [list(sequence.ids) for sequence in request.bad_words_ids]
    if request.HasField("grammar"):
        body["structured_outputs"] = _structured(request.grammar)
    match request.WhichOneof("input"):
        case "prompt":
            body["prompt"] = request.prompt
        case "prompt_token_ids":
            body["prompt"] = list(request.prompt_token_ids.ids)
        case "conversation":
            body["messages"] = [{"role": turn.role, "content": turn.content} for turn in request.conversation.messages]
    further = _further(request.chat_json) if request.chat_json else {}
    if "logprobs" in body and "messages" in (body | further):
        body["top_logprobs"] = body["logprobs"]
        body["logprobs"] = True
    return body | further


def _further(text: str) -> dict[str, Any]:
    """The fields in `chat_json`. Raises InvalidRequestError."""
    try:
        value = orjson.loads(text)
    except ValueError as error:
        raise MalformedJsonError(f"chat_json is not JSON: {error}", param="chat_json") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("chat_json must be a JSON object", param="chat_json")
    return value


def _call(call: WrittenCall) -> inf.ToolCall:
    start = call.start
    return inf.ToolCall(
        index=call.index,
        id="" if start is None else start.id,
        name="" if start is None else start.name,
        arguments=call.arguments,
    )


def _structured(grammar: pb.Grammar) -> dict[str, Any]:
    """The field `structured_outputs` of a body. Raises InvalidRequestError for an unknown kind."""
    kinds = [kind for kind in GrammarKind if kind is not GrammarKind.COMPOSED]
    if grammar.kind not in kinds:
        raise InvalidRequestError(f"grammar.kind must be one of {', '.join(kinds)}", param="grammar")
    value: Any = grammar.text
    if grammar.kind == GrammarKind.CHOICE:
        try:
            value = json.loads(grammar.text)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"grammar.text must be a JSON list: {error}", param="grammar") from error
    whitespace = {"whitespace_pattern": grammar.whitespace} if grammar.HasField("whitespace") else {}
    return {grammar.kind: value, **whitespace}


def _logprob(tokenizer: Tokenizer | None, token: int, entry: TokenLogprobs) -> inf.TokenLogprobText:
    def one(token_id: int, logprob: float) -> inf.TokenLogprobText:
        text = "" if tokenizer is None else tokenizer.token_text(token_id)
        return inf.TokenLogprobText(token_id=token_id, token=text, logprob=max(logprob, LEAST_LOGPROB))

    message = one(token, entry.logprob)
    message.top.extend(one(*pair) for pair in entry.top)
    if entry.rank:
        message.rank = entry.rank
    return message


def _finish_reason(view: AnswerView, part: Part) -> str:
    if part.finish is None:
        return ""
    return TOOL_CALLS if part.finish is FinishReason.STOP and view.calls_whole else part.finish.value


def _usage(parts: Parts) -> inf.Usage:
    usage = inf.Usage(prompt_tokens=parts.prompt_tokens, completion_tokens=parts.completion_tokens)
    reading = parts.call.plan.reading
    if reading is not None and reading.dialects.reads_reasoning:
        usage.reasoning_tokens = sum(view.reasoning_tokens for view in parts.views)
    if parts.call.plan.cache is not None:
        usage.cached_tokens = parts.cached_tokens
    return usage


def _timings(plan: CallPlan, answer: Answer | None) -> inf.RequestTimings | None:
    return inf.RequestTimings(**timings(answer)) if plan.reply.include_timings and answer is not None else None


class InferenceServicer(inf_grpc.InferenceServicer):
    """The service on a plain gRPC server, without Ray Serve."""

    def __init__(self, service: InferenceService, tracing: Tracing | None = None) -> None:
        self._service, self._tracing = service, tracing

    async def Generate(self, request: inf.GenerateRequest, context: Any) -> inf.GenerateResponse:
        try:
            async with traced(self._tracing, "Generate", context):
                return await self._service.generate(request)
        except Exception as error:
            await _abort(context, error)
            raise

    async def Stream(self, request: inf.GenerateRequest, context: Any) -> AsyncIterator[inf.GenerateChunk]:
        chunks = contextlib.aclosing(self._service.stream(request))
        try:
            async with traced(self._tracing, "Stream", context), chunks as new:
                async for chunk in new:
                    yield chunk
        except Exception as error:
            await _abort(context, error)

    async def Cancel(self, request: inf.CancelRequest, context: Any) -> inf.CancelResponse:
        return await self._service.cancel(request)

    async def ListModels(self, request: pb.Empty, context: Any) -> inf.ModelList:
        return self._service.list_models()


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    status, details = grpc_status(report(error))
    await context.abort(status, details)
