"""The manifests of deploy/kuberay as objects, read like kustomize."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "deploy/kuberay"
VARIANTS = ("cpu", "gpu-node", "gpu-nodes", "gpu-ranks")
Manifest = dict[str, Any]

_UNITS = {"": 1.0, "m": 1e-3, **{f"{u}i": 1024.0 ** (n + 1) for n, u in enumerate("KMGT")}}


def manifests(name: str) -> list[Manifest]:
    """All objects of a folder with a kustomization; those of the folders that it names come first."""
    found = [document for file in files(name) for document in _documents(file)]
    for patch in kustomization(name).get("patches", ()):
        (patched,) = (
            entry
            for entry in found
            if (entry["kind"], entry["metadata"]["name"]) == (patch["target"]["kind"], patch["target"]["name"])
        )
        for change in yaml.load(patch["patch"], yaml.CSafeLoader):
            _replace(patched, change)
    return found


def _replace(manifest: Any, change: Manifest) -> None:
    """Apply a JSON patch (RFC 6902) that replaces a value."""
    assert change["op"] == "replace"
    *way, last = change["path"].lstrip("/").split("/")
    for step in way:
        manifest = manifest[int(step) if isinstance(manifest, list) else step]
    assert last in manifest, change["path"]
    manifest[last] = change["value"]


def files(name: str) -> list[Path]:
    """The files that the kustomization of a folder applies."""
    folder = (FOLDER / name).resolve()
    found: list[Path] = []
    for entry in kustomization(name)["resources"]:
        place = folder / entry
        found += files(str(place.resolve().relative_to(FOLDER.resolve()))) if place.is_dir() else [place]
    return found


def kustomization(name: str) -> Manifest:
    (found,) = _documents(FOLDER / name / "kustomization.yaml")
    return found


def _documents(file: Path) -> list[Manifest]:
    """The loader in C takes a tenth of the time."""
    return [document for document in yaml.load_all(file.read_text(encoding="utf-8"), yaml.CSafeLoader) if document]


def of_kind(found: list[Manifest], kind: str) -> list[Manifest]:
    return [entry for entry in found if entry["kind"] == kind]


def ray_service(name: str) -> Manifest:
    (found,) = of_kind(manifests(name), "RayService")
    return found


def serve_config(name: str) -> dict[str, Any]:
    """The Serve configuration in the RayService, parsed."""
    found: dict[str, Any] = yaml.load(ray_service(name)["spec"]["serveConfigV2"], yaml.CSafeLoader)
    return found


def environment(name: str) -> dict[str, str]:
    """The environment of every Ray container that comes from the ConfigMap."""
    (found,) = [
        entry for entry in of_kind(manifests(name), "ConfigMap") if entry["metadata"]["name"] == "alignedserve-ray"
    ]
    return dict(found["data"])


def environment_here(name: str) -> dict[str, str]:
    """The same, with this machine's HAProxy instead of that of the image."""
    return environment(name) | {
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(Path(sys.executable).with_name("alignedserve-haproxy"))
    }


@dataclass(frozen=True, slots=True)
class RayPods:
    """A group of `count` equal pods. `params`: the parameters of `ray start`."""

    group: str
    count: int
    params: Mapping[str, str]
    metadata: Manifest
    spec: Manifest

    @property
    def is_head(self) -> bool:
        return self.group == "head"

    @property
    def container(self) -> Manifest:
        """The Ray container. KubeRay takes the first one."""
        container: Manifest = self.spec["containers"][0]
        return container

    @property
    def memory_bytes(self) -> int:
        return quantity(self.container["resources"]["limits"]["memory"])

    @property
    def labels(self) -> dict[str, str]:
        """Its own labels, and those from KubeRay that our selectors may use."""
        kind = "head" if self.is_head else "worker"
        own: dict[str, str] = self.metadata["labels"]
        return {"ray.io/node-type": kind, "ray.io/is-ray-node": "yes"} | own

    @property
    def resources(self) -> dict[str, float]:
        """Ray's of one pod, as KubeRay derives them. Without "GPU", Ray counts the GPUs that the container sees."""
        limits = self.container["resources"]["limits"]
        # KubeRay strips quotes and then reads JSON. If that fails, it logs an error and passes on no GPUs.
        own = json.loads(self.params["resources"].strip("\"'` ")) if "resources" in self.params else {}
        found = {"CPU": float(self.params.get("num-cpus", quantity(limits["cpu"])))}
        gpus = self.params.get("num-gpus", limits.get("nvidia.com/gpu"))
        if gpus is not None:
            found["GPU"] = float(gpus)
        return found | own


def ray_pods(name: str) -> list[RayPods]:
    """The head, and every group of workers."""
    cluster = ray_service(name)["spec"]["rayClusterConfig"]
    head = cluster["headGroupSpec"]
    found = [_pods("head", 1, head)]
    found += [_pods(group["groupName"], group["replicas"], group) for group in cluster["workerGroupSpecs"]]
    return found


def _pods(group: str, count: int, spec: Manifest) -> RayPods:
    template = spec["template"]
    return RayPods(group, count, spec["rayStartParams"], template["metadata"], template["spec"])


def is_memory(volume: Manifest) -> bool:
    return bool(volume.get("emptyDir", {}).get("medium") == "Memory")


def quantity(text: str | float) -> int:
    """The value of a Kubernetes quantity such as "4Gi" or "250m", rounded up."""
    match = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", str(text))
    assert match is not None, text
    return -int(-float(match[1]) * _UNITS[match[2]] // 1)


def on_this_machine(name: str, api_key_file: Path) -> dict[str, Any]:
    """The Serve configuration, adapted by rules to a machine without GPUs and without other nodes.

    If it is for GPUs, there are one prefill instance and one decode instance on CPUs, with the shipped model and a pool
    of half a GiB, and one gateway. A mounted Secret is replaced by another file. Everything else stays.
    """
    config = copy.deepcopy(serve_config(name))
    for application in config["applications"]:
        args = application["args"]
        args["gateway"]["api_key_file"] = str(api_key_file)
        if args["cluster"]["device"] == "cuda":
            args["model"]["path"] = "tiny"
            args["cluster"] |= {"device": "cpu", "prefill": 1, "decode": 1}
            args["kv_pool"]["size_gib"] = 0.5
            args["gateway"]["replicas"] = 1
    return config


def selected(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a label selector without expressions matches these labels."""
    return all(labels.get(key) == value for key, value in selector.items())


def strings(value: Any) -> Iterator[str]:
    """All strings in an object, at any depth."""
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from strings(inner)
