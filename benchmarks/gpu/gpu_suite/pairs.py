"""A channel between two processes (NCCL, Gloo). This process has the part of a decode instance."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from alignedserve.geometry import KvGeometry
from alignedserve.proto import common_pb2 as pb
from alignedserve.transfer.block_store import BlockStore
from alignedserve.transfer.paired.channel import PairedChannel
from alignedserve.transfer.paired.client import PairClient
from alignedserve.transfer.paired.peer import PeerProcess, PeerSpec, make_store
from alignedserve.transfer.paired.remote import RemoteBlockStore
from alignedserve.transfer.paired.transport import ASKING_RANK

MULTI_RANK_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
SILENT_S = 20.0


@dataclass(frozen=True, slots=True)
class Pair:
    """`remote` is the other process's store. `pull` copies from it to `cache`, `push` the other way."""

    client: PairClient
    remote: RemoteBlockStore
    cache: BlockStore
    pull: PairedChannel
    push: PairedChannel


@contextmanager
def paired(channel: str, device: str, geometry: KvGeometry, blocks: int) -> Iterator[Pair]:
    """Raises TransferError if the other process does not start or the connection fails."""
    os.environ[MULTI_RANK_VARIABLE] = "1"  # allows two ranks on one GPU; the other process inherits it
    device = "cuda:0" if device != "cpu" else "cpu"
    spec = PeerSpec(geometry, blocks, channel=channel, device=device, stores=("peer/buffer",), silent_s=SILENT_S)
    with PeerProcess(spec) as peer:
        wiring = spec.wiring(ASKING_RANK, device)
        client = PairClient(pb.ProcessKey(role="decode", id="decode-0"), wiring, geometry, "peer", away_s=3 * SILENT_S)
        remote = RemoteBlockStore(peer.handles[0], client)
        cache = make_store(spec, "cache")
        peer.connect(client)
        channels = PairedChannel(remote, cache), PairedChannel(cache, remote)
        try:
            yield Pair(client, remote, cache, *channels)
        finally:
            client.close()
            for one in channels:
                one.close()
