"""The ranks that a process starts on its node. They end with it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from alignedserve.engine.parallel.group import LOOPBACK, Groups
from alignedserve.engine.parallel.rendezvous import FileValues, RankChannel
from alignedserve.engine.parallel.stores import RankStore
from alignedserve.errors import AlignedServeError, RankLostError, by_code
from alignedserve.geometry import KvGeometry, StoreSlice
from alignedserve.proc_stat import is_stopped
from alignedserve.ranks import forks
from alignedserve.ranks.degrees import Degrees, RankPlace
from alignedserve.ranks.now import RankNow, WaitedFile, resident_bytes
from alignedserve.transfer.paired.addresses import Values
from alignedserve.transfer.paired.rendezvous import Rendezvous

SILENT_S = 60.0  # a rank that says nothing for so long within a pass is lost
STOPPED_S = 1.0  # a rank that a signal has stopped for so long is lost
_IDLE_S = 20 * 86400.0  # the next pass may be late; Gloo counts milliseconds in 31 bits
_END_WAIT_S = 5.0
_SAYS_WITHIN_S = 2.0
MOST_RANKS = 1024


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
    here: int = 0  # how many ranks are on its node; 0: all
    host: str = ""  # the node's address for ranks of other nodes; "": there are none
    connect_s: float = SILENT_S  # how long it may wait for the others to connect

    @property
    def place(self) -> RankPlace:
        return RankPlace(self.rank, Degrees(self.tensor, self.stages, self.experts))

    def groups(self, rendezvous: int, values: Values | None = None) -> Groups:
        """Waits for all ranks. `rendezvous`: the descriptor of the file by which those of its node find each other.

        `values`: by which it finds those of other nodes.
        """
        here = FileValues(f"/proc/self/fd/{rendezvous}", self.here or self.place.degrees.ranks, self.connect_s)
        own, host = torch.device(self.device) if self.apart else None, self.host or LOOPBACK
        of_all = values if self.host else None
        return Groups.connected(here, self.place, _IDLE_S, SILENT_S, own, of_all, host, self.connect_s)


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """The shape of a rank's store. Its memory is on a GPU with this `handle`, or comes with the message.

    `own`: it has the rank's part only.
    """

    blocks: int
    block_size: int
    own: bool
    handle: str = ""


class RankChildren:
    """To be used on a thread that lives as long as this process: the kernel ends the ranks when it ends."""

    def __init__(self, values: Rendezvous | None = None) -> None:
        """`values`: by which they find ranks of other nodes."""
        # Without a name, nothing is left behind. It stays open: torch's store opens it by its number until its end.
        self.rendezvous = os.memfd_create("alignedserve-ranks")
        self._waited = WaitedFile(MOST_RANKS)
        self._values = values
        self._orders: list[RankOrder] = []
        self._children: list[subprocess.Popen[bytes] | forks.ForkedRank] = []
        self._channels: list[RankChannel] = []
        self._stopped: dict[int, float] = {}  # ranks that were stopped when last looked at, and since when
        self._closed = False

    def start(self, order: RankOrder) -> None:
        child: subprocess.Popen[bytes] | forks.ForkedRank
        if (prepared := forks.take()) is not None:
            child, channel = prepared
        else:
            channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                descriptor = theirs.fileno()
                command = [sys.executable, "-P", "-m", "alignedserve.ranks.start", str(descriptor), str(os.getpid())]
                child = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[descriptor])
        self._orders.append(order)
        self._children.append(child)
        self._channels.append(RankChannel(channel, self._values, order.connect_s))
        with contextlib.suppress(OSError):  # it has ended: `trouble`
            self._channels[-1].send(asdict(order), [self.rendezvous, self._waited.descriptor])

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children]

    def now(self) -> list[RankNow]:
        """Of each rank: what `/proc` and the rank itself tell."""
        return [
            RankNow(order.rank, pid, resident_bytes=resident_bytes(pid), waited_s=self._waited.of(order.rank))
            for order, pid in zip(self._orders, self.pids, strict=True)
        ]

    def held(self, timeout_s: float | None = SILENT_S) -> list[tuple[StoreSlice, int]]:
        """What each rank holds of a store, and the bytes of its weights, once all have loaded their part.

        `timeout_s`: for each; None: until it says so or ends. Raises RankLostError, or the error for which a rank could
        not load it.
        """
        found = []
        for order, channel in zip(self._orders, self._channels, strict=True):
            try:
                found.append(_held(channel.told(timeout_s)))
            except RankLostError as error:
                raise self._lost(order, error.message) from error
        return found

    def said(self) -> AlignedServeError | None:
        """The error for which a rank could not load its part; None if none has said any."""
        for channel in self._channels:
            with contextlib.suppress(RankLostError):
                told = channel.told(_SAYS_WITHIN_S)
                if "code" in told:
                    return by_code(told["code"])(told["message"])
        return None

    def give(self, made: RankStore, geometry: KvGeometry, blocks: int, *, own: bool, first: int) -> None:
        """Each rank its store, and close the descriptors. `first`: of the ranks, in what was made.

        Raises RankLostError.
        """
        order = StoreOrder(blocks, geometry.block_size, own)
        try:
            for index, channel in enumerate(self._channels, first):
                if made.handles:
                    order = replace(order, handle=made.handles[index].decode())
                try:
                    channel.send(asdict(order), made.descriptors[index : index + 1])
                except OSError as error:
                    raise self._lost(self._orders[index - first], str(error)) from error
        finally:
            made.close_descriptors()

    def trouble(self) -> RankLostError | None:
        """The error if a rank has ended before `close`, or is stopped: then the instance cannot go on."""
        if self._closed:
            return None
        now_s = time.monotonic()
        for order, child in zip(self._orders, self._children, strict=True):
            if (status := child.poll()) is not None:
                return self._lost(order, f"its process ended with status {status}")
            if not is_stopped(child.pid):
                self._stopped.pop(order.rank, None)
            elif now_s - self._stopped.setdefault(order.rank, now_s) >= STOPPED_S:
                return self._lost(order, f"its process is stopped for over {STOPPED_S:g} s")
        return None

    def close(self) -> None:
        """End them. Idempotent."""
        self._closed = True
        for channel in self._channels:
            channel.close()
        until_s = time.monotonic() + _END_WAIT_S
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, until_s - time.monotonic()))
            child.kill()
            child.wait()

    def _lost(self, order: RankOrder, why: str) -> RankLostError:
        return RankLostError(f"rank {order.rank} of {order.place.degrees.ranks} of {os.getpid()} is lost: {why}")


def _held(told: Mapping[str, Any]) -> tuple[StoreSlice, int]:
    """Raises the error that a rank has said."""
    if "code" in told:
        raise by_code(told["code"])(told["message"])
    return StoreSlice(**told["held"]), told["weight_bytes"]


def devices_by_turns(devices: Sequence[str], count: int) -> list[str]:
    """The devices of so many ranks of a node."""
    return [devices[index % len(devices)] for index in range(count)]
