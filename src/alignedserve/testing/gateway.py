"""A gateway under uvicorn in front of a FakeCluster, for tests."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from alignedserve.config import Config
from alignedserve.control.role import new_incarnation
from alignedserve.gateway.server import GatewayServer
from alignedserve.gateway.standalone import StandaloneGateway
from alignedserve.model import resolve_model
from alignedserve.proto import common_pb2 as pb
from alignedserve.testing.fake_cluster import TOKEN, FakeCluster


@dataclass(slots=True)
class RunningGateway:
    """A gateway that is ready for requests at `url` and `grpc_address`."""

    server: GatewayServer
    url: str
    grpc_address: str


@contextlib.asynccontextmanager
async def running_gateway(
    cluster: FakeCluster,
    *,
    gateway_id: str = "gateway-0",
    model_path: str | Path = "",
    wait: bool = True,
    **gateway_keys: Any,
) -> AsyncIterator[RunningGateway]:
    """Start one (the shipped model's texts unless `model_path` says otherwise), with keys of the `gateway` section."""
    config = Config()
    config = replace(config, gateway=replace(config.gateway, **gateway_keys))
    path = model_path or resolve_model("tiny")
    process = pb.ProcessKey(role="gateway", id=gateway_id, incarnation=new_incarnation())
    server = await GatewayServer.create(config, path, process, cluster.address, TOKEN)
    try:
        async with StandaloneGateway(server) as listening:
            if wait:
                await server.wait_model(5.0)
                await cluster.wait_for(lambda: server.backend.scheduler_up)
            address = f"127.0.0.1:{listening.port}"
            yield RunningGateway(server, f"http://{address}", f"127.0.0.1:{listening.grpc_port}")
            server.ledger.check_integrity()
    finally:
        await server.close()
