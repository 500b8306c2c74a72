"""Ranks that have a GPU each: what they compute over all of them there, by NCCL.

Not yet run on GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from alignedserve.engine.parallel.group import RankGroup
from alignedserve.errors import RankLostError
from alignedserve.transfer.paired.addresses import GroupStore

_dist: Any = dist  # its process groups are untyped


class DeviceGroup(RankGroup):
    """Tensors on the GPU are summed, gathered and exchanged in the order of the device's work, without waiting for it.

    If a rank is lost, the others' devices wait for it. Their instance notices (`RankProcesses.trouble`), and ends.
    """

    def __init__(
        self, store: GroupStore, nccl: Store, rank: int, size: int, silent_s: float, device: torch.device
    ) -> None:
        """`nccl`: a store that lives as long as the group."""
        super().__init__(store, rank, size, silent_s)
        self._device, self.waited_s = device, math.nan
        self.idle_s["experts"] = math.nan  # devices wait for results, and the host does not know for how long
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=silent_s)
        try:
            with torch.cuda.device(device):
                self._nccl: Any = _dist.ProcessGroupNCCL(nccl, rank, size, options)
        except RuntimeError as error:
            raise RankLostError(f"rank {rank} of {size} could not connect to the others by NCCL: {error}") from error

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cuda or self.size == 1:
            return super().sum(tensor)
        self._by_nccl(lambda: self._nccl.allreduce([tensor]))
        return tensor

    @property
    def in_graphs(self) -> bool:
        return True

    def spread(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cuda or self.size == 1:
            return super().spread(tensor)
        options = _dist.BroadcastOptions()
        options.rootRank = 0
        self._by_nccl(lambda: self._nccl.broadcast([tensor], options))
        return tensor

    def concatenated(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cuda or self.size == 1 or not tensor.numel():
            return super().concatenated(tensor)
        own = tensor.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        self._by_nccl(lambda: self._nccl.allgather([parts], [own]))
        return torch.cat(parts, dim=-1)

    def exchanged(self, rows: torch.Tensor, sizes: Sequence[int], expected: Sequence[int]) -> torch.Tensor:
        if not rows.is_cuda or self.size == 1:
            return super().exchanged(rows, sizes, expected)
        given, taken = rows.contiguous(), rows.new_empty((sum(expected), *rows.shape[1:]))
        options = _dist.AllToAllOptions()
        self._by_nccl(lambda: self._nccl.alltoall_base(taken, given, list(expected), list(sizes), options))
        return taken

    def _by_nccl(self, begin: Callable[[], Any]) -> None:
        """In the order of the device's work. Other errors than NCCL's are not about other ranks."""
        try:
            with torch.cuda.device(self._device):
                begin().wait()
        except dist.DistBackendError as error:
            raise RankLostError(f"rank {self.rank} of {self.size} has lost another rank: {error}") from error
