"""What NVML says of GPUs' links, through a library in its place."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from alignedserve.cluster.cli import doctor_channels
from alignedserve.cluster.cli.doctor_channels import examine_channels
from alignedserve.cluster.launch import gpus
from alignedserve.cluster.launch.gpus import UNKNOWN, GpuLinks, device_with_neighbours, places_of
from alignedserve.config_sources import from_tree
from alignedserve.ranks.neighbours import NVLINK

ERROR = 3  # NVML_ERROR_NOT_SUPPORTED


class Nvml:
    """Four GPUs, in pairs with bridges: 0 and 3, 1 and 2. Handles are numbers from 1 on."""

    PAIRS = ({0, 3}, {1, 2})

    def __init__(self, status: int = 0, topology: int = 0) -> None:
        self._status, self._topology = status, topology

    def nvmlInit_v2(self) -> int:
        return self._status

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, handle: Any) -> int:
        return self._give(index.value, handle)

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
        return self._give(int(name.removeprefix(b"GPU-")), handle) if name.startswith(b"GPU-") else ERROR

    def nvmlDeviceGetP2PStatus(self, one: Any, other: Any, kind: int, found: Any) -> int:
        assert kind == 2
        found._obj.value = 0 if {one.value - 1, other.value - 1} in self.PAIRS else 5
        return 0

    def nvmlDeviceGetTopologyCommonAncestor(self, one: Any, other: Any, found: Any) -> int:
        found._obj.value = 40
        return self._topology

    @staticmethod
    def _give(index: int, handle: Any) -> int:
        if index > 3:
            return ERROR
        handle._obj.value = index + 1
        return 0


def test_distances_are_those_of_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    links = GpuLinks(Nvml())
    assert links.distance("0", "3") == NVLINK
    assert links.distance("0", "1") == 40
    assert links.distance("0", "4") == UNKNOWN
    assert GpuLinks(Nvml(topology=ERROR)).distance("0", "1") == UNKNOWN


def test_numbers_are_those_of_the_visible_gpus() -> None:
    assert GpuLinks(Nvml(), visible="1, 2").distance("0", "1") == NVLINK
    assert GpuLinks(Nvml(), visible="GPU-3,GPU-0").distance("0", "1") == NVLINK
    assert GpuLinks(Nvml(), visible="1,2").distance("0", "2") == UNKNOWN
    assert GpuLinks(Nvml(), visible="MIG-7,1").distance("0", "1") == UNKNOWN


def test_nvml_that_does_not_work_is_an_error() -> None:
    with pytest.raises(OSError, match="NVML does not work: 3"):
        GpuLinks(Nvml(status=ERROR))


def test_the_ranks_of_an_instance_are_put_beside_their_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus.ctypes, "CDLL", lambda name: Nvml())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert device_with_neighbours([0, 1, 2, 3], 2) == "cuda:0,3,1,2"
    assert device_with_neighbours(["2", "0", "3", "1"], 2) == "cuda:2,1,0,3"
    assert device_with_neighbours([0, 1, 2, 3], 1) == "cuda:0,1,2,3"
    assert device_with_neighbours([1, 0], 2) == "cuda:1,0"


def test_without_nvml_the_order_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(gpus.ctypes, "CDLL", missing)
    assert device_with_neighbours([2, 3, 0, 1], 2) == "cuda:2,3,0,1"


def test_the_doctor_says_which_ranks_are_no_neighbours_though_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus.ctypes, "CDLL", lambda name: Nvml())
    monkeypatch.setattr(doctor_channels, "_measure", lambda channel, ours, theirs, problems: ("1", "2"))
    monkeypatch.setattr(doctor_channels, "count_gpus", lambda: 4)
    monkeypatch.setattr(doctor_channels, "ask_driver", lambda source, destination: False)
    tree = {"cluster": {"device": "cuda", "prefetch": False}, "prefill": {"tensor_parallel": 2}}
    _, rows, _ = examine_channels(from_tree(tree | {"decode": {"pipeline_parallel": 2}}))
    said = {row["source"]: row["reason"] for row in rows if "rank" in row["source"]}
    assert said["prefill-0 rank 0"].startswith(
        "it has 2 ranks; NVLink does not connect cuda:0 and 1, which share layers, but others, such as cuda:0 and 3"
    )
    assert "NVLink" not in said["decode-0 rank 0"]  # its stages pass on through host memory


@pytest.mark.parametrize(
    ("visible", "assigned", "places"),
    [
        (None, [2, 0], ["2", "0"]),
        ("2,3", ["3", "2"], ["1", "0"]),  # as Ray says it where the variable is set
        (" 0, 2 ", ["2"], ["1"]),
        ("GPU-aa,GPU-bb", ["GPU-bb"], ["1"]),
        ("2,3", [0, 1], ["0", "1"]),
    ],
)
def test_gpus_that_ray_assigns_are_numbered_as_cuda_sees_them(
    visible: str | None, assigned: list[int | str], places: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert places_of(assigned) == places
