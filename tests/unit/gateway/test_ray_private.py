"""Ray's private API that `ray_private` relies on, checked by name, so that a failure names what a new Ray changed."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import ray
from packaging.requirements import Requirement

from alignedserve.errors import AlignedServeError
from alignedserve.gateway.serve import ray_private, serve_ports

ROOT = Path(__file__).parents[3]
# Parameters of the functions that we call, or replace by ones with the same parameters.
CALLABLE = {
    "ray._private.node.Node.start_monitor": "self",
    "ray._private.node.Node.start_api_server": "self, include_dashboard, raise_on_failure",
    "ray._private.node.Node.start_log_monitor": "self",
    "ray._private.node.Node.get_session_dir_path": "self",
    "ray._private.node.Node.dead_processes": "self",
    "ray._private.services.resolve_ip_for_localhost": "host",
    "ray._private.utils.get_dashboard_dependency_error": "",
    "ray._private.state.actors": "actor_id, job_id, actor_state_name",
    "ray._common.utils.Timer.time": "self",
    "ray._raylet.CoreWorker.get_actor_id": "self",
    "ray.serve._private.replica.add_port_to_grpc_server": "server, address",
    "ray.serve.context._get_global_client": "raise_if_no_controller_running",
    "ray.serve._private.client.ServeControllerClient.get_serve_details": "self",
    "ray.serve.delete": "name, _blocking",
    "ray.serve._private.grpc_util.gRPCGenericServer.__init__": "self, service_handler_factory, extra_options",
}
CONSTANT = {
    "ray._private.ray_constants.WORKER_PROCESS_SETUP_HOOK_ENV_VAR": str,
    "ray.serve._private.constants.SERVE_CONTROLLER_NAME": str,
    "ray.serve._private.constants.SERVE_NAMESPACE": str,
    "ray.serve._private.constants.SERVE_PROXY_NAME": str,
    "ray.serve._private.constants.RAY_SERVE_USE_GRPC_BY_DEFAULT": bool,
    "ray.serve._private.deployment_state.time": ModuleType,
    "ray.serve._private.haproxy.time": ModuleType,
    "ray._private.worker.global_worker.actors": dict,
    "ray._private.services.ConsolePopen": type,
}
# Ray's source text that looks up, at each call, an attribute that we replace or read.
SOURCE = {
    "ray._private.node.Node.start_head_processes": ["self.start_monitor(", "self.start_api_server("],
    "ray._private.node.Node.start_ray_processes": ["self.start_log_monitor("],
    "ray._private.services.start_ray_process": ["ConsolePopen("],
    "ray._private.services.start_raylet": ["ray._private.utils.get_dashboard_dependency_error()"],
    "ray._private.worker.init": [
        'kwargs.pop("_node_ip_address"',
        'kwargs.pop("_temp_dir"',
        "services.resolve_ip_for_localhost(",
        "global _global_node",
    ],
    "ray._private.workers.default_worker": ["ray_constants.WORKER_PROCESS_SETUP_HOOK_ENV_VAR"],
    "ray._private.state.GlobalState._gen_actor_info": ['"Address"', '"NodeID"', '"State"', '"Pid"'],
    "ray.actor.ActorHandle": ["self._ray_actor_id", "_actor_id"],
    "ray.serve._private.replica": [
        "= add_port_to_grpc_server(self._server,",
        "self._replica_impl: Replica =",
        "self._shutting_down = True",
    ],
    "ray.serve._private.deployment_state": ["time.time() - self._last_health_check_time"],
    "ray.serve._private.haproxy": ["time.time()"],
    "ray.serve._private.grpc_util": ["gRPCGenericServer(", "options="],
}


def resolve(name: str) -> Any:
    """The object of a dotted name. Raises ImportError or AttributeError if a part of it is missing."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


@pytest.mark.parametrize("name", CALLABLE)
def test_ray_has_what_is_called_or_replaced(name: str) -> None:
    assert ", ".join(inspect.signature(resolve(name)).parameters) == CALLABLE[name]


@pytest.mark.parametrize("name", CONSTANT)
def test_ray_has_what_is_read(name: str) -> None:
    assert isinstance(resolve(name), CONSTANT[name])


@pytest.mark.parametrize("name", SOURCE)
def test_ray_looks_up_what_is_replaced_and_sets_what_is_read(name: str) -> None:
    source = inspect.getsource(resolve(name))
    assert [words for words in SOURCE[name] if words not in source] == []


def test_serves_grpc_server_is_one_that_a_guard_can_be_the_base_of() -> None:
    from grpc.aio._server import Server
    from ray.serve._private import grpc_util

    assert grpc_util.gRPCGenericServer.__bases__ == (Server,)


def test_every_private_module_of_the_file_is_checked_here() -> None:
    text = Path(inspect.getfile(ray_private)).read_text(encoding="utf-8")
    modules = set(re.findall(r"\bray(?:\.\w+)*\._(?:private|common)\.\w+", text))
    for package, names in re.findall(r"from (ray(?:\.\w+)*\._(?:private|common)) import ([\w, ]+)", text):
        modules |= {f"{package}.{name}" for name in names.split(", ")}
    assert modules
    checked = [*CALLABLE, *CONSTANT, *SOURCE]
    assert [module for module in modules if not any(name.startswith(module) for name in checked)] == []


def test_the_bound_of_the_requirement_is_the_minor_version_that_is_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (bound,) = (Requirement(line).specifier for line in project["dependencies"] if line.startswith("ray"))
    major, minor = map(int, ray.__version__.split(".")[:2])
    assert f"{major}.{minor}.0" in bound
    assert f"{major}.{minor}.9" in bound
    assert f"{major}.{minor + 1}.0" not in bound


def test_what_is_missing_is_named() -> None:
    with pytest.raises(AlignedServeError, match=r"Ray [\d.]+ has no gone in ray\._private\.services"):
        ray_private._replace(resolve("ray._private.services"), "gone", None)


def test_a_worker_is_told_what_to_call_first(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = resolve("ray._private.ray_constants.WORKER_PROCESS_SETUP_HOOK_ENV_VAR")
    monkeypatch.setenv(variable, "")
    ray_private.set_worker_setup(serve_ports.set_up_worker)
    assert resolve(os.environ[variable]) is serve_ports.set_up_worker
