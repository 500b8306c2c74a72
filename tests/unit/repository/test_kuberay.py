"""The manifests of deploy/kuberay: they fit the schemas, what they name exists, and their figures add up."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from alignedserve import __version__
from alignedserve.cluster.app import build, supervisor_deployment
from alignedserve.config import Config
from alignedserve.config_sources import from_tree
from alignedserve.resources import parse_resources
from support import kuberay
from support.kuberay import Manifest, RayPods, of_kind, quantity, selected
from support.requirements import need

GUIDE = Path(__file__).parents[3] / "docs/deploying/kuberay.md"
SETTLE_S = 5  # until clients are sent elsewhere
ASKING_S = 7  # of wait-idle beyond its timeout: its start, and a query that is under way
DRAIN_STARTS_S = 2  # until Serve has seen that a node is drained
RAY_ENDS_S = 15  # Ray's time to end its processes: two seconds each, one after the other
each_variant = pytest.mark.parametrize("variant", kuberay.VARIANTS)


def configuration(variant: str) -> Config:
    (application,) = kuberay.serve_config(variant)["applications"]
    return from_tree(application["args"])


def workers(variant: str) -> list[RayPods]:
    return [pods for pods in kuberay.ray_pods(variant) if not pods.is_head]


def pod_specs(variant: str) -> Iterator[tuple[str, dict[str, str], Manifest]]:
    """Name, labels and pod spec of every workload."""
    for pods in kuberay.ray_pods(variant):
        yield pods.group, pods.labels, pods.spec
    for entry in of_kind(kuberay.manifests(variant), "StatefulSet"):
        template = entry["spec"]["template"]
        yield entry["metadata"]["name"], template["metadata"]["labels"], template["spec"]


def ports_of(spec: Manifest) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for c in spec["containers"] for port in c["ports"]}


# ---- files


def test_every_file_is_applied_by_a_kustomization() -> None:
    applied = {file for name in (*kuberay.VARIANTS, "monitoring") for file in kuberay.files(name)}
    written = {file.resolve() for file in kuberay.FOLDER.rglob("*.yaml")}
    others = {file for file in written if file.name in ("kustomization.yaml", "image-fields.yaml")}
    assert {file.resolve() for file in applied} == written - others


@each_variant
def test_kustomize_makes_of_them_what_the_tests_read(variant: str) -> None:
    need("" if shutil.which("kubectl") else "kubectl is not installed")
    command = ["kubectl", "kustomize", str(kuberay.FOLDER / variant)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    made = list(yaml.load_all(done.stdout, yaml.CSafeLoader))
    read = kuberay.manifests(variant)
    assert {(e["kind"], e["metadata"]["name"]) for e in made} == {(e["kind"], e["metadata"]["name"]) for e in read}
    (service,) = of_kind(made, "RayService")
    assert service["metadata"]["namespace"] == "alignedserve"
    assert service["spec"] == kuberay.ray_service(variant)["spec"]


# ---- names and ports


@each_variant
def test_every_service_has_pods_with_the_ports_that_it_names(variant: str) -> None:
    for service in of_kind(kuberay.manifests(variant), "Service"):
        found = [spec for _, labels, spec in pod_specs(variant) if selected(service["spec"]["selector"], labels)]
        assert found, service["metadata"]["name"]
        for spec in found:
            for port in service["spec"]["ports"]:
                assert ports_of(spec)[port["targetPort"]] == port["port"]


@each_variant
def test_serve_listens_on_the_ports_of_the_containers(variant: str) -> None:
    config = kuberay.serve_config(variant)
    for pods in kuberay.ray_pods(variant):
        ports = ports_of(pods.spec)
        assert ports["serve"] == config["http_options"]["port"] == 8000
        assert pods.is_head or ports["grpc"] == config["grpc_options"]["port"]
    (head,) = (pods for pods in kuberay.ray_pods(variant) if pods.is_head)
    # KubeRay derives its services from the head's ports: without these names, it makes none or cannot deploy.
    assert {"gcs-server", "dashboard", "serve", "metrics"} <= ports_of(head.spec).keys()
    assert config["http_options"]["host"] == "0.0.0.0"


@each_variant
def test_network_policies_select_pods_and_open_ports_that_are_there(variant: str) -> None:
    policies = {e["metadata"]["name"]: e["spec"] for e in of_kind(kuberay.manifests(variant), "NetworkPolicy")}
    governed: list[str] = []
    for spec in policies.values():
        chosen = [(n, s) for n, labels, s in pod_specs(variant) if selected(spec["podSelector"]["matchLabels"], labels)]
        assert chosen
        governed += [name for name, _ in chosen]
        listening = {port for _, pod in chosen for port in ports_of(pod).values()}
        for rule in spec["ingress"]:
            assert {port["port"] for port in rule.get("ports", ())} <= listening
            assert rule["from"], "an empty list admits everybody"
    assert sorted(governed) == sorted(name for name, _, _ in pod_specs(variant))

    everybody = [labels for _, labels, _ in pod_specs(variant)]
    for rule in policies["alignedserve-ray"]["egress"]:
        for peer in rule["to"]:
            if "namespaceSelector" not in peer:
                assert any(selected(peer["podSelector"]["matchLabels"], labels) for labels in everybody)


@each_variant
def test_clients_reach_the_two_ports_of_the_gateway_and_nothing_else(variant: str) -> None:
    (policy,) = (
        entry["spec"]
        for entry in of_kind(kuberay.manifests(variant), "NetworkPolicy")
        if entry["metadata"]["name"] == "alignedserve-ray"
    )
    opened = {
        port["port"]
        for rule in policy["ingress"]
        if "alignedserve-client" in str(rule["from"])
        for port in rule["ports"]
    }
    assert opened == {8000, 9000}
    unlimited = [rule["from"] for rule in policy["ingress"] if not rule.get("ports")]
    assert unlimited == [[{"podSelector": policy["podSelector"]}]]  # the pods among themselves


@each_variant
def test_probes_ask_ports_that_the_container_has_and_mean_the_pod(variant: str) -> None:
    for pods in kuberay.ray_pods(variant):
        ports = ports_of(pods.spec)
        ready, alive = (pods.container[name]["httpGet"] for name in ("readinessProbe", "livenessProbe"))
        assert {ready["port"], alive["port"]} <= ports.keys()
        # The head must be ready before an application exists; a worker, once clients may be sent to it.
        assert (ready["port"], ready["path"]) == (("agent", "/api/healthz") if pods.is_head else ("serve", "/health"))
        assert (alive["port"], alive["path"]) == ("agent", "/api/healthz")
        assert ports["agent"] == int(pods.params.get("dashboard-agent-listen-port", 52365))


@each_variant
def test_config_maps_secrets_and_claims_are_there_or_the_guide_makes_them(variant: str) -> None:
    found = kuberay.manifests(variant)
    config_maps = {entry["metadata"]["name"] for entry in of_kind(found, "ConfigMap")}
    guide = GUIDE.read_text(encoding="utf-8")
    for name, _, spec in pod_specs(variant):
        for reference, kind, key in references(spec):
            if kind == "configMap":
                assert reference in config_maps, name
            elif kind == "claim":
                assert f"name: {reference}" in guide
            else:
                assert re.search(rf"create secret generic {reference} .*--from-(literal|file)={key}\b", guide), (
                    reference
                )
    options = kuberay.ray_service(variant)["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    host, _, port = options["redisAddress"].partition(":")
    (redis,) = (entry for entry in of_kind(found, "Service") if entry["metadata"]["name"] == host)
    assert [entry["port"] for entry in redis["spec"]["ports"]] == [int(port)]
    password = options["redisPassword"]["valueFrom"]["secretKeyRef"]
    (store,) = of_kind(found, "StatefulSet")
    (container,) = store["spec"]["template"]["spec"]["containers"]
    assert [entry["valueFrom"]["secretKeyRef"] for entry in container["env"]] == [password]


def test_redis_takes_the_shells_place_and_has_its_password_from_standard_input(tmp_path: Path) -> None:
    (store,) = of_kind(kuberay.manifests("cpu"), "StatefulSet")
    (container,) = store["spec"]["template"]["spec"]["containers"]
    program = tmp_path / "redis-server"
    program.write_text('#!/bin/sh\necho $$ "$@"\ncat\n')
    program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "REDISCLI_AUTH": "of-a-test"}
    with subprocess.Popen(container["command"], env=environment, stdout=subprocess.PIPE, text=True) as process:
        said, _ = process.communicate(timeout=30)
    assert said.splitlines() == [f"{process.pid} /etc/redis/redis.conf -", "requirepass of-a-test"]


def references(spec: Manifest) -> Iterator[tuple[str, str, str]]:
    """`(name, kind, key)` of everything that a pod refers to."""
    for volume in spec.get("volumes", ()):
        if "configMap" in volume:
            yield volume["configMap"]["name"], "configMap", ""
        elif "secret" in volume:
            yield volume["secret"]["secretName"], "secret", "keys"
        elif "persistentVolumeClaim" in volume:
            yield volume["persistentVolumeClaim"]["claimName"], "claim", ""
    for container in spec["containers"]:
        for source in container.get("envFrom", ()):
            yield source["configMapRef"]["name"], "configMap", ""
        for variable in container.get("env", ()):
            if "valueFrom" in variable:
                taken = variable["valueFrom"]["secretKeyRef"]
                yield taken["name"], "secret", taken["key"]


@each_variant
def test_volumes_and_their_mounts_belong_together(variant: str) -> None:
    claims = {
        claim["metadata"]["name"]
        for entry in of_kind(kuberay.manifests(variant), "StatefulSet")
        for claim in entry["spec"]["volumeClaimTemplates"]
    }
    for name, _, spec in pod_specs(variant):
        volumes = {volume["name"] for volume in spec["volumes"]}
        mounts = {mount["name"] for container in spec["containers"] for mount in container["volumeMounts"]}
        assert volumes == mounts - (claims - volumes), name
    key_file = Path(configuration(variant).gateway.api_key_file)
    for pods in workers(variant):
        (mount,) = (mount for mount in pods.container["volumeMounts"] if mount["mountPath"] == str(key_file.parent))
        (volume,) = (volume for volume in pods.spec["volumes"] if volume["name"] == mount["name"])
        assert volume["secret"]["defaultMode"] & 0o007 == 0  # a file open to others is refused
        model = configuration(variant).model.path
        folders = [mount["mountPath"] for mount in pods.container["volumeMounts"]]
        assert model == "tiny" or any(model.startswith(f"{folder}/") for folder in folders)


def test_the_monitors_find_what_they_scrape() -> None:
    ours, rays = of_kind(kuberay.manifests("monitoring"), "ServiceMonitor")[0], kuberay.manifests("monitoring")[1]
    for variant in kuberay.VARIANTS:
        wanted = ours["spec"]["selector"]["matchLabels"]
        services = of_kind(kuberay.manifests(variant), "Service")
        (service,) = (entry for entry in services if selected(wanted, entry["metadata"].get("labels", {})))
        assert {entry["port"] for entry in ours["spec"]["endpoints"]} <= {e["name"] for e in service["spec"]["ports"]}
        scraped = [p for p in kuberay.ray_pods(variant) if selected(rays["spec"]["selector"]["matchLabels"], p.labels)]
        assert scraped == kuberay.ray_pods(variant)
        assert all("metrics" in ports_of(pods.spec) for pods in scraped)
    assert [entry["port"] for entry in rays["spec"]["podMetricsEndpoints"]] == ["metrics"]


@each_variant
def test_the_images_are_those_that_the_dockerfiles_say_how_to_build(variant: str) -> None:
    images = {pods.container["image"] for pods in kuberay.ray_pods(variant)}
    kind = "cpu" if variant == "cpu" else "cuda"
    assert images == {f"alignedserve:{__version__}-{kind}"}
    dockerfile = kuberay.FOLDER.parent / f"docker/Dockerfile.{kind}"
    assert f"docker build -f deploy/docker/Dockerfile.{kind} -t {images.pop()} ." in dockerfile.read_text()
    assert kuberay.ray_service(variant)["spec"]["rayClusterConfig"]["rayVersion"] in constraints()["ray"]


def constraints() -> dict[str, str]:
    text = (Path(__file__).parents[3] / "constraints.txt").read_text()
    return dict(line.split("==") for line in text.splitlines() if "==" in line)


# ---- figures


@each_variant
def test_the_object_store_has_a_memory_backed_dev_shm(variant: str) -> None:
    for pods in kuberay.ray_pods(variant):
        (volume,) = filter(kuberay.is_memory, pods.spec["volumes"])
        (mount,) = (m for m in pods.container["volumeMounts"] if m["name"] == volume["name"])
        assert mount["mountPath"] == "/dev/shm"
        assert quantity(volume["emptyDir"]["sizeLimit"]) >= int(pods.params["object-store-memory"])


@each_variant
def test_resources_are_guaranteed(variant: str) -> None:
    for _, _, spec in pod_specs(variant):
        for container in spec["containers"]:
            assert container["resources"]["requests"] == container["resources"]["limits"]
            assert {"cpu", "memory"} <= container["resources"]["limits"].keys()


@each_variant
def test_pods_are_given_the_time_that_requests_have(variant: str) -> None:
    config = configuration(variant)
    ends_s = supervisor_deployment(config)._deployment_config.graceful_shutdown_timeout_s
    assert ends_s > config.gateway.drain_s
    spec = kuberay.ray_service(variant)["spec"]
    assert spec["rayClusterDeletionDelaySeconds"] > ends_s
    for pods in kuberay.ray_pods(variant):
        (_, _, script) = pods.container["lifecycle"]["preStop"]["exec"]["command"]
        assert script == f"sleep {SETTLE_S}; alignedserve wait-idle --timeout {config.gateway.drain_s:g}"
        grace_s = pods.spec["terminationGracePeriodSeconds"]
        # Ray uses all of it: our roles are actors that stay, so the node does not become idle.
        drained_s = float(kuberay.environment(variant)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        assert grace_s >= SETTLE_S + config.gateway.drain_s + ASKING_S + drained_s + RAY_ENDS_S
        assert grace_s > ends_s


@each_variant
def test_a_gateway_whose_node_is_drained_has_its_time_to_end(variant: str) -> None:
    (application,) = kuberay.serve_config(variant)["applications"]
    ends_s = build(dict(application["args"]))._bound_deployment._deployment_config.graceful_shutdown_timeout_s
    drained_s = float(kuberay.environment(variant)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
    assert ends_s > configuration(variant).gateway.drain_s
    assert drained_s >= DRAIN_STARTS_S + ends_s


@each_variant
def test_the_disruption_budget_leaves_the_cluster_serving(variant: str) -> None:
    (budget,) = of_kind(kuberay.manifests(variant), "PodDisruptionBudget")
    count = sum(pods.count for pods in workers(variant))
    assert budget["spec"]["minAvailable"] == max(1, count - 1)
    assert "maxUnavailable" not in budget["spec"]  # Kubernetes cannot count pods of an owner without a scale
    labels = budget["spec"]["selector"]["matchLabels"]
    assert [pods for pods in kuberay.ray_pods(variant) if selected(labels, pods.labels)] == workers(variant)


# ---- security


@each_variant
def test_nothing_runs_as_root_or_may_become_it(variant: str) -> None:
    for name, _, spec in pod_specs(variant):
        pod = spec["securityContext"]
        assert pod["runAsNonRoot"] is True, name
        assert pod["runAsUser"] > 0
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
    (namespace,) = of_kind(kuberay.manifests(variant), "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


@each_variant
def test_ray_asks_for_a_token_clients_for_a_key_and_no_secret_is_in_a_file(variant: str) -> None:
    cluster = kuberay.ray_service(variant)["spec"]["rayClusterConfig"]
    assert cluster["authOptions"]["mode"] == "token"
    assert configuration(variant).gateway.api_key_file
    assert not of_kind(kuberay.manifests(variant), "Secret")


@each_variant
def test_pods_have_the_user_of_the_image_and_write_only_where_something_is_mounted(variant: str) -> None:
    dockerfiles = [path.read_text() for path in (kuberay.FOLDER.parent / "docker").glob("Dockerfile.*")]
    for pods in kuberay.ray_pods(variant):
        context = pods.spec["securityContext"]
        user = f"{context['runAsUser']}:{context['runAsGroup']}"
        assert all(f"\nUSER {user}\n" in text for text in dockerfiles)
        written = {m["mountPath"] for m in pods.container["volumeMounts"] if not m.get("readOnly")}
        assert written == {"/dev/shm", "/tmp", "/home/alignedserve"}


# ---- the application


@each_variant
def test_serve_takes_the_configuration_and_finds_what_it_names(variant: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(kuberay.serve_config(variant))
    (application,) = schema.applications
    built = build(dict(application.args))
    names: set[str] = set()

    def walk(node: Any) -> None:
        names.add(node._bound_deployment.name)
        for argument in node._bound_deployment.init_args:
            if hasattr(argument, "_bound_deployment"):
                walk(argument)

    walk(built)
    assert {deployment.name for deployment in application.deployments} == names == {"Gateway", "Supervisor"}


@each_variant
def test_instances_find_their_gpus_and_resources_and_no_role_is_on_the_head(variant: str) -> None:
    config = configuration(variant).cluster
    total: dict[str, float] = {}
    for pods in workers(variant):
        for name, amount in pods.resources.items():
            total[name] = total.get(name, 0.0) + pods.count * amount
    if config.device == "cuda":
        ranks = {role: configuration(variant).degrees(role).ranks for role in ("prefill", "decode")}
        assert total["GPU"] == config.prefill * ranks["prefill"] + config.decode * ranks["decode"]
    for role, count in (("prefill", config.prefill), ("decode", config.decode)):
        key = f"{role}_resources"
        for name, amount in parse_resources(getattr(config, key), key).items():
            assert count * amount <= total[name]
    (head,) = (pods for pods in kuberay.ray_pods(variant) if pods.is_head)
    assert head.resources == ({"CPU": 0.0, "GPU": 0.0} if config.device == "cuda" else {"CPU": 0.0})
    (application,) = kuberay.serve_config(variant)["applications"]
    assert all(entry["ray_actor_options"]["num_cpus"] > 0 for entry in application["deployments"])


@each_variant
def test_a_shell_and_kuberay_read_the_same_resources(variant: str) -> None:
    for pods in kuberay.ray_pods(variant):
        if "resources" in pods.params:
            (word,) = shlex.split(pods.params["resources"])
            assert json.loads(word) == json.loads(pods.params["resources"].strip("\"'` "))


@each_variant
def test_a_pod_without_gpus_announces_none_though_its_image_could_see_the_nodes(variant: str) -> None:
    for pods in kuberay.ray_pods(variant):
        if pods.container["image"].endswith("-cuda") and "nvidia.com/gpu" not in pods.container["resources"]["limits"]:
            assert pods.params["num-gpus"] == "0"
            # Where NVIDIA's runtime is the default, the image's own "all" would expose every GPU of the node.
            assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in pods.container["env"]


@each_variant
def test_every_worker_has_a_gateway_and_so_a_proxy(variant: str) -> None:
    """A worker without it is not ready: KubeRay's service would send clients to a port without a listener."""
    assert configuration(variant).gateway.replicas == sum(pods.count for pods in workers(variant))
    assert kuberay.serve_config(variant)["proxy_location"] == "EveryNode"
    (application,) = kuberay.serve_config(variant)["applications"]
    (gateway,) = (entry for entry in application["deployments"] if entry["name"] == "Gateway")
    if configuration(variant).gateway.replicas == 1:
        assert gateway["max_replicas_per_node"] == 2  # during an update, the new gateway is up before the old one ends
    else:  # two on the first worker would leave another without one; and an update has no room for more
        assert (gateway["max_replicas_per_node"], gateway["max_surge_percent"]) == (1, 0)
