"""The ranks of an instance, and what they compute over all of them: by Gloo, in host memory."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from alignedserve.engine.parallel.rendezvous import FileValues
from alignedserve.errors import RankLostError, TransferError
from alignedserve.ranks.degrees import RankPlace
from alignedserve.ranks.now import BARRIERS
from alignedserve.transfer.paired.addresses import GroupStore, Values
from alignedserve.transfer.paired.identity import PROOF_BYTES, SECRET_BYTES, check_proof, close_door, proof

logger = logging.getLogger(__name__)

_dist: Any = dist  # its process groups are untyped
BACKLOG = 8
UNSENT_BYTES = 64 << 20
LOOPBACK = "127.0.0.1"
PIPE_SILENT_S = 3600.0  # a stage may compute several large passes before it is heard of
_TAGS = 1 << 20
_HEAD_BYTES = 16
_FRAME_BYTES = 32 << 10  # of what is told in one message: 50 requests of 1,000 tokens


class RankGroup:
    """One end of a group of `size` ranks. For what all compute, every rank calls the same methods in the same order,
    from one thread.

    What waits for a peer that is gone, or silent for `silent_s`, raises RankLostError: the group is of no use then.
    """

    def __init__(
        self, store: GroupStore, rank: int, size: int, silent_s: float, backlog: int = BACKLOG, host: str = LOOPBACK
    ) -> None:
        """`store`: of the group's values; it is only used here. Waits for all ranks, which prove that they share it.

        `backlog`: how many messages may be on the way before `send` waits for the oldest; it also waits
        while those have more than `UNSENT_BYTES`: Gloo keeps a message until it was waited for. `host`: the address of
        this process at which the others reach it.
        """
        self.rank, self.size = rank, size
        self.waited_s = 0.0  # for others
        self.idle_s = dict.fromkeys(BARRIERS, 0.0)  # in which all ranks waited for the last one, as of the layer before
        self._barrier_s = dict.fromkeys(BARRIERS, 0.0)  # of this rank in the last layer
        self._backlog = backlog
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()
        self._unsent_bytes = 0  # of these
        self._sent, self._received = Counter[int](), Counter[int]()  # messages by peer
        try:
            options = _dist.ProcessGroupGloo._Options()
            options._timeout, options._threads = timedelta(seconds=silent_s), 1
            options._devices = [_dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
            self._group: Any = _dist.ProcessGroupGloo(store, rank, size, options)
            if size > 1:
                self._prove(store)
        except (RuntimeError, TransferError) as error:
            raise RankLostError(f"rank {rank} of {size} could not connect to the others: {error}") from error

    def _prove(self, store: GroupStore) -> None:
        """Each rank shows the others that it has a secret of the store (ADR 41). After that it takes no connections.

        Raises TransferError if one cannot.
        """
        if self.rank == 0:
            store.set("secret", secrets.token_bytes(SECRET_BYTES))
        secret = store.get("secret")
        others = [rank for rank in range(self.size) if rank != self.rank]
        # Over the connection of each two, since what all compute does not use all of them.
        coming = [self.receiving(torch.zeros(PROOF_BYTES, dtype=torch.uint8), other) for other in others]
        for other in others:
            own = proof(secret, f"{store.name} to {other}", self.rank)
            self.send(torch.frombuffer(bytearray(own), dtype=torch.uint8), other)
        for other, shown in zip(others, coming, strict=True):
            check_proof(shown().numpy().tobytes(), secret, f"{store.name} to {self.rank}", other)
        if not close_door(store.own):
            logger.warning("the port on which Gloo listens for other ranks (%s) stays open", store.name)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace a contiguous tensor by its sum over all ranks."""
        if self.size > 1:
            host = _in_host_memory(tensor)
            self._wait(lambda: self._group.allreduce([host]))
            if host is not tensor:
                tensor.copy_(host)
        return tensor

    @property
    def in_graphs(self) -> bool:
        """Whether a CUDA graph may hold what all compute."""
        return self.size == 1

    def spread(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace a contiguous tensor by that of the group's first rank."""
        if self.size > 1:
            host = _in_host_memory(tensor)
            options = _dist.BroadcastOptions()
            options.rootRank = 0
            self._wait(lambda: self._group.broadcast([host], options))
            if host is not tensor:
                tensor.copy_(host)
        return tensor

    def tell(self, kind: int, values: torch.Tensor) -> None:
        """Begin to send a number and values, which must not change, to all others, in one message if these fit in it.

        They may be busy: a broadcast would wait.
        """
        told = values.contiguous().view(-1).view(torch.uint8)
        head = torch.tensor([kind, len(told)]).view(torch.uint8)
        frame = torch.cat((head, told[:_FRAME_BYTES], head.new_zeros(max(0, _FRAME_BYTES - len(told)))))
        for rank in range(self.size):
            if rank != self.rank:
                self.send(frame, rank)
                if len(told) > _FRAME_BYTES:
                    self.send(told[_FRAME_BYTES:], rank)

    def told(self) -> tuple[int, torch.Tensor]:
        """The next number and values, as bytes, that rank 0 tells."""
        frame = self.receiving(torch.empty(_HEAD_BYTES + _FRAME_BYTES, dtype=torch.uint8), 0)()
        kind, size = frame[:_HEAD_BYTES].view(torch.int64).tolist()
        values = frame[_HEAD_BYTES:][:size]
        if size > _FRAME_BYTES:
            rest = self.receiving(torch.empty(size - _FRAME_BYTES, dtype=torch.uint8), 0)()
            values = torch.cat((values, rest))
        return kind, values

    def meet(self) -> None:
        """Wait for all ranks."""
        self.sum(torch.zeros(1))

    def concatenated(self, tensor: torch.Tensor) -> torch.Tensor:
        """Tensors of one shape `[..., n]` side by side in the order of ranks: `[..., n * size]`."""
        if self.size == 1:
            return tensor
        if not tensor.numel():  # on each rank
            return tensor.new_empty((*tensor.shape[:-1], tensor.shape[-1] * self.size))
        host = _in_host_memory(tensor).contiguous()
        parts = [torch.empty_like(host) for _ in range(self.size)]
        self._wait(lambda: self._group.allgather([parts], [host]))
        return torch.cat(parts, dim=-1).to(tensor.device)

    def counted(self, sizes: torch.Tensor) -> torch.Tensor:
        """What each rank passes (int64 `[size]`, in host memory), as rows: `[size, size]`. All wait for the last one.

        The last one is here for as long as the exchange itself takes, which is not idle.
        """
        begun_s = time.perf_counter()
        own = torch.cat((sizes, torch.tensor([round(1e6 * before_s) for before_s in self._barrier_s.values()])))
        parts = [torch.empty_like(own) for _ in range(self.size)]
        self._wait(lambda: self._group.allgather([parts], [own]))
        self._barrier_s["attention"] = time.perf_counter() - begun_s
        table = torch.stack(parts)
        for barrier, before in zip(BARRIERS, table[:, self.size :].unbind(1), strict=True):
            self.idle_s[barrier] += float((before - before.min()).sum()) / 1e6
        return table[:, : self.size]

    def returned(self, results: torch.Tensor, sizes: Sequence[int], expected: Sequence[int]) -> torch.Tensor:
        """`exchanged` for what experts computed. Each rank waits for the last one that has results for it."""
        begun_s = time.perf_counter()
        found = self.exchanged(results, sizes, expected)
        self._barrier_s["experts"] = time.perf_counter() - begun_s
        return found

    def exchanged(self, rows: torch.Tensor, sizes: Sequence[int], expected: Sequence[int]) -> torch.Tensor:
        """Give each rank `sizes` of the rows, which are in their order. Returns what they gave this one, in theirs.

        `expected`: how many rows each gives.
        """
        host = _in_host_memory(rows).contiguous()
        given = host.split(list(sizes))
        taken = host.new_empty((sum(expected), *rows.shape[1:]))
        slots = taken.split(list(expected))
        others = [rank for rank in range(self.size) if rank != self.rank]
        coming = [self.receiving(slots[rank], rank) for rank in others if expected[rank]]
        for rank in others:
            if sizes[rank]:
                self.send(given[rank], rank)
        slots[self.rank].copy_(given[self.rank])
        for wait in coming:
            wait()
        return taken.to(rows.device)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Begin to send a contiguous tensor, which must not change, to a rank that receives it."""
        tag, host = self._sent[to] % _TAGS, _in_host_memory(tensor)
        self._sent[to] += 1
        self._begin_sending(lambda: self._group.send([host], to, tag), host)

    def receiving(self, tensor: torch.Tensor, of: int) -> Callable[[], torch.Tensor]:
        """Begin to receive the next message of a rank into a tensor in host memory. What is returned waits for it."""
        tag = self._received[of] % _TAGS
        self._received[of] += 1
        work = self._checked(lambda: self._group.recv([tensor], of, tag))

        def wait() -> torch.Tensor:
            self._wait(lambda: work)
            return tensor

        return wait

    def _begin_sending(self, begin: Callable[[], Any], tensor: torch.Tensor) -> None:
        while len(self._sending) >= self._backlog or self._unsent_bytes > UNSENT_BYTES:
            work, sent = self._sending.popleft()
            self._wait(lambda work=work: work)  # type: ignore[misc]
            self._unsent_bytes -= sent.nbytes
        self._sending.append((self._checked(begin), tensor))
        self._unsent_bytes += tensor.nbytes

    def _wait(self, begin: Callable[[], Any]) -> None:
        begun_s = time.perf_counter()
        self._checked(lambda: begin().wait())
        self.waited_s += time.perf_counter() - begun_s

    def _checked(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise RankLostError(f"rank {self.rank} of {self.size} has lost another rank: {reason}") from error


def _in_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy of one on a device, whose work this waits for."""
    return tensor if tensor.device.type == "cpu" else tensor.cpu()


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of a rank. `waits`: of all ranks, silent for as long as there is nothing to do. `sums`: of its stage.

    `pipe`: of all ranks, between stages or for experts; None without them.
    """

    waits: RankGroup
    sums: RankGroup
    pipe: RankGroup | None

    @classmethod
    def connected(
        cls,
        values: FileValues,
        place: RankPlace,
        idle_s: float,
        silent_s: float,
        own_device: torch.device | None = None,
        of_all: Values | None = None,
        host: str = LOOPBACK,
        connect_s: float | None = None,
    ) -> Groups:
        """Waits for all ranks. `values`: of the ranks of this node; `of_all`: of all, if there are some on other nodes.
        `idle_s`: how long there may be nothing to do. `own_device`: a GPU of this rank alone, if each rank has one.
        `host`: see `RankGroup`. `connect_s`: how long to wait for the others to connect, by default `silent_s`.
        """
        within_s = connect_s or silent_s
        rank, degrees = place.rank, place.degrees
        shared = of_all or values
        told = 2 * degrees.ranks * (degrees.stages + 1)  # two messages at most to each rank for each pass under way
        of_waits = GroupStore(shared, "waits", within_s)
        waits = RankGroup(of_waits, rank, degrees.ranks, idle_s, max(BACKLOG, told), host)
        of_stage = GroupStore(values, f"sums{rank // degrees.tensor}", within_s)
        if own_device is None or degrees.tensor == 1:
            sums = RankGroup(of_stage, place.part, degrees.tensor, silent_s)
        else:
            from alignedserve.engine.parallel.device_group import DeviceGroup  # NCCL comes with torch for CUDA alone

            nccl = _dist.PrefixStore(f"nccl{rank // degrees.tensor}", values.store)
            sums = DeviceGroup(of_stage, nccl, place.part, degrees.tensor, silent_s, own_device)
        several = degrees.stages * degrees.experts > 1
        if not several:
            return cls(waits, sums, None)
        long_s, most = max(silent_s, PIPE_SILENT_S), max(BACKLOG, degrees.stages + 1)
        of_pipe = GroupStore(shared, "pipe", within_s)
        if own_device is None or degrees.experts == 1:
            return cls(waits, sums, RankGroup(of_pipe, rank, degrees.ranks, long_s, most, host))
        from alignedserve.engine.parallel.device_group import DeviceGroup

        nccl = _dist.PrefixStore("nccl-pipe", values.store)  # ranks that share experts are on one node
        return cls(waits, sums, DeviceGroup(of_pipe, nccl, rank, degrees.ranks, silent_s, own_device))

    @property
    def waited_s(self) -> float:
        """Time spent waiting for others within passes; NaN if it is their devices that wait (`DeviceGroup`)."""
        return self.sums.waited_s + (0.0 if self.pipe is None else self.pipe.waited_s)
