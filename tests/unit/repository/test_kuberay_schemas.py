"""Every manifest fits the schema of its kind, and unknown fields are errors.

Kubernetes itself silently drops unknown fields of custom resources, so a misspelt field would have no effect.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from support import kuberay
from support.kuberay import Manifest
from support.requirements import needs

SCHEMAS = Path(os.environ.get("ALIGNEDSERVE_SCHEMAS", Path(__file__).parents[4] / "shared/schemas"))
DEFINITION = SCHEMAS / "ray.io_rayservices.yaml"
KUBERNETES = "1.32"
OPEN = ("additionalProperties", "x-kubernetes-preserve-unknown-fields", "x-kubernetes-embedded-resource")
needs_definition = needs("" if DEFINITION.is_file() else f"there is no {DEFINITION} (ALIGNEDSERVE_SCHEMAS)")
each_variant = pytest.mark.parametrize("variant", kuberay.VARIANTS)

# The fields of the Prometheus operator's resources that are used here.
MONITORS: dict[str, dict[str, set[str]]] = {
    "ServiceMonitor": {"spec": {"selector", "endpoints"}, "endpoints": {"port", "path", "interval", "honorLabels"}},
    "PodMonitor": {
        "spec": {"selector", "podMetricsEndpoints"},
        "podMetricsEndpoints": {"port", "path", "interval", "honorLabels"},
    },
}


@functools.cache
def ray_service_schema() -> dict[str, Any]:
    """The definition as a JSON schema that allows no undeclared properties."""
    definition = yaml.load(DEFINITION.read_text(encoding="utf-8"), yaml.CSafeLoader)
    (version,) = (v for v in definition["spec"]["versions"] if v["name"] == "v1")
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    close(schema)
    return schema


def close(node: Any) -> None:
    if isinstance(node, list):
        for entry in node:
            close(entry)
    elif isinstance(node, dict):
        if isinstance(node.get("properties"), dict) and not any(key in node for key in OPEN):
            node["additionalProperties"] = False
            node.setdefault("type", "object")
        for value in list(node.values()):
            close(value)


def problems(manifest: Manifest) -> list[str]:
    validator = jsonschema.Draft202012Validator(ray_service_schema())
    found = [f"{error.json_path}: {error.message[:200]}" for error in validator.iter_errors(manifest)]
    return found + list(doubles(manifest, ray_service_schema(), "$"))


def doubles(value: Any, schema: Any, where: str) -> Iterator[str]:
    """Duplicate keys in lists that are maps (x-kubernetes-list-type), which an API server refuses."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from doubles(inner, schema.get("properties", {}).get(key, {}), f"{where}.{key}")
    elif isinstance(value, list):
        keys = schema.get("x-kubernetes-list-map-keys", [])
        seen: set[tuple[str, ...]] = set()
        for entry in value:
            mark = tuple(str(entry.get(key)) for key in keys) if keys else ()
            if keys and mark in seen:
                yield f"{where}: {mark} is there twice"
            seen.add(mark)
            yield from doubles(entry, schema.get("items", {}), f"{where}[]")


@needs_definition
@each_variant
def test_the_ray_service_fits_kuberays_definition(variant: str) -> None:
    manifest = kuberay.ray_service(variant)
    assert manifest["apiVersion"] == "ray.io/v1"
    assert problems(manifest) == []


@needs_definition
@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("spec", "serveConfigv2"), "", "serveConfigv2"),
        (("spec", "rayClusterConfig", "authOptions", "mode"), "tokens", "tokens"),
        (
            ("spec", "rayClusterConfig", "headGroupSpec", "template", "spec", "terminationGracePeriodSecond"),
            3,
            "Second",
        ),
        (("spec", "rayClusterConfig", "headGroupSpec", "rayStartParams", "num-cpus"), 0, "0 is not of type 'string'"),
        (("spec", "rayClusterDeletionDelaySeconds"), -1, "less than the minimum"),
    ],
)
def test_what_is_wrong_is_found(path: tuple[str, ...], value: Any, said: str) -> None:
    manifest = copy.deepcopy(kuberay.ray_service("cpu"))
    node = manifest
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    (problem,) = problems(manifest)
    assert said in problem


@needs_definition
def test_a_name_that_is_there_twice_is_found() -> None:
    manifest = copy.deepcopy(kuberay.ray_service("cpu"))
    spec = manifest["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    spec["volumes"].append(spec["volumes"][0])
    assert problems(manifest) == [
        "$.spec.rayClusterConfig.headGroupSpec.template.spec.volumes: ('shm',) is there twice"
    ]


@each_variant
def test_the_other_objects_fit_kubernetes_own_schemas(variant: str) -> None:
    others = [manifest for manifest in kuberay.manifests(variant) if manifest["kind"] != "RayService"]
    assert len(others) > 8
    for manifest in others:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    broken = copy.deepcopy(next(entry for entry in others if entry["kind"] == "PodDisruptionBudget"))
    broken["spec"]["minAvailables"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="minAvailables"):
        kubernetes_validate.validate(broken, KUBERNETES, strict=True)


def test_the_monitors_have_the_fields_that_the_prometheus_operator_knows() -> None:
    found = kuberay.manifests("monitoring")
    assert {manifest["kind"] for manifest in found} == MONITORS.keys()
    for manifest in found:
        assert manifest["apiVersion"] == "monitoring.coreos.com/v1"
        allowed = dict(MONITORS[manifest["kind"]])
        spec = manifest["spec"]
        assert spec.keys() == allowed.pop("spec")
        assert spec["selector"].keys() == {"matchLabels"}
        for name, fields in allowed.items():
            assert all(entry.keys() <= fields for entry in spec[name])


@each_variant
def test_kustomizations_have_the_fields_that_kustomize_knows(variant: str) -> None:
    known = {"apiVersion", "kind", "namespace", "resources", "components", "patches"}
    for name in (variant, "base", "monitoring"):
        found = kuberay.kustomization(name)
        assert found.keys() <= known
        for patch in found.get("patches", ()):
            assert patch.keys() == {"target", "patch"}
            assert patch["target"].keys() == {"kind", "name"}
        assert found["kind"] == "Kustomization"
    assert kuberay.kustomization("images").keys() == {"apiVersion", "kind", "images", "configurations"}
