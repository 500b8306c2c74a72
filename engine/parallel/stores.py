"""The memory of an instance of several ranks: one store that all share, or one for each rank's layers and KV heads.

The process of rank 0 makes all of it, so that it can copy to and from all parts. The other ranks open their own: on a
CPU by the descriptor of its memory, on a GPU by a CUDA IPC handle.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from alignedserve.engine.runner import allocate_cache
from alignedserve.geometry import KvGeometry, StoreSlice
from alignedserve.transfer.block_store import BlockStore, HostBlockStore
from alignedserve.transfer.cuda_ipc import open_memory
from alignedserve.transfer.device import DeviceBlockStore


@dataclass(slots=True)
class RankStore:
    """The parts of a node's ranks, or one store for all. For each rank: `descriptors` of its memory, or on GPUs
    `handles`. `own`: what the first one has.
    """

    parts: Sequence[BlockStore]
    own: torch.Tensor
    descriptors: list[int]
    handles: list[bytes]

    def close_descriptors(self) -> None:
        """The other ranks have got them."""
        for descriptor in set(self.descriptors):
            os.close(descriptor)


def shared_store(store_id: str, geometry: KvGeometry, blocks: int, node_id: str, ranks: int) -> RankStore:
    """One store that all ranks on a CPU share."""
    store, descriptor = _host_store(store_id, geometry, blocks, node_id, StoreSlice.whole(geometry))
    tensor = allocate_cache(geometry, blocks, "cpu", store.as_memory())
    return RankStore([store], tensor, [descriptor] * ranks, [])


def host_parts(store_id: str, geometry: KvGeometry, blocks: int, node_id: str, held: Sequence[StoreSlice]) -> RankStore:
    """The parts of ranks on a CPU, each of which holds what is `held`."""
    found = [_host_store(f"{store_id}/{n}", geometry, blocks, node_id, part) for n, part in enumerate(held)]
    tensor = allocate_cache(geometry, blocks, "cpu", found[0][0].as_memory(), held[0])
    return RankStore([one for one, _ in found], tensor, [descriptor for _, descriptor in found], [])


def device_parts(
    store_id: str,
    geometry: KvGeometry,
    blocks: int,
    node_id: str,
    held: Sequence[StoreSlice],
    devices: Sequence[str],
    *,
    shared: bool = False,
) -> RankStore:
    """The parts on the ranks' devices. `shared`: other processes may open rank 0's part, too."""
    places = list(zip(devices, held, strict=True))
    tensors = [allocate_cache(geometry, blocks, device, part=part) for device, part in places]
    for device in set(devices) - {"cpu"}:
        torch.cuda.synchronize(device)  # it is cleared before another process opens it
    parts = [
        DeviceBlockStore(
            f"{store_id}/{n}",
            geometry,
            tensor,
            part=part,
            node_id=node_id,
            shared=shared or n > 0,
            computing=devices[0],
        )
        for n, (tensor, part) in enumerate(zip(tensors, held, strict=True))
    ]
    handles = [part.handle().device_handle for part in parts]
    return RankStore(parts, tensors[0], [], handles)


def opened_part(geometry: KvGeometry, blocks: int, part: StoreSlice, handle: bytes) -> torch.Tensor:
    """A part on a GPU in the process of its rank, as `allocate_cache` makes it. Raises TransferError."""
    shape = (blocks, *part.shape, *geometry.block_shape[2:])
    return open_memory(handle).view(getattr(torch, geometry.dtype)).view(shape)


def _host_store(
    store_id: str, geometry: KvGeometry, blocks: int, node_id: str, part: StoreSlice
) -> tuple[HostBlockStore, int]:
    """A store in memory of this process and those that have its descriptor."""
    descriptor = os.memfd_create(store_id)
    try:
        return HostBlockStore.private(
            store_id, geometry, blocks, part=part, node_id=node_id, descriptor=descriptor
        ), descriptor
    except BaseException:
        os.close(descriptor)
        raise
