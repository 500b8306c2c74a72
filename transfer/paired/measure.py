"""Measures a channel between two places of this machine: scattered blocks, both ways, between two processes."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from alignedserve.geometry import KvGeometry
from alignedserve.proto import common_pb2 as pb
from alignedserve.transfer.block_store import BlockStore
from alignedserve.transfer.channel import Channel
from alignedserve.transfer.device import attach_device_store
from alignedserve.transfer.handles import CUDA
from alignedserve.transfer.links import connect
from alignedserve.transfer.pair_choice import PAIRED
from alignedserve.transfer.paired.channel import PairedChannel
from alignedserve.transfer.paired.client import PairClient
from alignedserve.transfer.paired.peer import PeerProcess, PeerSpec, make_store
from alignedserve.transfer.paired.remote import RemoteBlockStore
from alignedserve.transfer.paired.transport import ASKING_RANK
from alignedserve.transfer.segment import create_descriptor
from alignedserve.transfer.topology import CUDA_IPC, CUDA_STAGED, SHARED_MEMORY

GEOMETRY = KvGeometry("measure", "float32", layers=8, kv_heads=8, head_dim=64, block_size=16)
BLOCKS = 128
"""Half a MiB each; a copy moves half of them."""
REPEATED = 5
PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes a second: the best of some copies requested by this process, to its own store and from it."""

    to_ours: float
    from_ours: float


def measure_channel(
    channel: str, ours: str, theirs: str, *, geometry: KvGeometry = GEOMETRY, blocks: int = BLOCKS
) -> Bandwidth:
    """Measure between a store of this process on `ours` and one on `theirs`, of another process except for PCIe.

    Raises TransferError and RuntimeError if the channel does not work.
    """
    spec = PeerSpec(geometry, blocks, channel=channel, stores=("peer/store",), device=theirs, silent_s=PATIENCE_S)
    with contextlib.ExitStack() as stack:
        local = make_store(replace(spec, device=ours), "here/store")
        stack.callback(local.close)
        if channel in PAIRED:
            pull, push = stack.enter_context(_paired(spec, local, ours))
        else:
            other = stack.enter_context(_attached(spec, channel))
            slow = channel == CUDA_STAGED
            pull, push = (connect(*pair, allow_slow=slow) for pair in ((other, local), (local, other)))
        try:
            return Bandwidth(_reached(pull), _reached(push))
        finally:
            pull.close()
            push.close()


@contextlib.contextmanager
def _paired(spec: PeerSpec, local: BlockStore, ours: str) -> Iterator[tuple[Channel, Channel]]:
    with PeerProcess(spec) as peer:
        process, wiring = pb.ProcessKey(role="decode", id="doctor"), spec.wiring(ASKING_RANK, ours)
        client = PairClient(process, wiring, spec.geometry, "the other process", away_s=PATIENCE_S)
        remote = RemoteBlockStore(peer.handles[0], client)
        peer.connect(client)
        yield PairedChannel(remote, local), PairedChannel(local, remote)


@contextlib.contextmanager
def _attached(spec: PeerSpec, channel: str) -> Iterator[BlockStore]:
    """A store of another process. For PCIe the host memory is this process's own, which makes no difference."""
    if channel in (CUDA_IPC, CUDA_STAGED):
        with PeerProcess(spec) as peer:
            assert peer.handles[0].kind == CUDA
            store: BlockStore = attach_device_store(peer.handles[0], geometry=spec.geometry)
            yield store
            store.close()
        return
    if channel != SHARED_MEMORY:
        yield make_store(spec, spec.stores[0])
        return
    memfd = create_descriptor("doctor", spec.blocks * spec.geometry.block_bytes)
    try:
        with PeerProcess(replace(spec, memfd=memfd)):
            store = make_store(spec, spec.stores[0], memfd)
            yield store
            store.close()
    finally:
        os.close(memfd)


def _reached(channel: Channel) -> float:
    draw, count = random.Random(0), channel.source.capacity_blocks // 2
    seconds = []
    for _ in range(REPEATED + 1):  # the first connects, and touches memory
        ids = [draw.sample(range(channel.source.capacity_blocks), count) for _ in range(2)]
        begun = time.perf_counter()
        if not channel.copy(*ids).wait(PATIENCE_S):
            raise RuntimeError(f"a copy of {count} blocks did not end within {PATIENCE_S:g} s")
        seconds.append(time.perf_counter() - begun)
    return count * channel.source.block_bytes / min(seconds[1:])
