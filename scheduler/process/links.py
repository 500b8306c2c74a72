"""The scheduler's links to the workers and the pool it commands: one stream a process, dropped with it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from alignedserve.control.convert import key_to_proto, keys_to_proto
from alignedserve.control.link import DuplexLink
from alignedserve.control.role import SERVING_STATES
from alignedserve.control.rpc import TokenChannel, open_channel
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import decode_worker_pb2_grpc as dw_grpc
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.proto import kv_pool_pb2_grpc as kp_grpc
from alignedserve.proto import prefill_worker_pb2_grpc as pw_grpc
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.scheduler.core.actions import ReleasePool

logger = logging.getLogger(__name__)

_CONTROL: dict[str, Callable[[TokenChannel], Any]] = {
    "prefill": lambda channel: pw_grpc.PrefillWorkerStub(channel).Control,
    "decode": lambda channel: dw_grpc.DecodeWorkerStub(channel).Control,
    "kv_pool": lambda channel: kp_grpc.KvPoolStub(channel).Control,
}


@dataclass(slots=True)
class _Peer:
    process: pb.ProcessKey
    channel: TokenChannel
    link: DuplexLink[Any, Any]
    heard: bool = False


class WorkerLinks:
    """Follows the cluster's view. `on_report(role, id, report)` for each report; `on_lost(role, id)` when one is gone.

    A process is lost when its stream breaks, once: the view then drops it or names a successor.
    """

    def __init__(
        self, token: str, on_report: Callable[[str, str, Any], None], on_lost: Callable[[str, str], None]
    ) -> None:
        self._token = token
        self._on_report = on_report
        self._on_lost = on_lost
        self._peers: dict[tuple[str, str], _Peer] = {}

    async def on_view(self, view: sv.ClusterView) -> None:
        shards = {shard.pool_id for shard in view.pools}
        peers = [
            peer  # a shard that is not named has gone with its node: if its process lives, it is of no use
            for peer in view.peers
            if not shards or peer.process.role != "kv_pool" or peer.process.id in shards
        ]
        ready = {
            (peer.process.role, peer.process.id): peer
            for peer in peers
            if peer.process.role in _CONTROL and peer.state in SERVING_STATES
        }
        present = {(peer.process.role, peer.process.id) for peer in view.peers}
        for name, known in list(self._peers.items()):
            gone = shards and name[0] == "kv_pool" and name[1] not in shards
            if name not in present and known.link.up and not gone:
                continue  # a supervisor that has just started does not know everybody yet
            if name not in ready or ready[name].process != known.process:
                await self._drop(name)
        for name, peer in ready.items():
            if name not in self._peers:
                self._open(name, peer)

    def send(self, role: str, instance_id: str, command: Any) -> bool:
        """False where there is no open stream to it: whoever lost it is told by `on_lost`."""
        peer = self._peers.get((role, instance_id))
        return peer is not None and peer.link.send(command)

    def send_all(self, role: str, command: Any) -> None:
        """To every instance of the role."""
        for name, peer in self._peers.items():
            if name[0] == role:
                peer.link.send(command)

    def send_pool(self, command: kp.PoolCommand, pool_id: str = "") -> None:
        """To one shard of the pool, or to all. Where a process is away its successor is asked for all that matters."""
        for name in [pool_id] if pool_id else self.up("kv_pool"):
            self.send("kv_pool", name, command)

    def up(self, role: str) -> list[str]:
        """The ids of the role's instances that have reported, and whose streams are open."""
        return [name[1] for name, peer in self._peers.items() if name[0] == role and peer.heard]

    def _open(self, name: tuple[str, str], peer: sv.Peer) -> None:
        channel = open_channel(peer.address, self._token)

        def on_message(report: Any) -> None:
            self._peers[name].heard = True
            self._on_report(*name, report)

        link: DuplexLink[Any, Any] = DuplexLink(
            _CONTROL[name[0]](channel), on_message, on_down=lambda: self._down(name), reconnect=True
        )
        self._peers[name] = _Peer(peer.process, channel, link)
        link.start()

    def _down(self, name: tuple[str, str]) -> None:
        peer = self._peers.get(name)
        if peer is not None and peer.heard:
            peer.heard = False
            logger.warning("lost %s %s", *name)
            self._on_lost(*name)

    async def _drop(self, name: tuple[str, str]) -> None:
        peer = self._peers.get(name)
        if peer is None:
            return
        await peer.link.close()  # tells of the loss while the peer is still known
        await peer.channel.close()
        self._peers.pop(name, None)

    async def close(self) -> None:
        for name in list(self._peers):
            await self._drop(name)


def release_command(action: ReleasePool) -> kp.PoolCommand:
    """To the pool: free these requests' copies."""
    if not action.dropped:
        return kp.PoolCommand(release=keys_to_proto(action.keys))
    copies = zip(action.keys, action.kv_tokens, strict=True)
    holdings = [kp.Holding(key=key_to_proto(key), kv_tokens=tokens) for key, tokens in copies]
    return kp.PoolCommand(drop=kp.Inventory(holdings=holdings))
