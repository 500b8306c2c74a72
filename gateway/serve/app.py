"""The gateway as a Ray Serve deployment: HTTP and gRPC of one replica around one GatewayServer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
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
    max_ongoing_requests=1_000_000,  # the ledger says when it is full, with a Retry-After; Serve's own queue does not
    ray_actor_options={"num_cpus": 0},
    health_check_period_s=1,
    health_check_timeout_s=5,  # a hung one is ended by the supervisor; this is for when there is none
    graceful_shutdown_wait_loop_s=0.1,
)
@serve.ingress()
class Gateway:
    """One replica. `supervisor` answers `join_info()` with a dict: supervisor_address, token, model_path, host.

    A replica has an id of its own (not its rank's): while one is replaced, both live.
    """

    async def __init__(  # type: ignore[misc]  # awaited
        self, tree: Tree, supervisor: DeploymentHandle[Any], wait_ready: bool = False
    ) -> None:
        """`wait_ready`: it is up, for Serve, when the cluster can answer. Raises what the cluster cannot start for."""
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
        guard_grpc(ApiKeyCheck(self._server.api_keys), config.gateway.max_body_bytes)
        if info["state"] in _STARTED:  # without a link to the scheduler it would refuse what Serve sends at once
            await self._server.wait_linked(_LINKED_WITHIN_S)
        self._drain_s = config.gateway.drain_s
        self._watch = asyncio.get_running_loop().create_task(self._watch_replica())

    def __serve_build_asgi_app__(self) -> Any:
        return self._server.asgi_app

    async def check_health(self) -> None:
        """Raises when the cluster does not know this gateway any more: Serve replaces it."""
        if self._server.ended_because:
            raise RuntimeError(f"this gateway is to be replaced: {self._server.ended_because}")

    async def __del__(self) -> None:
        """Serve awaits it once, after the replica's requests have ended or its time for that is over."""
        server = self.__dict__.pop("_server", None)  # none where the constructor did not come that far
        if server is not None:
            self._watch.cancel()
            await server.close()

    async def _watch_replica(self) -> None:
        """Serve says nothing when it begins to end a replica (an update, fewer of them): it waits for its requests, and
        cuts off what is left. So that those end with an error of their own, the replica is looked at.
        """
        while not _is_ending():  # noqa: ASYNC110  (Serve has no event for it)
            await asyncio.sleep(_LOOK_S)
        await asyncio.sleep(_REROUTED_S)  # until then proxies may still send requests here, and Serve has them served
        self._server.drain(max(0.0, self._drain_s - _REROUTED_S))

    # ---- gRPC: alignedserve.v1.Inference

    async def Generate(self, request: inf.GenerateRequest, grpc_context: RayServegRPCContext) -> inf.GenerateResponse:
        try:
            self._check_key(grpc_context)
            with self._proxies.covers():
                return await self._server.inference.generate(request)
        except Exception as error:
            _refuse(grpc_context, error)

    async def Stream(
        self, request: inf.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncIterator[inf.GenerateChunk]:
        chunks = self._server.inference.stream(request)
        try:
            self._check_key(grpc_context)
            with self._proxies.covers():
                async for chunk in chunks:
                    yield chunk
        except Exception as error:
            _refuse(grpc_context, error)
        finally:
            await chunks.aclose()

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
        """Where the supervisor is after it was restarted; None while it is not back."""
        try:
            async with asyncio.timeout(_LOCATE_TIMEOUT_S):
                info = await self._supervisor.join_info.remote()
        except Exception as error:  # whatever Ray raises, it is asked again
            logger.debug("the supervisor cannot be located: %s", error)
            return None
        if info["cluster_id"] != self._cluster_id:  # begun anew, after one that could not go on: it takes no stranger
            self._server.end(f"cluster {info['cluster_id']} is in this one's place")
            return None
        return str(info["supervisor_address"])


async def _invitation(supervisor: DeploymentHandle[Any], tree: Tree, *, wait_ready: bool) -> dict[str, Any]:
    """The `join_info` of the supervisor that leads a cluster of this configuration, with `wait_ready` once that has
    been ready. Raises the error that it cannot start for."""
    while True:
        info: dict[str, Any] = await supervisor.join_info.remote(tree)
        if wait_ready and info["failure"] is not None:
            raise by_code(info["failure"]["code"])(info["failure"]["message"])
        if info["state"] and (not wait_ready or info["state"] in _STARTED):
            return info
        await asyncio.sleep(_LOOK_S)


def _is_ending() -> bool:
    with contextlib.suppress(Exception):  # this process may be on its way out
        return is_ending()
    return False


def _own_address() -> str:
    return str(ray.util.get_node_ip_address())


class _Quiet(logging.Filter):
    """Serve logs a traceback for every gRPC call that ends with a status; a client's mistake is not worth one."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], gRPCStatusError))


class _RefusedError(Exception):
    """Carries nothing: the status is in the call's context, and Serve sends it only when something is raised."""


def _refuse(context: RayServegRPCContext, error: Exception) -> NoReturn:
    status, details = grpc_status(report(error))
    context.set_code(status)
    context.set_details(details)
    raise _RefusedError(details) from None
