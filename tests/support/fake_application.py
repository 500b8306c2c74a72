"""The Serve application with roles that only join, and a gateway that serves their status and forwards `stop`."""

from __future__ import annotations

from typing import Any, cast

from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse

from alignedserve.cluster.app import LOGGING, supervisor_deployment
from alignedserve.cluster.launch.actors import ACTORS, RoleActor
from alignedserve.config_sources import Tree, from_tree, to_tree
from alignedserve.control.rpc import open_channel
from alignedserve.control.runtime import RoleServer, RoleSettings
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2_grpc as sv_grpc
from support import fake_roles


class FakeActor(RoleActor):
    """Runs a fake role."""

    def _new_role(self, settings: RoleSettings) -> RoleServer:
        fake_roles.install()
        return super()._new_role(settings)

    async def fork_command(self) -> str:
        """A fake role imports nothing that a fork would save."""
        return ""


@serve.deployment(
    name="Gateway",
    ray_actor_options={"num_cpus": 0},
    graceful_shutdown_wait_loop_s=0.1,
    health_check_period_s=1,
    logging_config=LOGGING,
)
class FakeGateway:
    """Does not join: it serves what the supervisor reports."""

    def __init__(self, tree: Tree, supervisor: DeploymentHandle[Any]) -> None:
        self._tree = tree
        self._supervisor = supervisor

    async def __call__(self, request: Request) -> JSONResponse:
        if request.url.path.endswith("/alignedserve/stop"):
            return JSONResponse(await self._stop())
        progress = await self._supervisor.progress.remote()
        status = 200 if progress["state"] == "ready" or request.url.path.endswith("/status") else 503
        return JSONResponse(progress, status_code=status)

    async def _stop(self) -> dict[str, Any]:
        leader = await self._supervisor.join_info.remote()
        channel = open_channel(leader["supervisor_address"], leader["token"])
        try:
            reply = await sv_grpc.SupervisorStub(channel).Stop(pb.Empty())
        finally:
            await channel.close()
        return {"grace_s": reply.grace_s, "command": {"pid": reply.command_pid, "host": reply.command_host}}


def build(args: dict[str, Any]) -> Application:
    tree = to_tree(from_tree(args))
    supervisor = supervisor_deployment(from_tree(args)).bind(tree, dict.fromkeys(ACTORS, FakeActor))
    return cast(Application, cast(Any, FakeGateway).bind(tree, supervisor))
