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
from alignedserve.engine.parallel.group import RankGroup
from alignedserve.engine.parallel.load import load_part
from alignedserve.engine.parallel.runner import RankRunner
from alignedserve.engine.runner import ModelRunner
from alignedserve.engine.step_progress import Progress
from alignedserve.errors import RankLostError
from alignedserve.model import ModelInfo

SILENT_S = 60.0  # a rank that says nothing for so long within a pass is lost
_IDLE_S = 20 * 86400.0  # the next pass may be late; Gloo counts milliseconds in 31 bits
_END_WAIT_S = 5.0
MESSAGE_BYTES = 1 << 17
_dist: Any = torch.distributed  # untyped


@dataclass(frozen=True, slots=True)
class RankOrder:
    """What a rank needs for its part. `rendezvous`: the file by which ranks find each other. `info`: JSON."""

    rank: int
    size: int
    rendezvous: str
    info: str
    trust_remote_code: bool
    threads: int
    backend: str

    def groups(self) -> tuple[RankGroup, RankGroup]:
        """(waits, sums) of a RankRunner. Waits for all ranks."""
        store = _dist.FileStore(self.rendezvous, self.size)
        store.set_timeout(timedelta(seconds=SILENT_S))
        waits = RankGroup(_dist.PrefixStore("waits", store), self.rank, self.size, _IDLE_S)
        return waits, RankGroup(_dist.PrefixStore("sums", store), self.rank, self.size, SILENT_S)

    @property
    def ranks(self) -> Ranks:
        return Ranks(ModelInfo.from_json(self.info), self.rank, self.size)


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """The shape of the store that all ranks share; its memory comes with the message."""

    blocks: int
    block_size: int


def start_ranks(config: Config, role: str, info: ModelInfo) -> RankProcesses | None:
    """The other ranks of an instance of this role; None if it has one. Ranks share the threads of one.

    To be called on a thread that lives as long as the process. Raises ConfigError.
    """
    size = config.ranks(role)
    if size == 1:
        return None
    threads = max(1, torch.get_num_threads() // size)
    torch.set_num_threads(threads)
    trusted, backend = config.model.trust_remote_code, config.engine.attention
    return RankProcesses(info, size, trust_remote_code=trusted, threads=threads, backend=backend)


def runner_maker(
    config: Config, loaded: LoadedModel, ranks: RankProcesses | None
) -> Callable[[torch.Tensor], ModelRunner]:
    """What makes the runner of a store."""
    if ranks is not None:
        return partial(ranks.runner, loaded)
    return partial(ModelRunner, loaded, backend=config.engine.attention)


class RankProcesses:
    """Starts the ranks from 1 on; this process is rank 0.

    To be made on a thread that lives as long as this process: the kernel ends them when it ends.
    """

    def __init__(self, info: ModelInfo, size: int, *, trust_remote_code: bool, threads: int, backend: str) -> None:
        """`threads`: of each rank. Raises ConfigError if so many ranks cannot share the model."""
        Ranks(info, 0, size).require()
        self._folder = Path(tempfile.mkdtemp(prefix="alignedserve-ranks-"))
        self._children: list[subprocess.Popen[bytes]] = []
        self._channels: list[socket.socket] = []
        self._closed = False
        self._groups: tuple[RankGroup, RankGroup] | None = None
        rendezvous, written = str(self._folder / "rendezvous"), info.to_json()
        self._info = info
        self._orders = [
            RankOrder(rank, size, rendezvous, written, trust_remote_code, threads, backend) for rank in range(size)
        ]
        for order in self._orders[1:]:
            self._start(order)

    def _start(self, order: RankOrder) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-P", "-m", "alignedserve.engine.parallel.rank_main", str(theirs.fileno())]
            self._children.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]))
        self._channels.append(mine)
        mine.send(json.dumps(asdict(order)).encode())

    def load(self, progress: Progress = lambda done, count: None) -> LoadedModel:
        """Rank 0's part of the model. Raises what `load_part` raises."""
        own = self._orders[0]
        self._groups = own.groups()
        loaded = load_part(self._info, self._groups[1], "cpu", own.trust_remote_code, progress)
        shutil.rmtree(self._folder, ignore_errors=True)  # all have computed together, so all have found each other
        return loaded

    def share(self, descriptor: int, blocks: int, block_size: int) -> None:
        """Give the others the memory of the instance's store. They follow rank 0's passes from then on."""
        message = json.dumps(asdict(StoreOrder(blocks, block_size))).encode()
        for rank, channel in enumerate(self._channels, 1):
            try:
                socket.send_fds(channel, [message], [descriptor])
            except OSError as error:
                raise self._lost(rank, str(error)) from error

    def runner(self, loaded: LoadedModel, cache: torch.Tensor) -> RankRunner:
        """Rank 0's passes over the shared store."""
        assert self._groups is not None
        own = self._orders[0]
        return RankRunner(loaded, cache, own.ranks, *self._groups, own.backend)

    def waited_s(self) -> float:
        """Time that rank 0 has spent in the collectives of passes."""
        return 0.0 if self._groups is None else self._groups[1].waited_s

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
