"""Converts between the package's values and protobuf messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from alignedserve import errors
from alignedserve.errors import AlignedServeError, OverloadedError, RequestError
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import gateway_pb2 as gw
from alignedserve.request import (
    MOST_STEPS,
    FinishReason,
    GrammarKind,
    GrammarSpec,
    RequestKey,
    RequestSpec,
    SamplingParams,
    Stage,
    Stopwatch,
    TokenLogprobs,
)
from alignedserve.thinking import ThinkingLimit

# Each field of the message corresponds to the field of SamplingParams with the same name.
_MESSAGES = ("grammar", "thinking")
_OPTIONAL = [
    field.name for field in pb.SamplingParams.DESCRIPTOR.fields if field.has_presence and field.name not in _MESSAGES
]
_OTHERS = [field.name for field in pb.SamplingParams.DESCRIPTOR.fields if not field.has_presence]
_PLAIN = [name for name in _OTHERS if isinstance(getattr(pb.SamplingParams(), name), bool | int | float | str)]
_SEQUENCES = ("bad_words", "bad_words_ids")
_LISTS = [name for name in _OTHERS if name not in (*_PLAIN, *_SEQUENCES, "logit_bias")]


def key_to_proto(key: RequestKey) -> pb.RequestKey:
    return pb.RequestKey(request_id=key.request_id, epoch=key.epoch)


def key_from_proto(message: pb.RequestKey) -> RequestKey:
    return RequestKey(message.request_id, message.epoch)


def keys_to_proto(keys: Iterable[RequestKey]) -> pb.RequestKeys:
    return pb.RequestKeys(keys=[key_to_proto(key) for key in keys])


def keys_from_proto(message: pb.RequestKeys) -> list[RequestKey]:
    return [key_from_proto(key) for key in message.keys]


def sampling_to_proto(sampling: SamplingParams) -> pb.SamplingParams:
    message = pb.SamplingParams(**{name: getattr(sampling, name) for name in (*_PLAIN, *_LISTS)})
    message.logit_bias.extend(pb.LogitBias(token_id=token, bias=bias) for token, bias in sampling.logit_bias)
    for name in _SEQUENCES:
        if sequences := getattr(sampling, name):
            getattr(message, name).extend(pb.TokenSequence(ids=ids) for ids in sequences)
    for name in _OPTIONAL:
        if (value := getattr(sampling, name)) is not None:
            setattr(message, name, value)
    if (grammar := sampling.grammar) is not None:
        message.grammar.CopyFrom(pb.Grammar(kind=grammar.kind, text=grammar.text, whitespace=grammar.whitespace))
    if (thinking := sampling.thinking) is not None:
        calls = [pb.TokenSequence(ids=ids) for ids in thinking.calls]
        message.thinking.CopyFrom(pb.ThinkingLimit(**{**thinking._asdict(), "calls": calls}))
    return message


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    values: dict[str, Any] = {name: getattr(message, name) for name in _PLAIN}
    values |= {name: tuple(getattr(message, name)) for name in _LISTS}
    values |= {name: tuple(tuple(entry.ids) for entry in getattr(message, name)) for name in _SEQUENCES}
    values |= {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
    if message.HasField("grammar"):
        values["grammar"] = _grammar_from_proto(message.grammar)
    if message.HasField("thinking"):
        limit = message.thinking
        calls = tuple(tuple(one.ids) for one in limit.calls)
        values["thinking"] = ThinkingLimit(
            limit.budget, tuple(limit.open), tuple(limit.close), limit.begun, tuple(limit.before), calls
        )
    return SamplingParams(**values, logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias))


def _grammar_from_proto(message: pb.Grammar) -> GrammarSpec:
    whitespace = message.whitespace if message.HasField("whitespace") else None
    return GrammarSpec(GrammarKind(message.kind), message.text, whitespace)


def timings_to_proto(stopwatch: Stopwatch) -> pb.Timings:
    spent = {f"{stage}_s": seconds for stage, seconds in stopwatch.spent_s.items()}
    steps = [pb.StageStep(stage=stage, begun_ns=begun_ns) for stage, begun_ns in stopwatch.steps]
    return pb.Timings(
        stage=stopwatch.stage, since_ns=stopwatch.since_ns, steps=steps, bubble_s=stopwatch.bubble_s, **spent
    )


def timings_from_proto(message: pb.Timings) -> Stopwatch:
    spent = {stage: value for stage in Stage if (value := getattr(message, f"{stage}_s"))}
    steps = [(Stage(step.stage), step.begun_ns) for step in message.steps]
    bubble_s = message.bubble_s if message.HasField("bubble_s") else None
    return Stopwatch(Stage(message.stage or Stage.QUEUE), message.since_ns, spent, steps, bubble_s)


def spec_to_proto(spec: RequestSpec) -> pb.RequestSpec:
    return pb.RequestSpec(
        key=key_to_proto(spec.key),
        prompt_token_ids=spec.prompt_token_ids,
        output_token_ids=spec.output_token_ids,
        sampling=sampling_to_proto(spec.sampling),
        gateway_id=spec.gateway_id,
        gateway_address=spec.gateway_address,
        group_id=spec.group_id,
        group_size=spec.group_size,
        arrival_ns=spec.arrival_ns,
        deadline_ns=spec.deadline_ns,
        wait_objective_s=spec.wait_objective_s,
        priority=spec.priority,
        cache_salt=spec.cache_salt,
        timings=timings_to_proto(spec.stopwatch),
    )


def spec_from_proto(message: pb.RequestSpec) -> RequestSpec:
    return RequestSpec(
        key=key_from_proto(message.key),
        prompt_token_ids=list(message.prompt_token_ids),
        sampling=sampling_from_proto(message.sampling),
        output_token_ids=list(message.output_token_ids),
        gateway_id=message.gateway_id,
        gateway_address=message.gateway_address,
        group_id=message.group_id,
        group_size=message.group_size,
        arrival_ns=message.arrival_ns,
        deadline_ns=message.deadline_ns,
        wait_objective_s=message.wait_objective_s,
        priority=message.priority,
        cache_salt=message.cache_salt,
        stopwatch=timings_from_proto(message.timings),
    )


def failure_to_proto(error: BaseException) -> pb.Failure:
    """An error as a message. Errors other than AlignedServeError are sent as type and text, without a traceback."""
    if isinstance(error, AlignedServeError):
        retry = error.retry_after_s if isinstance(error, OverloadedError) else 0.0
        return pb.Failure(code=error.code, message=error.message, retry_after_s=retry)
    return pb.Failure(code=AlignedServeError.code, message=f"{type(error).__name__}: {error}")


def failure_from_proto(message: pb.Failure) -> AlignedServeError:
    """The error of a message, of the class that its code names."""
    kind = errors.by_code(message.code)
    if issubclass(kind, OverloadedError):
        return kind(message.message, retry_after_s=message.retry_after_s)
    if issubclass(kind, RequestError):
        return kind(message.message, param=None)
    return kind(message.message)


def logprob_to_proto(entry: TokenLogprobs) -> gw.TokenLogprob:
    top = [gw.TopLogprob(token_id=token, logprob=logprob) for token, logprob in entry.top]
    return gw.TokenLogprob(logprob=entry.logprob, top=top, rank=entry.rank)


def token_event(
    spec: RequestSpec,
    token_ids: Iterable[int],
    *,
    position: int,
    logprobs: TokenLogprobs | None = None,
    finish: FinishReason | None = None,
    timed: bool = False,
) -> gw.TokenEvent:
    """A worker's event for the gateway after a pass. `position`: the index of the first token in the answer.

    `timed`: it has the request's times although more follows. The last event always has them.
    """
    event = gw.TokenEvent(key=key_to_proto(spec.key), position=position, token_ids=token_ids)
    if logprobs is not None:
        event.logprobs.append(logprob_to_proto(logprobs))
    if finish is not None:
        event.finish_reason = finish
    if finish is not None or timed:
        event.timings.CopyFrom(timings_to_proto(spec.stopwatch))
    return event


def failure_event(spec: RequestSpec, error: BaseException) -> gw.TokenEvent:
    """The last event of a request that ends with an error."""
    event = token_event(spec, (), position=len(spec.output_token_ids), finish=FinishReason.ERROR)
    event.failure.CopyFrom(failure_to_proto(error))
    return event


def enter_stage(timings: pb.Timings, stage: Stage, now_ns: int) -> None:
    """Does `Stopwatch.enter` on a message, without converting it."""
    if timings.since_ns and timings.stage:
        if (not timings.steps or timings.steps[-1].stage != timings.stage) and len(timings.steps) < MOST_STEPS:
            timings.steps.add(stage=timings.stage, begun_ns=timings.since_ns)
        name = f"{timings.stage}_s"
        setattr(timings, name, getattr(timings, name) + max(0, now_ns - timings.since_ns) / 1e9)
    timings.stage = stage
    timings.since_ns = now_ns
