"""Device memory of one process, opened in another of its node: what torch shares CUDA tensors by. Imports torch.

Not yet run on a GPU: the tests that do are marked `gpu`.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from alignedserve.errors import TransferError

_cuda: Any = torch.cuda  # most of it has no types


def export_memory(tensor: torch.Tensor) -> bytes:
    """A CUDA IPC handle of a device tensor. Its memory must stay allocated for as long as anybody has it open."""
    storage: Any = tensor.untyped_storage()
    fields = storage._share_cuda_()
    text = [field.hex() if isinstance(field, bytes) else field for field in fields[1:]]
    uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
    return json.dumps([uuid, tensor.storage_offset() * tensor.element_size(), tensor.nbytes, *text]).encode()


def open_memory(handle: bytes) -> torch.Tensor:
    """The bytes behind `export_memory`, uint8. Raises TransferError where this process cannot see the device."""
    uuid, offset, size, ipc, storage_bytes, storage_offset, counter, counter_offset, event, sync = json.loads(handle)
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            break
    else:
        raise TransferError(f"the GPU {uuid} of a shared store is not visible to this process")
    _cuda.init()
    storage_class: Any = torch.UntypedStorage
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
    whole: Any = torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}")
    opened: torch.Tensor = whole.set_(storage, offset, (size,), (1,))
    return opened
