"""The other ranks of an instance: children of the process of rank 0, which end with it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed

from alignedserve.config import Config
from alignedserve.engine.model.loader import LoadedModel
from alignedserve.engine.parallel.cuts import Ranks
from alignedserve.engine.parallel.expert_runner import ExpertRunner
from alignedserve.engine.parallel.group import Groups
from alignedserve.engine.parallel.layer_times import DECODE, PREFILL, TimedPass
from alignedserve.engine.parallel.load import load_part
from alignedserve.engine.parallel.runner import DrivenRunner, RankRunner, held_by
from alignedserve.engine.parallel.stores import device_parts, host_parts, shared_store
from alignedserve.engine.runner import ModelRunner
from alignedserve.engine.step_progress import Progress
from alignedserve.errors import AlignedServeError, ConfigError, RankLostError, by_code
from alignedserve.geometry import KvGeometry, StoreSlice
from alignedserve.model import ModelInfo
from alignedserve.proc_stat import is_stopped
from alignedserve.ranks import forks
from alignedserve.ranks.degrees import Degrees, RankPlace
from alignedserve.transfer.block_store import BlockStore

SILENT_S = 60.0  # a rank that says nothing for so long within a pass is lost
_IDLE_S = 20 * 86400.0  # the next pass may be late; Gloo counts milliseconds in 31 bits
_END_WAIT_S = 5.0
_SAYS_WITHIN_S = 2.0
STOPPED_S = 1.0  # a rank that a signal has stopped for so long is lost
MESSAGE_BYTES = 1 << 17
OWN_STORES_VARIABLE = "ALIGNEDSERVE_TEST_RANK_STORES"
"""For tests: "1" gives each rank on a CPU a store of its own, as on devices."""
_dist: Any = torch.distributed  # untyped


@dataclass(frozen=True, slots=True)
class RankOrder:
    """What a rank needs for its part. `info`: JSON."""

    rank: int
    tensor: int
    stages: int
    experts: int
    info: str
    trust_remote_code: bool
    threads: int
    backend: str
    device: str = "cpu"
    apart: bool = False  # each rank has a GPU of its own

    @property
    def place(self) -> RankPlace:
        return RankPlace(self.rank, Degrees(self.tensor, self.stages, self.experts))

    def groups(self, rendezvous: int) -> Groups:
        """Waits for all ranks. `rendezvous`: the descriptor of the file by which they find each other."""
        store = _dist.FileStore(f"/proc/self/fd/{rendezvous}", self.place.degrees.ranks)
        store.set_timeout(timedelta(seconds=SILENT_S))
        own = torch.device(self.device) if self.apart else None
        return Groups.connected(store, self.place, _IDLE_S, SILENT_S, own)


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """The shape of a rank's store. Its memory is on a GPU with this `handle`, or comes with the message.

    `own`: it has the rank's part only.
    """

    blocks: int
    block_size: int
    own: bool
    handle: str = ""


def start_ranks(config: Config, role: str, info: ModelInfo, devices: Sequence[str] = ("cpu",)) -> RankProcesses | None:
    """The other ranks of an instance of this role; None if it has one. Ranks share the threads of one.

    `devices`: of the instance; ranks have them by turns. To be called on a thread that lives as long as the process.
    Raises ConfigError.
    """
    degrees = config.degrees(role)
    if degrees.ranks == 1:
        forks.release()
        return None
    if devices[0] != "cpu" and (wanted := config.cluster.channel) in ("nccl", "nixl"):
        raise ConfigError(
            f"cluster.channel is {wanted!r}, but parts of KV on the GPUs of ranks are reached over CUDA IPC, and "
            "from other nodes over Gloo, so far: use auto, gloo or cuda-ipc"
        )
    threads = max(1, torch.get_num_threads() // degrees.ranks)
    torch.set_num_threads(threads)
    trusted, backend = config.model.trust_remote_code, config.engine.attention
    own = os.environ.get(OWN_STORES_VARIABLE) == "1"
    ranks = RankProcesses(
        info,
        degrees,
        trust_remote_code=trusted,
        threads=threads,
        backend=backend,
        own_stores=own,
        devices=devices,
        timed=PREFILL if role == "prefill" else DECODE,
    )
    forks.release()
    return ranks


def runner_maker(
    config: Config, loaded: LoadedModel, ranks: RankProcesses | None
) -> Callable[[torch.Tensor], ModelRunner]:
    """What makes the runner of a store."""
    if ranks is not None:
        return partial(ranks.runner, loaded)
    return partial(ModelRunner, loaded, backend=config.engine.attention)


def bytes_of(loaded: LoadedModel) -> int:
    """Of the weights of a rank's part."""
    return sum(parameter.nbytes for parameter in loaded.model.parameters())


