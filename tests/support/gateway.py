"""Gateways in the test's process, for a FakeCluster or for the roles of a LocalCluster."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignedserve.config import Config
from alignedserve.config_sources import to_tree
from alignedserve.control.runtime import RoleSettings
from alignedserve.gateway.server import GatewayServer
from alignedserve.gateway.standalone import StandaloneGateway
from alignedserve.model import resolve_model
from support.fake_cluster import TOKEN, FakeCluster

if TYPE_CHECKING:
    import httpx


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
    batches: Mapping[str, Any] | None = None,
    kv_pool: Mapping[str, Any] | None = None,
    traces: Mapping[str, Any] | None = None,
    **gateway_keys: Any,
) -> AsyncIterator[RunningGateway]:
    """Start a gateway with settings of the `gateway` section, and by default the tokenizer of the shipped model.

    `batches`, `kv_pool`, `traces`: settings of the sections of these names.
    """
    config = Config()
    config = replace(config, gateway=replace(config.gateway, **gateway_keys))
    config = replace(config, batches=replace(config.batches, **(batches or {})))
    config = replace(config, kv_pool=replace(config.kv_pool, **(kv_pool or {})))
    config = replace(config, traces=replace(config.traces, **(traces or {})))
    path = model_path or resolve_model("tiny")
    settings = _settings(gateway_id, to_tree(config), supervisor_address=cluster.address, token=TOKEN)
    server = await GatewayServer.create(settings, path)
    try:
        async with StandaloneGateway(server) as listening:
            if wait:
                await server.wait_model(5.0)
                await cluster.wait_for(lambda: server.scheduler.up)
            address = f"127.0.0.1:{listening.port}"
            yield RunningGateway(server, f"http://{address}", f"127.0.0.1:{listening.grpc_port}")
            server.ledger.check_integrity()
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def joined_gateway(
    join_info: Mapping[str, Any], *, gateway_id: str = "gateway-0", wait_s: float = 10.0
) -> AsyncIterator[GatewayServer]:
    """A gateway without a listener that has joined the cluster of `LocalCluster.join_info` and knows its model."""
    told = {key: join_info[key] for key in ("supervisor_address", "token", "node_id")}
    settings = _settings(gateway_id, join_info["config"], **told)
    server = await GatewayServer.create(settings, resolve_model(join_info["model_path"]))
    try:
        await server.wait_model(wait_s)
        yield server
    finally:
        await server.close()


def _settings(gateway_id: str, tree: Mapping[str, Any], **told: Any) -> RoleSettings:
    return RoleSettings(role=GatewayServer.role, id=gateway_id, config=tree, cluster_id="", device="", **told)


@contextlib.asynccontextmanager
async def http_to(server: GatewayServer, timeout_s: float) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the gateway's HTTP interface on a port of its own: httpx's ASGITransport would keep streams back."""
    import httpx

    async with StandaloneGateway(server) as listening:
        url = f"http://127.0.0.1:{listening.port}"
        async with httpx.AsyncClient(base_url=url, timeout=timeout_s) as client:
            yield client
