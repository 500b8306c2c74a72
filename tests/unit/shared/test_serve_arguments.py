"""Arguments of the Serve application: nested as in a Serve config, or `section.key=text` as for `serve run`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ServeDeploySchema

from alignedserve.cluster.app import application, build
from alignedserve.cluster.serve.ray_session import GRPC_SERVICERS
from alignedserve.config import Config
from alignedserve.config_sources import from_arguments, to_tree
from alignedserve.errors import ConfigError
from alignedserve.model import resolve_model
from alignedserve.scheduler.systems import served_settings
from support import kuberay

ROOT = Path(__file__).parents[3]
SERVE_YAML = ROOT / "deploy" / "serve.yaml"
SOURCED = "set -a; . deploy/ray.env; set +a"
POD_KEYS = {"cluster.device", "kv_pool.size_gib", "gateway.api_key_file", "gateway.drain_s"}
AUTOSCALING_KEYS = {"gateway.max_replicas", "gateway.replica_requests"}  # a RayService's gateways are its workers'
# In the ConfigMap: each user's own choice, and a value that fits the pods' grace periods.
NOT_OF_SERVE = ("RAY_USAGE_STATS_ENABLED", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S")


def test_texts_of_a_command_line_are_typed() -> None:
    config = from_arguments(
        {"model.path": "tiny", "cluster.decode": "2", "kv_pool.size_gib": "0.5", "gateway": {"replicas": 3}}
    )
    assert (config.model.path, config.cluster.decode, config.kv_pool.size_gib) == ("tiny", 2, 0.5)
    assert config.gateway.replicas == 3


def test_a_policy_brings_its_settings() -> None:
    config = from_arguments({"scheduler.policy": "aligned-no-prefetch"}, served_settings)
    assert not config.cluster.prefetch


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"scheduler": {"polcy": "aligned"}}, "scheduler.policy"),
        ({"cluster": {"decode": "two"}}, "cluster.decode must be int"),
        ({"cluster.decode": "0"}, "cluster.decode must be between"),
        ({"model": "tiny"}, "model in the application's arguments must contain keys"),
        ({"scheduler": {"policy": "vllm"}}, "vllm"),
        ({"gateway": {"replicas": 3, "max_replicas": 2}}, "gateway.max_replicas"),
        ({"decode": {"tensor_parallel": 3}}, r"^decode instances: tiny has 8 .*3 ranks cannot share .*1, 2, 4, 8"),
        ({"decode": {"pipeline_parallel": 7}}, "6 layers: 7 stages"),
        ({"decode": {"pipeline_parallel": 2, "nodes": 3}}, r"2 stages cannot be spread over 3 nodes \(decode.nodes\)"),
        ({"prefill": {"nodes": 2}}, r"^an instance of 1 rank cannot be spread over 2 nodes \(prefill.nodes\)"),
        ({"decode": {"expert_parallel": 2}}, "has no experts"),
        ({"model.path": "org/elsewhere", "decode.expert_parallel": "2", "decode.tensor_parallel": "2"}, "excludes"),
    ],
)
def test_what_is_wrong_is_named_and_serve_shows_it_alone(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        build(arguments)
    assert isinstance(refused.value, RayServeException)  # for other errors, `serve status` shows a traceback


def test_a_model_folder_that_cannot_work_is_refused_where_the_application_is_built(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(resolve_model("tiny"), tmp_path / "model"))
    build({"model.path": str(folder)})
    build({"model.path": str(tmp_path / "of-another-machine")})
    with pytest.raises(ConfigError, match="3 ranks cannot share"):
        build({"model.path": str(folder), "prefill.tensor_parallel": "3"})
    os.truncate(folder / "model.safetensors", 1 << 20)
    with pytest.raises(ConfigError, match=r"model.safetensors is truncated") as refused:
        build({"model.path": str(folder)})
    assert isinstance(refused.value, RayServeException)


def deployments(config: Config) -> Any:
    return application(config, wait_ready=True)._bound_deployment


def test_the_file_that_ships_has_gateways_that_autoscale() -> None:
    (app,) = yaml.safe_load(SERVE_YAML.read_text(encoding="utf-8"))["applications"]
    config = from_arguments(app["args"], served_settings)
    gateway = deployments(config)
    limits = gateway._deployment_config.autoscaling_config
    assert (limits.min_replicas, limits.max_replicas, limits.target_ongoing_requests) == (1, 4, 200)
    assert gateway._deployment_config.graceful_shutdown_timeout_s > config.gateway.drain_s
    assert gateway.init_args[0] == to_tree(config)


def test_without_max_replicas_their_number_is_fixed() -> None:
    gateway = deployments(from_arguments({"gateway": {"replicas": 2}}))
    assert gateway._deployment_config.autoscaling_config is None
    assert gateway.num_replicas == 2


@pytest.mark.parametrize("file", sorted((SERVE_YAML.parent).glob("serve*.yaml")), ids=lambda file: file.name)
def test_files_that_ship_are_serve_configs_whose_arguments_are_taken(file: Path) -> None:
    config = ServeDeploySchema.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    for app in config.applications:
        assert app.import_path == "alignedserve.cluster.app:build"
        build(app.args)
    assert config.grpc_options.grpc_servicer_functions == GRPC_SERVICERS


def test_a_ray_cluster_of_ones_own_gets_the_variables_that_pods_get() -> None:
    scripts = Path(sys.executable).parent
    environment = {"PATH": f"{scripts}:/usr/bin:/bin"}
    done = subprocess.run(
        ["sh", "-c", f"{SOURCED}; env"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    found = dict(line.partition("=")[::2] for line in done.stdout.splitlines() if line.startswith("RAY_"))
    pods = dict(kuberay.environment("cpu"))
    for place in (found, pods):
        assert Path(place.pop("RAY_SERVE_HAPROXY_BINARY_PATH")).name == "alignedserve-haproxy"
    assert os.access(scripts / "alignedserve-haproxy", os.X_OK)
    assert found == {name: pods[name] for name in pods if name.startswith("RAY_") and name not in NOT_OF_SERVE}


@pytest.mark.parametrize(
    "page", ["README.md", "docs/deploying/ray-serve.md", "docs/deploying/several-nodes.md", "deploy/serve.yaml"]
)
def test_wherever_ray_is_started_the_variables_come_from_that_file(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert SOURCED in text
    assert "export RAY_SERVE_" not in text


def test_the_ray_service_on_cpus_is_the_file_that_ships_with_what_pods_need() -> None:
    shipped, pods = yaml.safe_load(SERVE_YAML.read_text(encoding="utf-8")), kuberay.serve_config("cpu")
    (ours,), (theirs,) = shipped.pop("applications"), pods.pop("applications")
    assert pods == shipped
    assert set(theirs) - set(ours) == {"deployments"}  # its replicas are kept from the head
    keys = [
        {(f"{name}.{key}", value) for name, section in args.items() for key, value in section.items()}
        for args in (ours.pop("args"), theirs.pop("args"))
    ]
    assert {key for key, _ in keys[0] ^ keys[1]} == POD_KEYS | AUTOSCALING_KEYS
    assert ours.items() <= theirs.items()
