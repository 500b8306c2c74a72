"""Messages of the scheduler's process: streams to workers and shards, conversion of actions to commands and of reports
to events.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from alignedserve.config import Config
from alignedserve.control.convert import failure_to_proto, key_from_proto, key_to_proto, keys_to_proto
from alignedserve.control.link import DuplexLink, Outbox
from alignedserve.control.role import SERVING_STATES
from alignedserve.control.rpc import TokenChannel, open_channel
from alignedserve.errors import AlignedServeError
from alignedserve.model import ModelInfo
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import decode_worker_pb2 as dw
from alignedserve.proto import decode_worker_pb2_grpc as dw_grpc
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.proto import kv_pool_pb2_grpc as kp_grpc
from alignedserve.proto import prefill_worker_pb2 as pw
from alignedserve.proto import prefill_worker_pb2_grpc as pw_grpc
from alignedserve.proto import scheduler_pb2 as sc
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.request import RequestKey
from alignedserve.scheduler.core import actions as act
from alignedserve.scheduler.core.actions import MarkUrgent, Prefetch, Recall, ReleasePool
from alignedserve.scheduler.core.events import (
    DecodeReported,
    HeldRequest,
    PairsChanged,
    PrefillReported,
    RequestMeta,
    ShardsChanged,
)
from alignedserve.scheduler.core.routing.base import PrefixCopies
from alignedserve.scheduler.core.scheduler_core import SchedulerCore
from alignedserve.scheduler.cost.pass_model import Passes
from alignedserve.scheduler.instance.plan import BufferKind
from alignedserve.scheduler.process.adoption import Adoption
from alignedserve.scheduler.process.owners import Owners
from alignedserve.scheduler.process.pool_audit import LeftBehind
from alignedserve.sizing import StorePlan

ASSUMED_BYTES_S = 1e9  # between nodes, of a connection of 10 Gbit/s
ASSUMED_LATENCY_S = 0.005  # both until an instance has measured its copies


def request_meta(key: RequestKey, head: pb.RequestHead) -> RequestMeta:
    """The metadata of a submitted request. Up to a million may be kept, so they share all strings except their ids."""
    return RequestMeta(
        key=key,
        prefix_tokens=head.prompt_tokens + head.output_tokens,
        max_total_tokens=head.prompt_tokens + head.max_tokens,
        group_id=head.group_id if head.group_size > 1 else "",
        gateway_id=sys.intern(head.gateway_id),
        age_s=max(0.0, (time.time_ns() - head.arrival_ns) / 1e9),
        wait_objective_s=head.wait_objective_s,
        priority=head.priority,
        cached=tuple((sys.intern(one.pool_id), min(one.tokens, head.prompt_tokens - 1)) for one in head.cached),
        reads=tuple((sys.intern(one.pool_id), one.ready_s) for one in head.cached if one.ready_s),
        marks=head.prefix_marks,
    )


def pairs_changed(view: sv.ClusterView) -> PairsChanged:
    """The pairs of prefill and decode instances, and the ranks of their links."""
    pairs: dict[str, list[str]] = {}
    for pair in view.pairs:
        pairs.setdefault(pair.decode_id, []).append(pair.prefill_id)
    ranks = sorted((pair.decode_id, pair.prefill_id, pair.link_rank) for pair in view.pairs if pair.link_rank)
    return PairsChanged(tuple((name, tuple(paired)) for name, paired in sorted(pairs.items())), tuple(ranks))


def new_core(config: Config, view: sv.ClusterView) -> SchedulerCore:
    """The core for the stores that the view plans."""
    plan = StorePlan.from_json(view.store_plan)
    core = SchedulerCore(config, plan.block_size)
    if config.kv_pool.prefix_cache and view.model_info:
        token_bytes = ModelInfo.from_json(view.model_info).geometry(plan.block_size).block_bytes / plan.block_size
        core.routing.copies = PrefixCopies(token_bytes / ASSUMED_BYTES_S, ASSUMED_LATENCY_S)
    return core


def shards_changed(view: sv.ClusterView) -> ShardsChanged:
    """The shards of the pool, and the shard that each instance writes to: the shard of its own node."""
    of_node = {shard.node_id: shard.pool_id for shard in view.pools}
    workers = (peer for peer in view.peers if peer.process.role in ("prefill", "decode"))
    homes = sorted((peer.process.id, of_node[peer.node_id]) for peer in workers if peer.node_id in of_node)
    return ShardsChanged(tuple(shard.pool_id for shard in view.pools), tuple(homes))


def held_requests(inventory: dw.DecodeInventory) -> Iterator[HeldRequest]:
    """The requests in a decode instance's inventory."""
    for held in inventory.requests:
        meta = RequestMeta(
            key=key_from_proto(held.key),
            prefix_tokens=held.prefix_tokens,
            max_total_tokens=held.max_total_tokens,
            group_id=held.group_id,
            gateway_id=held.gateway_id,
            wait_objective_s=held.wait_objective_s,
            priority=held.priority,
        )
        prefill_id, _, buffer = held.store_id.partition("/")
        kind = BufferKind.REQUESTS if buffer.startswith("requests") else BufferKind.BATCH
        yield HeldRequest(meta, held.running, held.kv_tokens, held.blocks, prefill_id if buffer else "", kind)


