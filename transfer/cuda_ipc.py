"""Device memory of one process, opened in another of its node, with torch's mechanism for sharing CUDA tensors.

Imports torch. The opening process reads and writes on its own: the owner takes no part in a copy, and may end before it
does. Torch counts one opener for each handle, and ours may have several; the first to close would let the owner free
memory that the others still have open. So exported memory stays allocated until its process ends; then the driver keeps
it while any process has it open.

Not yet run on a GPU: the tests that do are marked `gpu`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from alignedserve.errors import TransferError

_cuda: Any = torch.cuda  # most of it is untyped


_exported: list[torch.Tensor] = []


def export_memory(tensor: torch.Tensor) -> bytes:
    """A CUDA IPC handle of a device tensor, which is never freed again in this process.

    Raises TransferError if its memory cannot be shared: only memory that the driver allocated as one piece can be.
    """
    _require_plain(tensor, torch.cuda.memory_snapshot())
    storage: Any = tensor.untyped_storage()
    try:
        fields = storage._share_cuda_()
    except RuntimeError as error:
        raise TransferError(f"memory on {tensor.device} cannot be shared with other processes: {error}") from error
    _exported.append(tensor)
    text = [field.hex() if isinstance(field, bytes) else field for field in fields[1:]]
    uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
    return json.dumps([uuid, tensor.storage_offset() * tensor.element_size(), tensor.nbytes, *text]).encode()


def _require_plain(tensor: torch.Tensor, segments: Sequence[Mapping[str, Any]]) -> None:
    """Raises TransferError if `tensor` is in an expandable one of the allocator's `segments`."""
    address = tensor.data_ptr()
    for segment in segments:
        begin = segment["address"]
        if begin <= address < begin + segment["total_size"] and segment.get("is_expandable"):
            raise TransferError(
                f"memory on {tensor.device} is in an expandable segment of torch's allocator, which cannot be opened "
                "by CUDA IPC: remove expandable_segments from PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF"
            )


def open_memory(handle: bytes) -> torch.Tensor:
    """The bytes behind `export_memory`, uint8.

    Raises TransferError if this process cannot see the device, or the owner has ended and invalidated the handle.
    """
    uuid, offset, size, ipc, storage_bytes, storage_offset, counter, counter_offset, event, sync = json.loads(handle)
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            break
    else:
        raise TransferError(f"the GPU {uuid} of a shared store is not visible to this process")
    _cuda.init()
    storage_class: Any = torch.UntypedStorage
    try:
        storage = storage_class._new_shared_cuda(
            index,
            bytes.fromhex(ipc),
            storage_bytes,
            storage_offset,
            bytes.fromhex(counter),
            counter_offset,
            bytes.fromhex(event),
            sync,
        )
    except RuntimeError as error:
        raise TransferError(f"device memory of another process could not be opened: {error}") from error
    whole: Any = torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}")
    opened: torch.Tensor = whole.set_(storage, offset, (size,), (1,))
    return opened
