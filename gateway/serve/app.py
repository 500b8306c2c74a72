"""The gateway as a Ray Serve deployment. Each replica serves HTTP and gRPC with one GatewayServer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any, NoReturn

import ray
from ray import serve
from ray.serve.exceptions import gRPCStatusError
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle

from alignedserve import logs
from alignedserve.config_sources import Tree, from_tree
from alignedserve.control.runtime import RoleSettings
from alignedserve.errors import by_code
from alignedserve.gateway import api_keys  # modules: the deployment is pickled, and a ContextVar cannot be
from alignedserve.gateway.failures import grpc_status
from alignedserve.gateway.http.asgi import report
from alignedserve.gateway.http.guard import ApiKeyCheck
from alignedserve.gateway.ledger import calls  # modules: the deployment is pickled, and a ContextVar cannot be
from alignedserve.gateway.serve.proxy_watch import ProxyWatch
from alignedserve.gateway.serve.ray_private import close_internal_port, guard_grpc, is_ending
from alignedserve.gateway.server import GatewayServer
from alignedserve.gateway.tracing.grpc_calls import traced
from alignedserve.model import resolve_model
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import inference_pb2 as inf

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_LOCATE_TIMEOUT_S = 2.0
_LOOK_S = 0.25
_REROUTED_S = 2.0
_LINKED_WITHIN_S = 5.0
_STARTED = ("ready", "degraded")


@serve.deployment(
    name="Gateway",
    max_ongoing_requests=1_000_000,  # effectively no limit: the ledger refuses with Retry-After, Serve would queue
    ray_actor_options={"num_cpus": 0},
    health_check_period_s=1,
    health_check_timeout_s=5,  # the supervisor fences a hung gateway; this is for when there is no supervisor
    graceful_shutdown_wait_loop_s=0.1,
)
@serve.ingress()
class Gateway:
    """One gateway replica.

    `supervisor` answers `join_info()` with a dict: cluster_id, supervisor_address, token, model_path, host, after,
    state, failure. Each replica has a unique id instead of its rank: it may run at the same time as its replacement.
    """

    async def __init__(  # type: ignore[misc]  # awaited
        self,
        tree: Tree,
        supervisor: DeploymentHandle[Any],
        wait_ready: bool = False,
        telemetry: Mapping[str, str] | None = None,
    ) -> None:
        """`wait_ready`: return only when the cluster can serve; raises the error for which the cluster cannot start.

        `telemetry`: variables of OpenTelemetry. Those of this node go first.
        """
        for name, value in (telemetry or {}).items():
            os.environ.setdefault(name, value)
        close_internal_port()
        config = from_tree(tree)
        self._supervisor = supervisor
        self._proxies = ProxyWatch()
        gateway_id = f"gateway-{serve.get_replica_context().replica_id.unique_id}"
        logs.setup(config.log, "gateway", gateway_id)
        logging.getLogger("ray.serve").addFilter(_Quiet())
        info = await _invitation(supervisor, tree, wait_ready=wait_ready)
        self._cluster_id = str(info["cluster_id"])
        settings = RoleSettings(
            role=GatewayServer.role,
            id=gateway_id,
            config=tree,
            cluster_id=self._cluster_id,
            token=info["token"],
            node_id=f"{socket.gethostname()}-{ray.get_runtime_context().get_node_id()[:6]}",  # as RayLauncher names it
            host=_LOOPBACK if info["host"] == _LOOPBACK else _own_address(),
            supervisor_address=info["supervisor_address"],
            device="",
            after=info["after"],
        )
        folder = await asyncio.to_thread(resolve_model, info["model_path"], config.model.trust_remote_code)
        self._server = await GatewayServer.create(settings, folder, self._locate)
        self._server.application = serve.get_replica_context().app_name
        guard_grpc(ApiKeyCheck(self._server.api_keys), config.gateway.max_body_bytes)
        if info["state"] in _STARTED:  # Serve sends requests at once; without a link to the scheduler they are refused
            await self._server.wait_linked(_LINKED_WITHIN_S)
        self._drain_s = config.gateway.drain_s
        self._watch = asyncio.get_running_loop().create_task(self._watch_replica())

    def __serve_build_asgi_app__(self) -> Any:
        return self._server.asgi_app

    async def check_health(self) -> None:
        """Raises RuntimeError when this gateway should be replaced; Serve then replaces it."""
        if self._server.ended_because:
            raise RuntimeError(f"this gateway must be replaced: {self._server.ended_because}")

    async def __del__(self) -> None:
        """Serve awaits this once, after the replica's requests have ended or their time limit has passed."""
        server = self.__dict__.pop("_server", None)  # None if the constructor failed before
        if server is not None:
            self._watch.cancel()
            await server.close()

    async def _watch_replica(self) -> None:
        """Waits until Serve begins to end this replica (a redeploy, or fewer replicas), then drains the gateway.

        Serve does not notify the replica. It waits for the replica's requests, and then cuts off those that are left.
        With the drain, these end with an error from the gateway.
        """
        while not _is_ending():  # noqa: ASYNC110  (Serve has no event for it)
            await asyncio.sleep(_LOOK_S)
        await asyncio.sleep(_REROUTED_S)  # until then proxies may still send requests here, which must be served
        self._server.drain(max(0.0, self._drain_s - _REROUTED_S))

    # ---- gRPC: alignedserve.v1.Inference

    async def Generate(self, request: inf.GenerateRequest, grpc_context: RayServegRPCContext) -> inf.GenerateResponse:
        try:
            self._check_key(grpc_context)
            async with traced(self._server.tracing, "Generate", grpc_context):
                with self._proxies.covers():
                    return await self._server.inference.generate(request)
        except Exception as error:
            _refuse(grpc_context, error)

    async def Stream(
        self, request: inf.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncIterator[inf.GenerateChunk]:
        chunks = contextlib.aclosing(self._server.inference.stream(request))
        try:
            self._check_key(grpc_context)
            async with traced(self._server.tracing, "Stream", grpc_context), chunks as new:
                with self._proxies.covers():
                    async for chunk in new:
                        yield chunk
        except Exception as error:
            _refuse(grpc_context, error)

    async def Cancel(self, request: inf.CancelRequest, grpc_context: RayServegRPCContext) -> inf.CancelResponse:
        try:
            self._check_key(grpc_context)
            return await self._server.inference.cancel(request)
        except Exception as error:
            _refuse(grpc_context, error)

    async def ListModels(self, request: pb.Empty, grpc_context: RayServegRPCContext) -> inf.ModelList:
        try:
            self._check_key(grpc_context)
            return self._server.inference.list_models()
        except Exception as error:
            _refuse(grpc_context, error)

    def _check_key(self, grpc_context: RayServegRPCContext) -> None:
        calls.caller.set(self._server.api_keys.check(api_keys.of_headers(grpc_context.invocation_metadata())))

    async def _locate(self) -> str | None:
        """The supervisor's address after its restart; None while it is not available."""
        try:
            async with asyncio.timeout(_LOCATE_TIMEOUT_S):
                info = await self._supervisor.join_info.remote()
        except Exception as error:  # any error of Ray: the caller asks again
            logger.debug("the supervisor cannot be located: %s", error)
            return None
        if info["cluster_id"] != self._cluster_id:  # a new cluster after a fatal error; it does not accept this gateway
            self._server.end(f"cluster {info['cluster_id']} has replaced this cluster")
            return None
        return str(info["supervisor_address"])


async def _invitation(supervisor: DeploymentHandle[Any], tree: Tree, *, wait_ready: bool) -> dict[str, Any]:
    """Waits for the `join_info` of a supervisor that leads a cluster of this configuration.

    With `wait_ready`, also waits until the cluster is ready, and raises the error for which it cannot start.
    """
    while True:
        info: dict[str, Any] = await supervisor.join_info.remote(tree)
        if wait_ready and info["failure"] is not None:
            raise by_code(info["failure"]["code"])(info["failure"]["message"])
        if info["state"] and (not wait_ready or info["state"] in _STARTED):
            return info
        await asyncio.sleep(_LOOK_S)


def _is_ending() -> bool:
    with contextlib.suppress(Exception):  # this process may be ending
        return is_ending()
    return False


def _own_address() -> str:
    return str(ray.util.get_node_ip_address())


class _Quiet(logging.Filter):
    """Drops the tracebacks that Serve logs for gRPC calls that end with a status, most often a client's mistake."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], gRPCStatusError))


class _RefusedError(Exception):
    """Makes Serve send the status that is set in the call's context: it does so only when an exception is raised."""


def _refuse(context: RayServegRPCContext, error: Exception) -> NoReturn:
    status, details = grpc_status(report(error))
    context.set_code(status)
    context.set_details(details)
    raise _RefusedError(details) from None
