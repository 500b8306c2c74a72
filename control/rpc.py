"""gRPC between processes of one cluster: on loopback or the node's address, with a token on every call and a limit on
message sizes.

With TLS (`control/tls.py`), all traffic is encrypted, including the token, and both ends show a certificate.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterable, Awaitable, Callable, Iterator
from typing import Any, TypeVar

import grpc

from alignedserve.cancellation import task_is_cancelled
from alignedserve.control.tls import tls_files
from alignedserve.errors import UnavailableError
from alignedserve.grpc_poller import keep_poller

Message = TypeVar("Message")

TOKEN_KEY = "alignedserve-token"
MAX_MESSAGE_BYTES = 64 << 20

_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
]


def refusal(status: grpc.StatusCode, details: str) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler that refuses a call of any kind at once, without waiting for its messages."""

    async def refuse(_requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(status, details)

    return grpc.stream_stream_rpc_method_handler(refuse)


class _TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Refuses every call that does not carry the cluster's token."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._refusal = refusal(grpc.StatusCode.UNAUTHENTICATED, "this call does not carry the cluster's token")

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        for key, value in handler_call_details.invocation_metadata or ():
            if key == TOKEN_KEY and hmac.compare_digest(str(value).encode(), self._token):
                return await continuation(handler_call_details)
        return self._refusal


class RpcServer:
    """A role's gRPC server, on a free port."""

    def __init__(self, token: str, host: str = "127.0.0.1") -> None:
        self._host = host
        keep_poller()
        self._server = grpc.aio.server(interceptors=[_TokenCheck(token)], options=_OPTIONS)

    def add(self, register: Callable[[Any, Any], None], servicer: object) -> None:
        """Adds a service. `register` is its generated `add_…Servicer_to_server`."""
        register(servicer, self._server)

    async def start(self) -> str:
        """Binds a free port, serves, and returns "host:port". Raises ConfigError if TLS is on with invalid files."""
        address, tls = f"{self._host}:0", tls_files()
        if tls is None:
            port = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, tls.server_credentials())
        await self._server.start()
        return f"{self._host}:{port}"

    async def stop(self, grace_s: float = 0.2) -> None:
        await self._server.stop(grace_s)


class TokenChannel:
    """A channel that adds the token to every call. It has the methods of `grpc.aio.Channel` that stubs use.

    A call raises UnavailableError once the channel was closed.
    """

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self._channel = channel
        self._metadata = ((TOKEN_KEY, token),)

    def _wrap(self, factory: Callable[..., Any], args: Any, kwargs: Any) -> Callable[..., Any]:
        call = factory(*args, **kwargs)
        own = self._metadata

        def with_token(*call_args: Any, metadata: Any = None, **call_kwargs: Any) -> Any:
            try:
                return call(*call_args, metadata=(*own, *(metadata or ())), **call_kwargs)
            except grpc.aio.UsageError as error:
                raise UnavailableError("its channel was closed") from error

        return with_token

    def unary_unary(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return self._wrap(self._channel.unary_unary, args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return self._wrap(self._channel.unary_stream, args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return self._wrap(self._channel.stream_unary, args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return self._wrap(self._channel.stream_stream, args, kwargs)

    async def close(self) -> None:
        await self._channel.close(None)


def open_channel(address: str, token: str) -> TokenChannel:
    """A channel to another role's server, with the token on every call. It connects at the first call, and reconnects.

    Raises ConfigError if TLS is on and its files are invalid.
    """
    options = [
        *_OPTIONS,
        # A stopped peer is detected after that; keepalive alone takes a minute. A shorter time would break the streams
        # of a process that a busy machine does not run for a moment.
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", 5_000),  # also the least time for a connection attempt
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]
    keep_poller()
    tls = tls_files()
    if tls is None:
        return TokenChannel(grpc.aio.insecure_channel(address, options=options), token)
    return TokenChannel(grpc.aio.secure_channel(address, tls.channel_credentials(), options=options), token)


async def one_answer(call: Awaitable[Message]) -> Message:
    """The message that a server answers with. Raises UnavailableError if there is none, for whatever reason."""
    with _unavailable():
        return await call


async def whole_answer(call: AsyncIterable[Message]) -> list[Message]:
    """All messages that a server streams. Raises UnavailableError if the stream breaks before its end."""
    with _unavailable():
        return [message async for message in call]


@contextlib.contextmanager
def _unavailable() -> Iterator[None]:
    """A call that fails raises UnavailableError. gRPC reports a closed channel as a cancellation of the caller."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise UnavailableError(error.code().name) from error
    except asyncio.CancelledError as error:
        if task_is_cancelled():
            raise
        raise UnavailableError("its channel was closed") from error
