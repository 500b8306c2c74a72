"""All uses of Ray's private interfaces, in one place: a new Ray version may change any of them.

`tests/unit/gateway/test_ray_private.py` tests each interface, and names the one that has changed. pyproject.toml limits
Ray to the versions that this test has passed with. The functions import Ray when they are called, because workers
import this file before their role is known.
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

HEADROOM_BYTES = 1 << 20  # messages a little over the body limit are read, so that our own error names the limit
CLOCKED = frozenset({"ray.serve._private.deployment_state", "ray.serve._private.haproxy"})
"""The modules in which Serve times its health checks by `time.time`; each imports the module `time`."""


def _replace(owner: Any, name: str, value: object) -> None:
    """Sets an existing attribute. Raises AlignedServeError if it does not exist: the patch would have no effect."""
    if not hasattr(owner, name):
        import ray

        raise AlignedServeError(
            f"Ray {ray.__version__} has no {name} in {getattr(owner, '__name__', owner)}, which this version of "
            "AlignedServe changes; install a Ray that its requirements allow"
        )
    setattr(owner, name, value)


# ---- in the process that starts Ray


def init_options(address: str, folder: Path) -> dict[str, Any]:
    """Arguments of `ray.init` for the node's address and the folder of Ray's sessions."""
    return {"_node_ip_address": address, "_temp_dir": str(folder)}


def set_worker_setup(function: Callable[[], None]) -> None:
    """Makes each worker that Ray starts call `function` first; it must be importable by name."""
    from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR

    os.environ[WORKER_PROCESS_SETUP_HOOK_ENV_VAR] = f"{function.__module__}.{function.__name__}"


def leave_out_services() -> None:
    """Starts Ray without its dashboard, autoscaler and log monitor.

    They take a third of the start time and 300 MB, and do Ray's only network probe. Ray has no option to leave them
    out, so the methods that start them are replaced in this process.
    """
    from ray._private.node import Node

    def start_nothing(self: object, *arguments: object, **options: object) -> None:
        return None

    for name in ("start_monitor", "start_api_server", "start_log_monitor"):
        _replace(Node, name, start_nothing)


def stay_on_loopback() -> None:
    """Makes Ray's own processes listen on loopback only, and disables the job API that Ray's agent on each node serves.

    Ray binds every interface unless the node's address is 127.0.0.1, and it replaces this address by another one. Ray's
    agent starts its HTTP server unless the server's dependencies are missing; there is no option.
    """
    from ray._private import services, utils

    _replace(services, "resolve_ip_for_localhost", lambda host: host)
    _replace(utils, "get_dashboard_dependency_error", lambda: ImportError("left out"))


def own_process_groups() -> None:
    """Starts Ray's processes in process groups of their own, so that signals to the command's group do not reach them.

    Ray's processes are needed to end the other processes in order. They still end with the command: Ray makes the
    kernel end them.
    """
    from ray._private import services

    class OwnGroupPopen(services.ConsolePopen):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, process_group=0, **options)

    _replace(services, "ConsolePopen", OwnGroupPopen)


def session_dir() -> Path:
    """The session folder of the Ray cluster that this process has started or joined."""
    return Path(_node().get_session_dir_path())


def dead_processes() -> list[str]:
    """The names of Ray's own processes that this process started and that have ended."""
    return [str(name) for name, _ in _node().dead_processes()]


def _node() -> Any:
    from ray._private import worker

    return worker._global_node


# ---- actors


def actor_id(handle: Any) -> str:
    return str(handle._actor_id.hex())


def actor_record(handle: Any) -> dict[str, Any]:
    """Ray's record of an actor, with `State`, `Pid` and `Address` (with `NodeID`); {} for an unknown actor."""
    from ray._private.state import actors

    return dict(actors(actor_id(handle)))


# ---- Serve


def serve_runs() -> bool:
    """Whether Serve is already running in this Ray cluster."""
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    try:
        ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return False
    return True


def serve_proxies() -> tuple[str, str]:
    """The namespace of Serve's actors, and the prefix of its proxies' names."""
    from ray.serve._private.constants import SERVE_NAMESPACE, SERVE_PROXY_NAME

    return SERVE_NAMESPACE, SERVE_PROXY_NAME


def http_place(app_name: str | None) -> tuple[str, int, str | None]:
    """Host and port of Serve's HTTP, and the route prefix of an application; blocks. None: not asked for, or unset."""
    from ray.serve.context import _get_global_client

    client: Any = _get_global_client()
    prefix = client.get_serve_details()["applications"][app_name]["route_prefix"] if app_name is not None else None
    return client.http_config.host, client.http_config.port, prefix


def begin_deleting(app_name: str) -> None:
    """Deletes an application of Serve, without waiting for its end. Blocks until Serve has the order."""
    from ray import serve

    serve.delete(app_name, _blocking=False)


def is_ending() -> bool:
    """In a replica: whether Serve has begun to end it. Serve has no public interface for this."""
    from ray._private import worker

    core: Any = worker.global_worker
    replica = core.actors[core.core_worker.get_actor_id()]
    return bool(replica._replica_impl._shutting_down)


def close_internal_port() -> None:
    """Call it in a deployment's constructor: the replica then does not listen for other deployments' gRPC calls.

    Handles call replicas as actors, unless RAY_SERVE_USE_GRPC_BY_DEFAULT=1 is set.
    """
    from ray.serve._private import constants, replica

    if not constants.RAY_SERVE_USE_GRPC_BY_DEFAULT:
        _replace(replica, "add_port_to_grpc_server", lambda server, address: 0)


def guard_grpc(check: grpc.aio.ServerInterceptor[Any, Any], max_body_bytes: int) -> None:
    """Call it in a gateway's constructor, before Serve starts the replica's gRPC server.

    The server then runs `check` before it reads a message, and refuses messages that exceed `max_body_bytes` by more
    than HEADROOM_BYTES. By default Serve accepts 2 GiB from any client.
    """
    from grpc.aio._server import Server
    from ray.serve._private import grpc_util

    class Guarded(Server):
        def __init__(self, *, options: list[tuple[str, Any]], **others: Any) -> None:
            limits = dict(options) | {"grpc.max_receive_message_length": max_body_bytes + HEADROOM_BYTES}
            super().__init__(options=tuple(limits.items()), **{**others, "interceptors": (check,)})

    class ServesGuarded(grpc_util.gRPCGenericServer, Guarded):
        """Serve's server, with Guarded as a base."""

    _replace(grpc_util, "gRPCGenericServer", ServesGuarded)


def give_steady_timer(steady_time: Callable[[], float]) -> None:
    """Makes Serve's proxies time their health checks by `steady_time`."""
    from ray._common import utils

    _replace(utils.Timer, "time", lambda self: steady_time())


def give_steady_clock(module: ModuleType, steady_time: Callable[[], float]) -> None:
    """Replaces `time` in `module`, which is in CLOCKED, by a module whose `time()` is `steady_time`."""
    # It must be a module, not an object: Serve pickles actors whose methods refer to it by the module's name.
    steady_module = ModuleType("time")
    steady_module.__dict__.update(vars(time), time=steady_time)
    _replace(module, "time", steady_module)


def export_interval_s() -> float:
    """How often Ray exports metrics."""
    import ray

    return max(int(ray._config.metrics_report_interval_ms()), 1000) / 1000.0