def prefetch_command(action: Prefetch, copies: Sequence[tuple[str, int]]) -> pw.PrefillCommand | dw.DecodeCommand:
    """The command for the prefill instance whose candidate buffers the requests go through, or, without one, for the
    decode instance. `copies`: the shard that holds each request's KV, and the tokens of this KV.
    """
    prefetch = pw.Prefetch(
        decode_id=action.decode_id,
        buffer=pw.Buffer.Name(int(action.buffer)),
        batch_id=action.batch_id,
        requests=[
            pb.PooledRequest(key=key_to_proto(key), pool_id=pool_id, kv_tokens=kv_tokens)
            for key, (pool_id, kv_tokens) in zip(action.keys, copies, strict=True)
        ],
    )
    if action.prefill_id is not None:
        return pw.PrefillCommand(prefetch=prefetch)
    return dw.DecodeCommand(candidates=prefetch)


def candidates_command(action: Recall | MarkUrgent) -> dw.DecodeCommand:
    if isinstance(action, Recall):
        return dw.DecodeCommand(recall=keys_to_proto(action.keys))
    urgent = dw.UrgentRequests(keys=map(key_to_proto, action.keys), due_in_s=action.due_in_s)
    return dw.DecodeCommand(urgent=urgent)


def prefill_reported(prefill_id: str, message: pw.PrefillDescription) -> PrefillReported:
    return PrefillReported(
        prefill_id,
        message.pending_tokens,
        message.cache_blocks,
        message.batch_buffer_blocks,
        message.batch_buffer_free_blocks,
        message.requests_buffer_blocks,
        message.requests_buffer_free_blocks,
        message.pool_wait_blocks,
        _passes(message.measured),
        message.copy_s_per_token,
    )


def decode_reported(decode_id: str, message: dw.DecodeDescription) -> DecodeReported:
    return DecodeReported(
        decode_id,
        message.cache_blocks,
        message.cache_free_blocks,
        message.running,
        message.shortest_tokens,
        message.longest_tokens,
        message.batch_id,
        message.batch_buffer_requests,
        message.requests_buffer_requests,
        message.pool_wait_blocks,
        _passes(message.measured),
        message.batch_shortest_tokens,
        message.batch_longest_tokens,
        message.max_running,
        message.request_blocks,
    )


def _passes(message: pb.Passes) -> Passes | None:
    if not message.passes:
        return None
    return Passes(message.passes, message.tokens, message.cached_tokens, message.seconds, message.padded_tokens)


def rejection(keys: Iterable[RequestKey], error: AlignedServeError) -> sc.Rejection:
    return sc.Rejection(keys=[key_to_proto(key) for key in keys], failure=failure_to_proto(error))


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
    """The streams to workers and shards in the cluster's view.

    `on_report(role, id, report)` is called for each report, and `on_lost(role, id)` once when a process's stream
    breaks. The view then drops the process or names its successor.
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
            peer  # a shard that the view does not name is lost with its node: its process, if alive, is not used
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
                continue  # a supervisor that has just started does not know all processes yet
            if name not in ready or ready[name].process != known.process:
                await self._drop(name)
        for name, peer in ready.items():
            if name not in self._peers:
                self._open(name, peer)

    def send(self, role: str, instance_id: str, command: Any) -> bool:
        """Queues a command. False if there is no open stream to the process: `on_lost` reports the loss."""
        peer = self._peers.get((role, instance_id))
        return peer is not None and peer.link.send(command)

    def send_all(self, role: str, command: Any) -> None:
        """Queues a command for every instance of the role."""
        for name, peer in self._peers.items():
            if name[0] == role:
                peer.link.send(command)

    def send_pool(self, command: kp.PoolCommand, pool_id: str = "") -> None:
        """Queues a command for one shard, or for all shards that are up. A command for a shard that is down is dropped:
        the scheduler later asks its successor for what it holds.
        """
        for name in [pool_id] if pool_id else self.up("kv_pool"):
            self.send("kv_pool", name, command)

    def up(self, role: str) -> list[str]:
        """The ids of the role's processes whose streams are open, and that have reported."""
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
        await peer.link.close()  # reports the loss while the peer is still known
        await peer.channel.close()
        self._peers.pop(name, None)

    async def close(self) -> None:
        for name in list(self._peers):
            await self._drop(name)


