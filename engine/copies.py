"""What copies of KV blocks reach on the machine at hand."""

from __future__ import annotations

import random
import statistics
import time

import torch

from alignedserve.geometry import KvGeometry
from alignedserve.transfer.block_store import HostBlockStore
from alignedserve.transfer.host_channel import HostChannel

COPIED_BYTES = 64 << 20
SEVERAL = 128  # blocks of the larger copy
REPEATED = 30


def copy_bandwidth(device: torch.device) -> tuple[float, float]:
    """Bytes a second of a copy from host memory to the device, and within the device: the better of some."""
    host = torch.ones(COPIED_BYTES // 4, dtype=torch.float32, pin_memory=device.type == "cuda")
    here = torch.zeros_like(host, device=device)
    there = torch.zeros_like(here)

    def best(source: torch.Tensor) -> float:
        seconds = []
        for _ in range(4):
            begun = time.perf_counter()
            there.copy_(source)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - begun)
        return COPIED_BYTES / min(seconds)

    return best(host), best(here)


def host_copies(geometry: KvGeometry) -> tuple[float, float]:
    """Of scattered blocks over the channel between host stores: bytes a second, and seconds before the first byte.

    Medians of a copy of one block and one of several, in turn; the straight line through both.
    """
    draw = random.Random(0)
    stores = [HostBlockStore.private(name, geometry, 4 * SEVERAL) for name in ("profile-a", "profile-b")]
    channel = HostChannel(*stores)
    seconds: dict[int, list[float]] = {1: [], SEVERAL: []}
    try:
        for _ in range(REPEATED):
            for count, taken in seconds.items():
                source, destination = (draw.sample(range(4 * SEVERAL), count) for _ in stores)
                begun = time.perf_counter()
                channel.copy(source, destination).wait()
                taken.append(time.perf_counter() - begun)
    finally:
        channel.close()
        for store in stores:
            store.close()
    one_s, several_s = (statistics.median(taken) for taken in seconds.values())
    block_s = max(1e-9, (several_s - one_s) / (SEVERAL - 1))
    return geometry.block_bytes / block_s, max(0.0, one_s - block_s)