def runner_of(loaded: LoadedModel, cache: torch.Tensor, place: RankPlace, groups: Groups, backend: str) -> DrivenRunner:
    """The passes of the rank at `place`."""
    kind = ExpertRunner if place.degrees.experts > 1 else RankRunner
    return kind(loaded, cache, place, groups, backend)


class RankProcesses:
    """Starts the ranks from 1 on; this process is rank 0.

    To be made on a thread that lives as long as this process: the kernel ends them when it ends.
    """

    def __init__(
        self,
        info: ModelInfo,
        degrees: Degrees,
        *,
        trust_remote_code: bool,
        threads: int,
        backend: str,
        own_stores: bool = False,
        devices: Sequence[str] = ("cpu",),
        timed: TimedPass | None = DECODE,
    ) -> None:
        """`threads`: of each rank. `own_stores`: each has the memory of its own part, as on GPUs, unless ranks share
        experts. `devices`: of the ranks, by turns. `timed`: as for `load_part`.

        Raises ConfigError if so many ranks cannot share the model.
        """
        Ranks(info, 0, degrees.tensor).require()
        degrees.require_layers(info.name, info.layers)
        degrees.require_kind()
        # Without a name, nothing is left behind. It stays open: torch's store opens it by its number until its end.
        self._rendezvous = os.memfd_create("alignedserve-ranks")
        self._stopped: dict[int, float] = {}  # ranks that were stopped when last looked at, and since when
        self._children: list[subprocess.Popen[bytes] | forks.ForkedRank] = []
        self._channels: list[socket.socket] = []
        self._closed = False
        self._groups: Groups | None = None
        self._devices = [devices[rank % len(devices)] for rank in range(degrees.ranks)]
        self._on_gpus = devices[0] != "cpu"
        self._own_stores = (own_stores or self._on_gpus) and degrees.experts == 1
        self._held: list[StoreSlice] = []  # by each rank; known from `load` on
        self._weight_bytes: list[int] = []  # of each rank; known from `load` on
        written = info.to_json()
        self._info, self._timed = info, timed
        self._orders = [
            RankOrder(
                rank,
                degrees.tensor,
                degrees.stages,
                degrees.experts,
                written,
                trust_remote_code,
                threads,
                backend,
                self._devices[rank],
                self._on_gpus and len(set(self._devices)) == degrees.ranks,
            )
            for rank in range(degrees.ranks)
        ]
        for order in self._orders[1:]:
            self._start(order)

    def _start(self, order: RankOrder) -> None:
        child: subprocess.Popen[bytes] | forks.ForkedRank
        if (prepared := forks.take()) is not None:
            child, channel = prepared
        else:
            channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                descriptor = theirs.fileno()
                command = [sys.executable, "-P", "-m", "alignedserve.ranks.start", str(descriptor), str(os.getpid())]
                child = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[descriptor])
        self._children.append(child)
        self._channels.append(channel)
        with contextlib.suppress(OSError):  # it has ended: `trouble`
            socket.send_fds(channel, [json.dumps(asdict(order)).encode()], [self._rendezvous])

    def load(self, progress: Progress = lambda done, count: None) -> LoadedModel:
        """Rank 0's part of the model. Raises what `load_part` raises."""
        own = self._orders[0]
        try:
            self._groups = own.groups(self._rendezvous)
            loaded = load_part(
                self._info, own.place, self._groups, own.device, own.trust_remote_code, progress, self._timed
            )
            self._groups.waits.meet()
        except RankLostError as error:
            raise self._said() or error from None
        self._held, self._weight_bytes = [held_by(loaded, own.place)], [bytes_of(loaded)]
        for rank, channel in enumerate(self._channels, 1):
            try:
                channel.settimeout(SILENT_S)
                told = json.loads(channel.recv(MESSAGE_BYTES))
                self._held.append(StoreSlice(**told["held"]))
                self._weight_bytes.append(told["weight_bytes"])
            except (OSError, ValueError) as error:
                raise self._lost(rank, f"it does not say what it holds: {error}") from error
        return loaded

    def _said(self) -> AlignedServeError | None:
        """The error for which another rank could not load its part; None if none has said any."""
        for channel in self._channels:
            with contextlib.suppress(OSError, ValueError):
                channel.settimeout(_SAYS_WITHIN_S)
                told = json.loads(channel.recv(MESSAGE_BYTES))
                return by_code(told["code"])(told["message"])
        return None

    def store(
        self, store_id: str, geometry: KvGeometry, blocks: int, node_id: str = ""
    ) -> tuple[BlockStore, torch.Tensor]:
        """The instance's cache, and as a tensor what rank 0 has of it. The others follow its passes from then on."""
        if self._on_gpus:
            made = device_parts(store_id, geometry, blocks, node_id, self._held, self._devices)
        elif self._own_stores:
            made = host_parts(store_id, geometry, blocks, node_id, self._held)
        else:
            made = shared_store(store_id, geometry, blocks, node_id, len(self._orders))
        order = StoreOrder(blocks, geometry.block_size, self._own_stores)
        try:
            for rank, channel in enumerate(self._channels, 1):
                if made.handles:
                    order = replace(order, handle=made.handles[rank].decode())
                try:
                    socket.send_fds(channel, [json.dumps(asdict(order)).encode()], made.descriptors[rank : rank + 1])
                except OSError as error:
                    raise self._lost(rank, str(error)) from error
        finally:
            made.close_descriptors()
        return made.store, made.own

    def device_buffer(self, store_id: str, geometry: KvGeometry, blocks: int, node_id: str) -> BlockStore:
        """A candidate buffer in the ranks' GPUs, which other processes of the node can open."""
        return device_parts(store_id, geometry, blocks, node_id, self._held, self._devices, shared=True).store

    def most_weight_bytes(self) -> int:
        """Of all ranks on the GPU that has most of them."""
        found = Counter[str]()
        for device, size in zip(self._devices, self._weight_bytes, strict=True):
            found[device] += size
        return max(found.values())

    def runner(self, loaded: LoadedModel, cache: torch.Tensor) -> DrivenRunner:
        """Rank 0's passes over the shared store."""
        assert self._groups is not None
        own = self._orders[0]
        return runner_of(loaded, cache, own.place, self._groups, own.backend)

    @property
    def pids(self) -> list[int]:
        """Of rank 0 and the others, in order."""
        return [os.getpid(), *(child.pid for child in self._children)]

    def trouble(self) -> RankLostError | None:
        """The error if a rank has ended before `close`, or is stopped: then the instance cannot go on."""
        if self._closed:
            return None
        now_s = time.monotonic()
        for rank, child in enumerate(self._children, 1):
            if (status := child.poll()) is not None:
                return self._lost(rank, f"its process ended with status {status}")
            if not is_stopped(child.pid):
                self._stopped.pop(rank, None)
            elif now_s - self._stopped.setdefault(rank, now_s) >= STOPPED_S:
                return self._lost(rank, f"its process is stopped for over {STOPPED_S:g} s")
        return None

    def close(self) -> None:
        """End the others. Idempotent."""
        self._closed = True
        for channel in self._channels:
            channel.close()
        until_s = time.monotonic() + _END_WAIT_S
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, until_s - time.monotonic()))
            child.kill()
            child.wait()

    def _lost(self, rank: int, why: str) -> RankLostError:
        return RankLostError(f"rank {rank} of {len(self._orders)} of {os.getpid()} is lost: {why}")
