"""Restricts the addresses on which Ray Serve's processes listen, besides the ports for clients (docs/adr/0015).

Serve binds all of its gRPC ports to every interface, and has no option to change it. One of these ports accepts pickled
requests without authentication: a host that reaches it can run code as this user.
"""

from __future__ import annotations

import os
from typing import Any

from alignedserve.gateway.serve.serve_clock import steady

GRPC_HOST = "ALIGNEDSERVE_SERVE_GRPC_HOST"
"""Environment variable of Ray's workers: the address that Serve's gRPC ports listen on, instead of all interfaces."""
ANY = "[::]:"


def set_up_worker() -> None:
    """The function that every Ray worker calls first."""
    narrow()
    steady()


def narrow() -> None:
    """Binds gRPC ports that are requested on all interfaces to GRPC_HOST's address. Call it at a Ray worker's start."""
    host = os.environ.get(GRPC_HOST, "")
    if not host:
        return
    from grpc.aio._server import Server

    bind = Server.add_insecure_port

    def add_insecure_port(self: Any, address: str) -> int:
        return bind(self, f"{host}:{address.removeprefix(ANY)}" if address.startswith(ANY) else address)

    Server.add_insecure_port = add_insecure_port  # type: ignore[method-assign]
