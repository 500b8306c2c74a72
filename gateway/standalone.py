"""A gateway without Ray: uvicorn serves its HTTP application, a gRPC server its service, in the current event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import grpc
import uvicorn

from alignedserve.errors import ResourceError
from alignedserve.gateway.grpc_service import InferenceServicer
from alignedserve.gateway.http.guard import ApiKeyCheck
from alignedserve.gateway.http.request_id import echoing
from alignedserve.gateway.server import GatewayServer
from alignedserve.proto import inference_pb2_grpc as inf_grpc

MAX_MESSAGE_BYTES = 64 << 20


class _Uvicorn(uvicorn.Server):
    """Does not install signal handlers: the owner of the event loop decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


# Longer than clients reuse idle connections (httpx: 5 s): one that ends as a client uses it again breaks its request.
KEPT_ALIVE_S = 75


class StandaloneGateway:
    """Serves a GatewayServer on two ports (0: any free port) while the context is open.

    async with StandaloneGateway(server, "127.0.0.1", 8000, 9000) as listening:
        print(listening.port, listening.grpc_port)

    Raises ResourceError if a port is in use. The caller closes the GatewayServer itself.
    """

    def __init__(self, server: GatewayServer, host: str = "127.0.0.1", port: int = 0, grpc_port: int = 0) -> None:
        self.host = host
        self.port = port
        self.grpc_port = grpc_port
        self._server = server
        self._uvicorn: _Uvicorn | None = None
        self._task: asyncio.Task[None] | None = None
        self._grpc: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        listener = self._bind()
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(
            echoing(self._server.asgi_app),
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
            timeout_keep_alive=KEPT_ALIVE_S,
        )
        self._uvicorn = _Uvicorn(config)
        self._task = asyncio.get_running_loop().create_task(self._uvicorn.serve(sockets=[listener]))
        self._grpc = grpc.aio.server(
            interceptors=[ApiKeyCheck(self._server.api_keys)],
            options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.so_reuseport", 0)],
        )
        service = InferenceServicer(self._server.inference, self._server.tracing)
        inf_grpc.add_InferenceServicer_to_server(service, self._grpc)
        try:
            self.grpc_port = self._grpc.add_insecure_port(f"{self.host}:{self.grpc_port}")
        except RuntimeError as error:
            raise ResourceError(f"gRPC port {self.grpc_port} of {self.host} is in use") from error
        await self._grpc.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._grpc is not None:
            await self._grpc.stop(0.2)
        if self._uvicorn is not None and self._task is not None:
            self._uvicorn.should_exit = True
            await self._task

    def _bind(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        # asyncio disables Nagle's algorithm only on sockets with an explicit TCP protocol. Otherwise a reply would wait
        # 40 ms for the ACK of its head.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self.host, self.port))
        except OSError as error:
            listener.close()
            raise ResourceError(f"port {self.port} of {self.host} cannot be used: {error.strerror}") from error
        listener.set_inheritable(False)
        return listener