def release_command(action: ReleasePool) -> kp.PoolCommand:
    """The command that makes shards free these requests' copies."""
    if not action.dropped:
        return kp.PoolCommand(release=keys_to_proto(action.keys))
    copies = zip(action.keys, action.kv_tokens, strict=True)
    holdings = [kp.Holding(key=key_to_proto(key), kv_tokens=tokens) for key, tokens in copies]
    return kp.PoolCommand(drop=kp.Inventory(holdings=holdings))


class Outgoing:
    """Carries out the core's actions. `gateways`: the open streams to gateways, by id. `addresses`: their addresses for
    workers, by id.
    """

    def __init__(
        self,
        owners: Owners,
        adoption: Adoption,
        links: WorkerLinks,
        left_behind: LeftBehind,
        copy_of: Callable[[RequestKey], tuple[str, int]],
    ) -> None:
        """`copy_of` returns the id of the shard that holds a request's KV, and the tokens of this KV."""
        self.gateways: dict[str, Outbox[sc.SchedulerMessage]] = {}
        self.addresses: dict[str, str] = {}
        # Of the group that is being submitted: its first request, and its specifications as its gateway sent them.
        self.at_hand: tuple[RequestKey, bytes] | None = None
        self._copy_of = copy_of
        self._owners = owners
        self._adoption = adoption
        self._links = links
        self._left_behind = left_behind

    def tell(self, gateway_id: str, **body: Any) -> None:
        """Queues a message for a gateway, if it is connected."""
        outbox = self.gateways.get(gateway_id)
        if outbox is not None:
            outbox.put(sc.SchedulerMessage(**body))

    def tell_all(self, **body: Any) -> None:
        """Queues a message for all connected gateways."""
        for outbox in self.gateways.values():
            outbox.put(sc.SchedulerMessage(**body))

    def carry_out(self, action: act.Action) -> None:
        """Sends the messages of an action of the core."""
        match action:
            case act.StartPrefill():
                self._links.send("prefill", action.prefill_id, pw.PrefillCommand(prefill=self._group(action)))
            case act.Prefetch():
                command = prefetch_command(action, list(map(self._copy_of, action.keys)))
                role = "decode" if action.prefill_id is None else "prefill"
                self._links.send(role, action.prefill_id or action.decode_id, command)
            case act.Recall() | act.MarkUrgent():
                self._links.send("decode", action.decode_id, candidates_command(action))
            case act.ReleasePool():
                self._links.send_pool(release_command(action), action.pool_id)
            case act.GiveUpPins() | act.CancelAt():
                self._take_back(action)
            case act.Reject():
                for gateway_id, theirs in self._owners.by_gateway(action.keys):
                    self.tell(gateway_id, rejected=rejection(theirs, action.error))
            case act.ReportLost():
                self._owners.note_lost(action.keys)
                for gateway_id, theirs in self._owners.by_gateway(action.keys):
                    self._left_behind.note(gateway_id, theirs)
                    self.tell(gateway_id, lost=sc.Loss(keys=map(key_to_proto, theirs), reason=action.reason))
            case act.Forget():
                for key in action.keys:
                    self._owners.of.pop(key, None)
                    self._adoption.forget(key)

    def _take_back(self, action: act.GiveUpPins | act.CancelAt) -> None:
        if isinstance(action, act.GiveUpPins):
            self._links.send_all("prefill", pw.PrefillCommand(give_up_pins=action.pool_id))
            return
        kind = pw.PrefillCommand if action.role == "prefill" else dw.DecodeCommand
        self._links.send(action.role, action.instance_id, kind(cancel=keys_to_proto(action.keys)))

    def _group(self, action: act.StartPrefill) -> pw.PrefillGroup:
        address = self.addresses.get(self._owners.of.get(action.keys[0], ""), "")
        specs = self.at_hand[1] if self.at_hand is not None and self.at_hand[0] == action.keys[0] else b""
        group = pw.PrefillGroup(keys=map(key_to_proto, action.keys), gateway_address=address, specs=specs)
        group.copy_from = action.copy_from
        if action.base_tokens:
            group.base.CopyFrom(self._adoption.bases[action.keys[0]])
        else:  # its adopted KV was dropped
            self._adoption.bases.pop(action.keys[0], None)
        return group
