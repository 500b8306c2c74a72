"""The ranks of an instance on one machine's CPUs (Gloo), and what they compute over all of them."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from alignedserve.errors import RankLostError

_dist: Any = dist  # its process groups are untyped


class RankGroup:
    """One end of a group of `size` ranks. Every rank calls the same methods in the same order, from one thread.

    A collective whose peer is gone, or silent for `silent_s`, raises RankLostError: the group is of no use then.
    """

    def __init__(self, store: Store, rank: int, size: int, silent_s: float) -> None:
        """`store`: one that all ranks share; it is only used here. Waits for all ranks."""
        self.rank, self.size = rank, size
        self.waited_s = 0.0  # in collectives
        try:
            options = _dist.ProcessGroupGloo._Options()
            options._timeout, options._threads = timedelta(seconds=silent_s), 1
            options._devices = [_dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            self._group: Any = _dist.ProcessGroupGloo(store, rank, size, options)
        except RuntimeError as error:
            raise RankLostError(f"rank {rank} of {size} could not connect to the others: {error}") from error

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace a contiguous tensor by its sum over all ranks."""
        self._wait(self._group.allreduce([tensor]))
        return tensor

    def from_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill a tensor with what rank 0 passes."""
        self._wait(self._group.broadcast(tensor, 0))
        return tensor

    def concatenated(self, tensor: torch.Tensor) -> torch.Tensor:
        """Tensors of one shape `[..., n]` side by side in the order of ranks: `[..., n * size]`."""
        if not tensor.numel():  # on each rank
            return tensor.new_empty((*tensor.shape[:-1], tensor.shape[-1] * self.size))
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self._wait(self._group.allgather([parts], [tensor.contiguous()]))
        return torch.cat(parts, dim=-1)

    def _wait(self, work: Any) -> None:
        begun_s = time.perf_counter()
        try:
            work.wait()
            self.waited_s += time.perf_counter() - begun_s
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise RankLostError(f"rank {self.rank} of {self.size} has lost another rank: {reason}") from error
