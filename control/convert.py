"""Between the package's values and the messages of `proto/common.proto`."""

from __future__ import annotations

from collections.abc import Iterable

from alignedserve import errors
from alignedserve.errors import AlignedServeError, OverloadedError, RequestError
from alignedserve.geometry import KvGeometry
from alignedserve.proto import common_pb2 as pb
from alignedserve.request import RequestKey, RequestSpec, SamplingParams, Stage, Stopwatch

_PLAIN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
)
_LISTS = ("stop", "stop_token_ids", "eos_token_ids")


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
    if sampling.logprobs is not None:
        message.logprobs = sampling.logprobs
    if sampling.prompt_logprobs is not None:
        message.prompt_logprobs = sampling.prompt_logprobs
    return message


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        **{name: getattr(message, name) for name in _PLAIN},
        **{name: tuple(getattr(message, name)) for name in _LISTS},
        logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
    )


def timings_to_proto(stopwatch: Stopwatch) -> pb.Timings:
    spent = {f"{stage}_s": seconds for stage, seconds in stopwatch.spent_s.items()}
    return pb.Timings(stage=stopwatch.stage, since_ns=stopwatch.since_ns, **spent)


def timings_from_proto(message: pb.Timings) -> Stopwatch:
    spent = {stage: value for stage in Stage if (value := getattr(message, f"{stage}_s"))}
    return Stopwatch(Stage(message.stage or Stage.QUEUE), message.since_ns, spent)


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
        stopwatch=timings_from_proto(message.timings),
    )


def geometry_to_proto(geometry: KvGeometry) -> pb.Geometry:
    return pb.Geometry(
        model=geometry.model,
        dtype=geometry.dtype,
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        block_size=geometry.block_size,
    )


def geometry_from_proto(message: pb.Geometry) -> KvGeometry:
    return KvGeometry(
        message.model, message.dtype, message.layers, message.kv_heads, message.head_dim, message.block_size
    )


def failure_to_proto(error: BaseException) -> pb.Failure:
    """An error as it goes over a wire. What is not ours is reported by type and text, without a traceback."""
    if isinstance(error, AlignedServeError):
        retry = error.retry_after_s if isinstance(error, OverloadedError) else 0.0
        return pb.Failure(code=error.code, message=error.message, retry_after_s=retry)
    return pb.Failure(code=AlignedServeError.code, message=f"{type(error).__name__}: {error}")


def failure_from_proto(message: pb.Failure) -> AlignedServeError:
    kind = errors.by_code(message.code)
    if issubclass(kind, OverloadedError):
        return kind(message.message, retry_after_s=message.retry_after_s)
    if issubclass(kind, RequestError):
        return kind(message.message, param=None)
    return kind(message.message)
