"""Rates of copies of KV blocks on this machine."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import permutations

import torch

from alignedserve.errors import TransferError
from alignedserve.geometry import KvGeometry
from alignedserve.transfer.block_store import BlockStore, HostBlockStore
from alignedserve.transfer.channel import Channel
from alignedserve.transfer.device import DeviceBlockStore
from alignedserve.transfer.host_channel import HostChannel
from alignedserve.transfer.links import connect

SEVERAL = 128  # blocks of the larger copy
SEVERAL_BYTES = 256 << 20  # of it, at most
REPEATED = 30
PINNED_S = 60.0  # for page-locking a store in host memory


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """The rates of scattered blocks over one channel. `latency_s`: before the first byte."""

    source: str
    destination: str
    channel: str
    bandwidth: float  # bytes a second
    latency_s: float

    def to_dict(self) -> dict[str, str | float]:
        return {**asdict(self), "bandwidth": round(self.bandwidth), "latency_s": round(self.latency_s, 9)}


def host_copies(geometry: KvGeometry) -> tuple[float, float]:
    """Scattered blocks over the channel between host stores: bytes a second, and seconds before the first byte.

    From the straight line through the medians of a copy of one block and one of several, taken in turn.
    """
    stores = [HostBlockStore.private(name, geometry, 4 * SEVERAL) for name in ("profile-a", "profile-b")]
    channel = HostChannel(*stores)
    try:
        return _scattered(channel, SEVERAL)
    finally:
        channel.close()
        for store in stores:
            store.close()


def device_copies(geometry: KvGeometry, devices: Sequence[torch.device]) -> list[LinkFigures]:
    """Rates between page-locked host memory and the first of `devices`, within it, and between each two devices.

    Each uses the channel that the cluster takes for such stores. The copy between two devices without access to each
    other's memory goes through the host.
    """
    several = max(2, min(SEVERAL, SEVERAL_BYTES // geometry.block_bytes))
    here = [DeviceBlockStore(str(device), geometry, _noise(geometry, 4 * several, device)) for device in devices]
    host = HostBlockStore.private("pool", geometry, 4 * several)
    beside = DeviceBlockStore(f"{devices[0]} too", geometry, _noise(geometry, 4 * several, devices[0]))
    pairs: list[tuple[BlockStore, BlockStore]] = [(host, here[0]), (here[0], host), (here[0], beside)]
    pairs += permutations(here, 2)
    found = []
    for source, destination in pairs:
        channel = connect(source, destination, allow_slow=host not in (source, destination))
        try:
            _wait_pinned(channel)
            bandwidth, latency_s = _scattered(channel, several)
        finally:
            channel.close()
        found.append(LinkFigures(source.store_id, destination.store_id, channel.name, bandwidth, latency_s))
    for store in (host, beside, *here):
        store.close()
    return found


def _noise(geometry: KvGeometry, blocks: int, device: torch.device) -> torch.Tensor:
    return torch.randint(256, (blocks, geometry.block_bytes), dtype=torch.uint8, device=device)


def _wait_pinned(channel: Channel) -> None:
    """Wait until the store's memory is page-locked: until then copies take another way.

    Raises the reason if it cannot be.
    """
    deadline = time.monotonic() + PINNED_S
    while (locked := channel.page_locked()) is not None and locked.locked_bytes < locked.total_bytes:
        trouble = channel.trouble()
        if trouble is not None or time.monotonic() > deadline:
            raise trouble or TransferError(f"store {locked.store_id} was not page-locked within {PINNED_S:g} s")
        time.sleep(0.01)


def _scattered(channel: Channel, several: int) -> tuple[float, float]:
    """Bytes a second, and seconds before the first byte, between stores of `4 * several` blocks, by a line fit."""
    draw = random.Random(0)
    seconds: dict[int, list[float]] = {1: [], several: []}
    for _ in range(REPEATED):
        for count, taken in seconds.items():
            source, destination = (draw.sample(range(4 * several), count) for _ in range(2))
            begun = time.perf_counter()
            channel.copy(source, destination).wait()
            taken.append(time.perf_counter() - begun)
    one_s, several_s = (statistics.median(taken) for taken in seconds.values())
    block_s = max(1e-9, (several_s - one_s) / (several - 1))
    return channel.source.geometry.block_bytes / block_s, max(0.0, one_s - block_s)
