"""What Ray Serve's processes listen on beside the ports that clients use (docs/adr/0015).

Serve binds all of its gRPC ports to every interface, and has no option for it. One of them takes pickled requests from
anybody: whoever reaches it runs code as this user.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from alignedserve.gateway.serve.serve_clock import steady

if TYPE_CHECKING:
    import grpc

GRPC_HOST = "ALIGNEDSERVE_SERVE_GRPC_HOST"
"""In the environment of Ray's workers: the address that Serve's gRPC ports listen on instead of every one."""
ANY = "[::]:"
HEADROOM_BYTES = 1 << 20  # what is a little over the limit of a body is told so by us


def close_internal_port() -> None:
    """In the constructor of a deployment: its replica will not listen for calls of other deployments over gRPC.

    Handles call replicas as actors, unless Serve was told otherwise (RAY_SERVE_USE_GRPC_BY_DEFAULT=1).
    """
    from ray.serve._private import constants, replica

    if not constants.RAY_SERVE_USE_GRPC_BY_DEFAULT and hasattr(replica, "add_port_to_grpc_server"):
        replica.add_port_to_grpc_server = lambda server, address: 0


def guard_grpc(check: grpc.aio.ServerInterceptor[Any, Any], max_body_bytes: int) -> None:
    """In the constructor of a gateway: `check` is asked before its replica's gRPC server, which Serve starts later,
    reads a message, and none is read that is larger than a body may be. Serve takes 2 GiB from any client otherwise.
    """
    from grpc.aio._server import Server
    from ray.serve._private import grpc_util

    class Guarded(Server):
        def __init__(self, *, options: list[tuple[str, Any]], **others: Any) -> None:
            limits = dict(options) | {"grpc.max_receive_message_length": max_body_bytes + HEADROOM_BYTES}
            super().__init__(options=tuple(limits.items()), **{**others, "interceptors": (check,)})

    class ServesGuarded(grpc_util.gRPCGenericServer, Guarded):
        """Serve's server, of which a Guarded one is the base."""

    grpc_util.gRPCGenericServer = ServesGuarded  # type: ignore[misc]


def set_up_worker() -> None:
    """At the start of a worker of Ray."""
    narrow()
    steady()


def narrow() -> None:
    """At the start of a worker of Ray: gRPC ports asked for on every interface are bound to GRPC_HOST's address."""
    host = os.environ.get(GRPC_HOST, "")
    if not host:
        return
    from grpc.aio._server import Server

    bind = Server.add_insecure_port

    def add_insecure_port(self: Any, address: str) -> int:
        return bind(self, f"{host}:{address.removeprefix(ANY)}" if address.startswith(ANY) else address)

    Server.add_insecure_port = add_insecure_port  # type: ignore[method-assign]
