"""Builds calls before they are sent. Both clients build their calls here and differ only in how they send them."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from numbers import Real
from typing import Any, Generic, TypeVar, cast

import grpc

from alignedserve.client import messages
from alignedserve.client.failures import error_from_status
from alignedserve.client.options import BatchItem, ChatItem, ChatTurn, Options
from alignedserve.client.structured import FORMAT, OUTPUTS, reader
from alignedserve.client.types import Chunk, ClientTimings, Completion, ModelCard
from alignedserve.errors import AlignedServeError, CancelledError, ConfigError, InvalidRequestError, RequestError
from alignedserve.proto import inference_pb2 as pb
from alignedserve.proto.common_pb2 import Empty
from alignedserve.proto.inference_pb2_grpc import InferenceStub

logger = logging.getLogger(__name__)

API_KEY_VARIABLE = "ALIGNEDSERVE_API_KEY"
_LONGEST_TIMEOUT_S = 1e9  # gRPC overflows on longer ones
_OF_THE_CLIENT = ("max_retries",)  # options that are not sent to the server
_INPUTS = ("prompt", "prompt_token_ids", "messages")

Result = TypeVar("Result")

open_stub: Callable[[grpc.Channel | grpc.aio.Channel], Any] = InferenceStub  # generated without types


@dataclass(frozen=True, slots=True)
class Call(Generic[Result]):
    """`method` of the Inference service, its request message, and the function that converts responses."""

    method: str
    message: Any
    parse: Callable[[Any, ClientTimings], Result]
    timeout_s: float | None
    metadata: tuple[tuple[str, str], ...] = field(repr=False)  # the API key is in it
    max_retries: int
    read: messages.Read | None = None  # makes the parsed object of an answer's text
    format_field: str = ""  # the option that asked for structured output

    @property
    def generates(self) -> bool:
        """Whether the call generates tokens. Such a call is resumed after its connection broke."""
        return self.method in ("Generate", "Stream")

    def error(self, error: grpc.RpcError, address: str, request_id: str) -> AlignedServeError:
        """The typed error for a gRPC failure of this call."""
        ids = {"request_id": request_id} if request_id else {}
        found = error_from_status(error, self.timeout_s, address=address, **ids)
        if isinstance(found, RequestError) and (found.param or "").startswith(OUTPUTS):
            found.param = self.format_field or found.param
        return found

    def closed_here(self, request_id: str) -> CancelledError:
        """The error for a call that ended because its stream or its client was closed."""
        ids = {"request_id": request_id} if request_id else {}
        return CancelledError(f"the {self.method} call was closed by this client", **ids)


@dataclass(frozen=True, slots=True)
class CallPlanner:
    """Builds calls with the settings of one client. See `Client` for the fields."""

    model: str | None = None
    application: str | None = None
    timeout_s: float | None = None
    api_key: str | None = field(default=None, repr=False)
    max_retries: int = 2

    def __post_init__(self) -> None:
        if self.api_key is None and (found := os.environ.get(API_KEY_VARIABLE, "").strip()):
            object.__setattr__(self, "api_key", found)
        if self.api_key and not (self.api_key.isascii() and self.api_key.isprintable() and " " not in self.api_key):
            raise ConfigError(f"api_key (or {API_KEY_VARIABLE}) must be printable ASCII without spaces")
        if self.application and not (self.application.isascii() and self.application.isprintable()):
            raise ConfigError(f"application must be printable ASCII, got {self.application!r}")
        try:
            self._limit(None)
            self._retries(None)
        except InvalidRequestError as error:  # an argument of the client is invalid, not one of a request
            raise ConfigError(error.message) from error

    def generate(self, prompt: str | None, token_ids: Iterable[int] | None, options: Options) -> Call[Completion]:
        return self._whole(messages.prompt_request(prompt, token_ids, _sent(options)), options)

    def stream(self, prompt: str | None, token_ids: Iterable[int] | None, options: Options) -> Call[Chunk]:
        return self._streamed(messages.prompt_request(prompt, token_ids, _sent(options)), options)

    def chat(self, turns: Iterable[ChatTurn], options: Options) -> Call[Completion]:
        return self._whole(messages.chat_request(turns, _sent(options)), options)

    def chat_stream(self, turns: Iterable[ChatTurn], options: Options) -> Call[Chunk]:
        return self._streamed(messages.chat_request(turns, _sent(options)), options)

    def generate_item(self, item: BatchItem, shared: Options) -> Call[Completion]:
        """The call for one item of `generate_many`. Its own options override the shared ones."""
        if isinstance(item, str):
            return self.generate(item, None, shared)
        if not isinstance(item, Mapping):
            return self.generate(None, cast(Iterable[int], item), shared)
        given = {name: item[name] for name in _INPUTS if item.get(name) is not None}  # type: ignore[literal-required]
        if len(given) != 1:
            wanted = "prompt, prompt_token_ids or messages"
            raise InvalidRequestError(
                f"a request needs one of {wanted}, got {', '.join(given) or 'none'}", param="prompt"
            )
        own = {name: value for name, value in item.items() if name not in _INPUTS}
        options = cast(Options, {**shared, **own})
        if "messages" in given:
            return self.chat(given["messages"], options)
        return self.generate(given.get("prompt"), given.get("prompt_token_ids"), options)

    def chat_item(self, item: ChatItem, shared: Options) -> Call[Completion]:
        """The call for one item of `chat_many`."""
        if isinstance(item, Mapping):
            return self.generate_item(item, shared)
        return self.chat(cast(Iterable[ChatTurn], item), shared)

    def cancel(self, request_id: str, timeout_s: float | None) -> Call[bool]:
        if not request_id:
            raise InvalidRequestError("request_id must not be empty", param="request_id")
        message = pb.CancelRequest(request_id=request_id)
        return self._call("Cancel", message, messages.parse_found, self._limit(timeout_s))

    def models(self, timeout_s: float | None) -> Call[tuple[ModelCard, ...]]:
        return self._call("ListModels", Empty(), messages.parse_models, self._limit(timeout_s))

    def _whole(self, message: pb.GenerateRequest, options: Options) -> Call[Completion]:
        limit_s, retries = self._complete(message), self._retries(options.get("max_retries"))
        parse = partial(messages.parse_completion, read=reader(options))
        call = self._call("Generate", message, parse, limit_s, retries)
        return replace(call, format_field=_format_field(options))

    def _streamed(self, message: pb.GenerateRequest, options: Options) -> Call[Chunk]:
        limit_s, retries = self._complete(message), self._retries(options.get("max_retries"))
        call = self._call("Stream", message, messages.parse_chunk, limit_s, retries)
        return replace(call, read=reader(options), format_field=_format_field(options))

    def _complete(self, message: pb.GenerateRequest) -> float | None:
        """Fill in this client's defaults. Returns the call's time limit in seconds."""
        message.model = message.model or self.model or ""
        # The id is chosen here, so that a request that is sent again replaces itself, and every error names it.
        message.request_id = message.request_id or f"req-{uuid.uuid4().hex}"
        limit_s = self._limit(message.timeout_s if message.HasField("timeout_s") else None)
        message.ClearField("timeout_s")
        if limit_s is not None:
            message.timeout_s = (
                limit_s  # the gateway's own limit also applies if the proxy that enforces gRPC's deadline dies
            )
        return limit_s

    def _call(
        self,
        method: str,
        message: Any,
        parse: Callable[[Any, ClientTimings], Result],
        limit_s: float | None,
        max_retries: int | None = None,
    ) -> Call[Result]:
        metadata = [("application", self.application)] if self.application else []
        if self.api_key:
            metadata.append(("authorization", f"Bearer {self.api_key}"))
        metadata += _trace()
        retries = self.max_retries if max_retries is None else max_retries
        return Call(method, message, parse, limit_s, tuple(metadata), retries)

    def _retries(self, max_retries: int | None) -> int:
        chosen = self.max_retries if max_retries is None else max_retries
        if not isinstance(chosen, int) or chosen < 0:
            raise InvalidRequestError(
                f"max_retries must be an integer of at least 0, got {chosen!r}", param="max_retries"
            )
        return chosen

    def _limit(self, timeout_s: float | None) -> float | None:
        """The call's time limit in seconds: its own, else this client's; None if it is unlimited."""
        chosen = self.timeout_s if timeout_s is None else timeout_s
        if chosen is None:
            return None
        if not isinstance(chosen, Real) or not chosen > 0:  # a NaN too
            raise InvalidRequestError(f"timeout_s must be a number greater than 0, got {chosen!r}", param="timeout_s")
        return None if chosen > _LONGEST_TIMEOUT_S else chosen


def _format_field(options: Options) -> str:
    return FORMAT if options.get(FORMAT) is not None else ""


def _sent(options: Options) -> Options:
    """The options that are sent to the server."""
    return cast(Options, {name: value for name, value in options.items() if name not in _OF_THE_CLIENT})


def _trace() -> list[tuple[str, str]]:
    """The caller's trace, if the program uses OpenTelemetry: the server's is a part of it."""
    carrier: dict[str, str] = {}
    if "opentelemetry.trace" in sys.modules:
        try:
            import_module("opentelemetry.propagate").inject(carrier)
        except Exception:  # a propagator of the program's own: the call does not fail for it
            logger.debug("the trace of a call is not known", exc_info=True)
    return [(name, carrier[name]) for name in ("traceparent", "tracestate") if name in carrier]
