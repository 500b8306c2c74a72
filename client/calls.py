"""A call, complete before it is sent: both clients plan their calls here and differ only in how they send them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import grpc

from alignedserve.client import messages
from alignedserve.client.failures import error_from_status
from alignedserve.client.options import ChatTurn, Options
from alignedserve.client.types import Chunk, Completion, ModelCard
from alignedserve.errors import AlignedServeError, CancelledError, ConfigError, InvalidRequestError
from alignedserve.proto import inference_pb2 as pb
from alignedserve.proto.common_pb2 import Empty
from alignedserve.proto.inference_pb2_grpc import InferenceStub

DEFAULT_ADDRESS = "127.0.0.1:9000"
API_KEY_VARIABLE = "ALIGNEDSERVE_API_KEY"
DEFAULT_RESUME_S = 15.0
_LONGEST_TIMEOUT_S = 1e9  # gRPC overflows on longer ones
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")

Result = TypeVar("Result")

open_stub: Callable[[grpc.Channel | grpc.aio.Channel], Any] = InferenceStub  # generated without types


@dataclass(frozen=True, slots=True)
class Call(Generic[Result]):
    """`method` of the Inference service with its request, and what turns each of its responses into a result."""

    method: str
    message: Any
    parse: Callable[[Any], Result]
    timeout_s: float | None
    metadata: tuple[tuple[str, str], ...] = field(repr=False)  # the API key is in it
    address: str

    def error(self, error: grpc.RpcError, request_id: str | None = None) -> AlignedServeError:
        """The typed error for a gRPC failure of this call; `request_id` is what the server has named it."""
        known = request_id or getattr(self.message, "request_id", "")
        ids = {"request_id": known} if known else {}
        return error_from_status(error, self.timeout_s, address=self.address, **ids)

    def closed_here(self) -> CancelledError:
        """The error for a call that was cut short by closing its stream or its client."""
        return CancelledError(f"the {self.method} call was closed by this client", address=self.address)


@dataclass(frozen=True, slots=True)
class CallPlanner:
    """What holds for all calls of one client; makes the calls. See `Client` for the fields."""

    address: str = DEFAULT_ADDRESS
    model: str | None = None
    application: str | None = None
    timeout_s: float | None = None
    api_key: str | None = field(default=None, repr=False)
    resume_s: float = DEFAULT_RESUME_S

    def __post_init__(self) -> None:
        if not self.resume_s >= 0:  # a NaN too
            raise ConfigError(f"resume_s must be at least 0, got {self.resume_s}")
        if "://" in self.address and self.address.split("://")[0] in ("http", "https", "grpc"):
            raise ConfigError(f"address must be HOST:PORT of the gRPC port, without a scheme: {self.address!r}")
        if self.api_key is None and (found := os.environ.get(API_KEY_VARIABLE, "").strip()):
            object.__setattr__(self, "api_key", found)
        if self.api_key and not (self.api_key.isascii() and self.api_key.isprintable() and " " not in self.api_key):
            raise ConfigError(f"api_key (or {API_KEY_VARIABLE}) must be printable ASCII without spaces")
        self._limit(None)

    def channel_options(self) -> list[tuple[str, Any]]:
        """gRPC channel arguments: long answers pass, and a server that comes back is found within two seconds."""
        options: list[tuple[str, Any]] = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 2000),
        ]
        if self.address.rsplit(":", 1)[0] in _LOOPBACK:  # `http_proxy` in the environment is not meant for these
            options.append(("grpc.enable_http_proxy", 0))
        return options

    def patience_s(self, call: Call[Any]) -> float:
        """How long the call is tried again. Those that generate nothing are as well called again by whoever called."""
        return self.resume_s if call.method in ("Generate", "Stream") else 0.0

    def generate(self, prompt: str | None, token_ids: Iterable[int] | None, options: Options) -> Call[Completion]:
        return self._whole(messages.prompt_request(prompt, token_ids, options))

    def stream(self, prompt: str | None, token_ids: Iterable[int] | None, options: Options) -> Call[Chunk]:
        return self._streamed(messages.prompt_request(prompt, token_ids, options))

    def chat(self, turns: Iterable[ChatTurn], options: Options) -> Call[Completion]:
        return self._whole(messages.chat_request(turns, options))

    def chat_stream(self, turns: Iterable[ChatTurn], options: Options) -> Call[Chunk]:
        return self._streamed(messages.chat_request(turns, options))

    def cancel(self, request_id: str, timeout_s: float | None) -> Call[bool]:
        if not request_id:
            raise InvalidRequestError("request_id must not be empty", param="request_id")
        message = pb.CancelRequest(request_id=request_id)
        return self._call("Cancel", message, messages.parse_found, self._limit(timeout_s))

    def models(self, timeout_s: float | None) -> Call[tuple[ModelCard, ...]]:
        return self._call("ListModels", Empty(), messages.parse_models, self._limit(timeout_s))

    def _whole(self, message: pb.GenerateRequest) -> Call[Completion]:
        return self._call("Generate", message, messages.parse_completion, self._complete(message))

    def _streamed(self, message: pb.GenerateRequest) -> Call[Chunk]:
        return self._call("Stream", message, messages.parse_chunk, self._complete(message))

    def _complete(self, message: pb.GenerateRequest) -> float | None:
        """Put this client's defaults in, and give the call's limit back, in seconds."""
        message.model = message.model or self.model or ""
        limit_s = self._limit(message.timeout_s if message.HasField("timeout_s") else None)
        message.ClearField("timeout_s")
        if limit_s is not None:
            message.timeout_s = limit_s  # the gateway's own limit: it holds when the proxy dies with gRPC's deadline
        return limit_s

    def _call(self, method: str, message: Any, parse: Callable[[Any], Result], limit_s: float | None) -> Call[Result]:
        metadata = [("application", self.application)] if self.application else []
        if self.api_key:
            metadata.append(("authorization", f"Bearer {self.api_key}"))
        return Call(method, message, parse, limit_s, tuple(metadata), self.address)

    def _limit(self, timeout_s: float | None) -> float | None:
        """The call's limit in seconds, None for none: its own, else this client's."""
        chosen = self.timeout_s if timeout_s is None else timeout_s
        if chosen is None or chosen > _LONGEST_TIMEOUT_S:
            return None
        if not chosen > 0:  # a NaN too
            raise InvalidRequestError(f"timeout_s must be greater than 0, got {chosen}", param="timeout_s")
        return chosen
