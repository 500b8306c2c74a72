"""This machine's NVIDIA GPUs without torch: their number, without the driver, and their links, as NVML says.

NVML comes with NVIDIA's driver. Where it is missing or knows nothing of a GPU, nothing is known of links.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alignedserve.ranks.degrees import device_of
from alignedserve.ranks.neighbours import NVLINK, neighbours_together

logger = logging.getLogger(__name__)

LIBRARY = "libnvidia-ml.so.1"
UNKNOWN = 100  # farther than any path that NVML names, which are up to 50 (`nvmlGpuTopologyLevel_t`)
_BY_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK
_OK = 0  # of calls, and NVML_P2P_STATUS_OK


def count_gpus(*, proc: Path = Path("/proc/driver/nvidia/gpus"), dev: Path = Path("/dev")) -> int:
    """Number of GPUs that this process may use. `CUDA_VISIBLE_DEVICES` is respected."""
    present = len(list(proc.iterdir())) if proc.is_dir() else 0
    nodes = sum(1 for entry in dev.glob("nvidia[0-9]*") if entry.name.removeprefix("nvidia").isdigit())
    # A container sees all of the machine's GPUs in /proc, and has device nodes for its own.
    count = min(present, nodes) if present and nodes else nodes
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count
    named = [name for name in visible.split(",") if name.strip()]
    if "-1" in named:
        named = named[: named.index("-1")]
    return min(count, len(named))


class GpuLinks:
    """The distances between GPUs, by the numbers that CUDA has for them in this process."""

    def __init__(self, library: Any | None = None, visible: str | None = None) -> None:
        """`library`: NVML, by default the driver's. `visible`: as in `CUDA_VISIBLE_DEVICES`, by default its value.

        Raises OSError if there is no NVML, or it does not work.
        """
        self._nvml: Any = ctypes.CDLL(LIBRARY) if library is None else library
        if (status := self._nvml.nvmlInit_v2()) != _OK:
            raise OSError(f"NVML does not work: {status}")
        text = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
        self._visible = None if text is None else [name.strip() for name in text.split(",") if name.strip()]

    def distance(self, first: str, second: str) -> int:
        """Of two GPUs, "0" and "1": NVLINK, or NVML's level of the topology. UNKNOWN if NVML does not know."""
        one, other = self._handle(first), self._handle(second)
        if one is None or other is None:
            return UNKNOWN
        found = ctypes.c_int(-1)
        status = self._nvml.nvmlDeviceGetP2PStatus(one, other, _BY_NVLINK, ctypes.byref(found))
        if status == _OK and found.value == _OK:
            return NVLINK
        if self._nvml.nvmlDeviceGetTopologyCommonAncestor(one, other, ctypes.byref(found)) != _OK:
            return UNKNOWN
        return max(NVLINK + 1, found.value)

    def _handle(self, number: str) -> ctypes.c_void_p | None:
        """NVML counts all GPUs of the machine, CUDA those that are visible to the process."""
        name = number
        if self._visible is not None:
            if not number.isdigit() or int(number) >= len(self._visible):
                return None
            name = self._visible[int(number)]
        handle = ctypes.c_void_p()
        if name.isdigit():
            status = self._nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
        else:
            status = self._nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
        return handle if status == _OK else None


def places_of(assigned: Sequence[int | str]) -> list[str]:
    """The numbers that CUDA has in this process for the GPUs that Ray has assigned.

    Of a process with `CUDA_VISIBLE_DEVICES`, Ray gives names from that list, whose places are CUDA's numbers.
    """
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    names = [str(each) for each in assigned]
    return [str(visible.index(name)) for name in names] if set(names) <= set(visible) else names


def device_with_neighbours(assigned: Sequence[int | str], tensor: int) -> str:
    """The `device` of an instance on these GPUs: `tensor` ranks in a row are neighbours. Without NVML they are in the
    order given.
    """
    gpus = [str(number) for number in assigned]
    try:
        ordered = neighbours_together(gpus, tensor, GpuLinks().distance)
    except (OSError, AttributeError) as error:  # an old library may lack a function
        logger.info("the links between GPUs %s are not known: %s", ", ".join(gpus), error)
        ordered = gpus
    return device_of(ordered)
