"""The other ranks of an instance: children of the process of rank 0, which end with it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from alignedserve.config import Config
from alignedserve.engine.model.loader import LoadedModel
from alignedserve.engine.parallel.cuts import Ranks
from alignedserve.engine.parallel.expert_runner import ExpertRunner
from alignedserve.engine.parallel.group import Groups
from alignedserve.engine.parallel.load import load_part
from alignedserve.engine.parallel.runner import DrivenRunner, RankRunner
from alignedserve.engine.runner import ModelRunner
from alignedserve.engine.step_progress import Progress
from alignedserve.errors import AlignedServeError, RankLostError, by_code
from alignedserve.model import ModelInfo
from alignedserve.ranks import forks
from alignedserve.ranks.degrees import Degrees, RankPlace

SILENT_S = 60.0  # a rank that says nothing for so long within a pass is lost
_IDLE_S = 20 * 86400.0  # the next pass may be late; Gloo counts milliseconds in 31 bits
_END_WAIT_S = 5.0
_SAYS_WITHIN_S = 2.0
MESSAGE_BYTES = 1 << 17
_dist: Any = torch.distributed  # untyped


@dataclass(frozen=True, slots=True)
class RankOrder:
    """What a rank needs for its part. `rendezvous`: the file by which ranks find each other. `info`: JSON."""

    rank: int
    tensor: int
    stages: int
    experts: int
    rendezvous: str
    info: str
    trust_remote_code: bool
    threads: int
    backend: str

    @property
    def place(self) -> RankPlace:
        return RankPlace(self.rank, Degrees(self.tensor, self.stages, self.experts))

    def groups(self) -> Groups:
        """Waits for all ranks."""
        store = _dist.FileStore(self.rendezvous, self.place.degrees.ranks)
        store.set_timeout(timedelta(seconds=SILENT_S))
        return Groups.connected(store, self.place, _IDLE_S, SILENT_S)


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """The shape of the store that all ranks share; its memory comes with the message."""

    blocks: int
    block_size: int


def start_ranks(config: Config, role: str, info: ModelInfo) -> RankProcesses | None:
    """The other ranks of an instance of this role; None if it has one. Ranks share the threads of one.

    To be called on a thread that lives as long as the process. Raises ConfigError.
    """
    degrees = config.degrees(role)
    if degrees.ranks == 1:
        return None
    threads = max(1, torch.get_num_threads() // degrees.ranks)
    torch.set_num_threads(threads)
    trusted, backend = config.model.trust_remote_code, config.engine.attention
    return RankProcesses(info, degrees, trust_remote_code=trusted, threads=threads, backend=backend)


def runner_maker(
    config: Config, loaded: LoadedModel, ranks: RankProcesses | None
) -> Callable[[torch.Tensor], ModelRunner]:
    """What makes the runner of a store."""
    if ranks is not None:
        return partial(ranks.runner, loaded)
    return partial(ModelRunner, loaded, backend=config.engine.attention)


def runner_of(loaded: LoadedModel, cache: torch.Tensor, place: RankPlace, groups: Groups, backend: str) -> DrivenRunner:
    """The passes of the rank at `place`."""
    kind = ExpertRunner if place.degrees.experts > 1 else RankRunner
    return kind(loaded, cache, place, groups, backend)


class RankProcesses:
    """Starts the ranks from 1 on; this process is rank 0.

    To be made on a thread that lives as long as this process: the kernel ends them when it ends.
    """

    def __init__(
        self, info: ModelInfo, degrees: Degrees, *, trust_remote_code: bool, threads: int, backend: str
    ) -> None:
        """`threads`: of each rank. Raises ConfigError if so many ranks cannot share the model."""
        Ranks(info, 0, degrees.tensor).require()
        degrees.require_layers(info.name, info.layers)
        degrees.require_kind()
        self._folder = Path(tempfile.mkdtemp(prefix="alignedserve-ranks-"))
        self._children: list[subprocess.Popen[bytes] | forks.ForkedRank] = []
        self._channels: list[socket.socket] = []
        self._closed = False
        self._groups: Groups | None = None
        rendezvous, written = str(self._folder / "rendezvous"), info.to_json()
        self._info = info
        self._orders = [
            RankOrder(
                rank,
                degrees.tensor,
                degrees.stages,
                degrees.experts,
                rendezvous,
                written,
                trust_remote_code,
                threads,
                backend,
            )
            for rank in range(degrees.ranks)
        ]
        for order in self._orders[1:]:
            self._start(order)

    def _start(self, order: RankOrder) -> None:
        if (prepared := forks.take()) is not None:
            child, channel = prepared
            self._children.append(child)
            self._channels.append(channel)
            channel.send(json.dumps(asdict(order)).encode())
            return
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-P", "-m", "alignedserve.engine.parallel.rank_main", str(theirs.fileno())]
            self._children.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]))
        self._channels.append(mine)
        mine.send(json.dumps(asdict(order)).encode())

    def load(self, progress: Progress = lambda done, count: None) -> LoadedModel:
        """Rank 0's part of the model. Raises what `load_part` raises."""
        own = self._orders[0]
        try:
            self._groups = own.groups()
            loaded = load_part(self._info, own.place, self._groups, "cpu", own.trust_remote_code, progress)
            self._groups.waits.meet()
        except RankLostError as error:
            raise self._said() or error from None
        shutil.rmtree(self._folder, ignore_errors=True)  # all have found each other
        return loaded

    def _said(self) -> AlignedServeError | None:
        """The error for which another rank could not load its part; None if none has said any."""
        for channel in self._channels:
            with contextlib.suppress(OSError, ValueError):
                channel.settimeout(_SAYS_WITHIN_S)
                told = json.loads(channel.recv(MESSAGE_BYTES))
                return by_code(told["code"])(told["message"])
        return None

    def share(self, descriptor: int, blocks: int, block_size: int) -> None:
        """Give the others the memory of the instance's store. They follow rank 0's passes from then on."""
        message = json.dumps(asdict(StoreOrder(blocks, block_size))).encode()
        for rank, channel in enumerate(self._channels, 1):
            try:
                socket.send_fds(channel, [message], [descriptor])
            except OSError as error:
                raise self._lost(rank, str(error)) from error

    def runner(self, loaded: LoadedModel, cache: torch.Tensor) -> DrivenRunner:
        """Rank 0's passes over the shared store."""
        assert self._groups is not None
        own = self._orders[0]
        return runner_of(loaded, cache, own.place, self._groups, own.backend)

    def trouble(self) -> RankLostError | None:
        """The error if a rank has ended before `close`: then the instance cannot go on."""
        if self._closed:
            return None
        for rank, child in enumerate(self._children, 1):
            if (status := child.poll()) is not None:
                return self._lost(rank, f"its process ended with status {status}")
        return None

    def close(self) -> None:
        """End the others. Idempotent."""
        self._closed = True
        for channel in self._channels:
            channel.close()
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_END_WAIT_S)
            child.kill()
            child.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _lost(self, rank: int, why: str) -> RankLostError:
        return RankLostError(f"rank {rank} of {len(self._orders)} of {os.getpid()} is lost: {why}")
