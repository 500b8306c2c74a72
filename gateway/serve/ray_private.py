"""Every use of what Ray keeps to itself, in one place: a new Ray may change any of it.

`tests/unit/gateway/test_ray_private.py` names each surface, and fails with the name of one that has changed; the
versions that it was run with are the bound in pyproject.toml. Ray is imported when a function is called: workers import
this file before they know what they will be.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from alignedserve.errors import AlignedServeError

if TYPE_CHECKING:
    import grpc

HEADROOM_BYTES = 1 << 20  # what is a little over the limit of a body is told so by us
CLOCKED = frozenset({"ray.serve._private.deployment_state", "ray.serve._private.haproxy"})
"""The modules in which Serve times its health checks by `time.time`, which they have as `time`."""


def _replace(owner: Any, name: str, value: object) -> None:
    """Raises AlignedServeError where there is nothing of that name: what it is replaced for would silently not be."""
    if not hasattr(owner, name):
        import ray

        raise AlignedServeError(
            f"Ray {ray.__version__} has no {name} in {getattr(owner, '__name__', owner)}, which this version of "
            "AlignedServe changes; install a Ray that its requirements allow"
        )
    setattr(owner, name, value)


# ---- Ray, in the process that starts it


def init_options(address: str, folder: Path) -> dict[str, Any]:
    """Of `ray.init`: the node's address, and where sessions are written."""
    return {"_node_ip_address": address, "_temp_dir": str(folder)}


def set_worker_setup(function: Callable[[], None]) -> None:
    """Have each worker that Ray starts call an importable function first."""
    from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR

    os.environ[WORKER_PROCESS_SETUP_HOOK_ENV_VAR] = f"{function.__module__}.{function.__name__}"


def leave_out_services() -> None:
    """Do without Ray's dashboard, autoscaler and log monitor: a third of the start, 300 MB, and its only network probe.

    There is no option for it, so their starters are taken out of this process's Ray.
    """
    from ray._private.node import Node

    def start_nothing(self: object, *arguments: object, **options: object) -> None:
        return None

    for name in ("start_monitor", "start_api_server", "start_log_monitor"):
        _replace(Node, name, start_nothing)


def stay_on_loopback() -> None:
    """Have Ray's own processes listen on loopback only, and leave out the job API that each node's agent serves.

    Ray binds every interface unless the node's address is 127.0.0.1, which it takes for a mistake and replaces; and it
    has no option to do without the agent's HTTP server but to lack what that imports.
    """
    from ray._private import services, utils

    _replace(services, "resolve_ip_for_localhost", lambda host: host)
    _replace(utils, "get_dashboard_dependency_error", lambda: ImportError("left out"))


def own_process_groups() -> None:
    """Keep signals to the command's process group from Ray's processes: they are needed to end the others cleanly.

    They cannot outlive the command all the same: Ray has the kernel end them with it.
    """
    from ray._private import services

    class OwnGroupPopen(services.ConsolePopen):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, process_group=0, **options)

    _replace(services, "ConsolePopen", OwnGroupPopen)


def session_dir() -> Path:
    """Where the Ray that this process has started or joined writes."""
    return Path(_node().get_session_dir_path())


def dead_processes() -> list[str]:
    """The names of Ray's own processes that were started here and have ended."""
    return [str(name) for name, _ in _node().dead_processes()]


def _node() -> Any:
    from ray._private import worker

    return worker._global_node


# ---- actors


def actor_id(handle: Any) -> str:
    return str(handle._actor_id.hex())


def actor_record(handle: Any) -> dict[str, Any]:
    """What Ray knows of an actor, its `State`, `Pid` and `Address` (with `NodeID`) among it; {} of an unknown one."""
    from ray._private.state import actors

    return dict(actors(actor_id(handle)))


# ---- Serve


def serve_runs() -> bool:
    """Whether Serve has been started in this Ray cluster already."""
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    try:
        ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return False
    return True


def serve_proxies() -> tuple[str, str]:
    """The namespace of Serve's actors, and how the names of its proxies begin."""
    from ray.serve._private.constants import SERVE_NAMESPACE, SERVE_PROXY_NAME

    return SERVE_NAMESPACE, SERVE_PROXY_NAME


def is_ending() -> bool:
    """In a replica: whether Serve has begun to end it, which it keeps to itself."""
    from ray._private import worker

    core: Any = worker.global_worker
    replica = core.actors[core.core_worker.get_actor_id()]
    return bool(replica._replica_impl._shutting_down)


def close_internal_port() -> None:
    """In the constructor of a deployment: its replica will not listen for calls of other deployments over gRPC.

    Handles call replicas as actors, unless Serve was told otherwise (RAY_SERVE_USE_GRPC_BY_DEFAULT=1).
    """
    from ray.serve._private import constants, replica

    if not constants.RAY_SERVE_USE_GRPC_BY_DEFAULT:
        _replace(replica, "add_port_to_grpc_server", lambda server, address: 0)


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

    _replace(grpc_util, "gRPCGenericServer", ServesGuarded)


def give_steady_timer(steady_time: Callable[[], float]) -> None:
    """Have Serve's proxies time their health checks by `steady_time`."""
    from ray._common import utils

    _replace(utils.Timer, "time", lambda self: steady_time())


def give_steady_clock(module: ModuleType, steady_time: Callable[[], float]) -> None:
    """One of CLOCKED: it gets a module `time` with this clock."""
    # A module itself, and no class of ours: Serve pickles actors whose methods refer to it, by its name.
    steady_module = ModuleType("time")
    steady_module.__dict__.update(vars(time), time=steady_time)
    _replace(module, "time", steady_module)
