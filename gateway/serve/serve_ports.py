"""What Ray Serve's processes listen on beside the ports that clients use (docs/adr/0015).

Serve binds all of its gRPC ports to every interface, and has no option for it. One of them takes pickled requests from
anybody: whoever reaches it runs code as this user.
"""

from __future__ import annotations

import os
from typing import Any

from alignedserve.gateway.serve.serve_clock import steady

GRPC_HOST = "ALIGNEDSERVE_SERVE_GRPC_HOST"
"""In the environment of Ray's workers: the address that Serve's gRPC ports listen on instead of every one."""
ANY = "[::]:"


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
