"""What the scheduler's process says: the core's actions as commands to workers and the pool, and words to gateways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from alignedserve.control.convert import key_to_proto, keys_to_proto
from alignedserve.control.link import Outbox
from alignedserve.proto import decode_worker_pb2 as dw
from alignedserve.proto import prefill_worker_pb2 as pw
from alignedserve.proto import scheduler_pb2 as sc
from alignedserve.request import RequestKey
from alignedserve.scheduler.core import actions as act
from alignedserve.scheduler.process.adoption import Adoption
from alignedserve.scheduler.process.left_behind import LeftBehind
from alignedserve.scheduler.process.links import WorkerLinks, release_command
from alignedserve.scheduler.process.owners import Owners
from alignedserve.scheduler.process.wire import candidates_command, prefetch_command, rejection


class Outgoing:
    """`gateways`: the open streams to them, by id. `addresses`: where workers find them, by id."""

    def __init__(
        self,
        owners: Owners,
        adoption: Adoption,
        links: WorkerLinks,
        left_behind: LeftBehind,
        pool_of: Callable[[RequestKey], str],
    ) -> None:
        """`pool_of`: the shard that a request's KV lies in."""
        self.gateways: dict[str, Outbox[sc.SchedulerMessage]] = {}
        self.addresses: dict[str, str] = {}
        self._pool_of = pool_of
        self._owners = owners
        self._adoption = adoption
        self._links = links
        self._left_behind = left_behind

    def tell(self, gateway_id: str, **body: Any) -> None:
        outbox = self.gateways.get(gateway_id)
        if outbox is not None:
            outbox.put(sc.SchedulerMessage(**body))

    def tell_all(self, **body: Any) -> None:
        for outbox in self.gateways.values():
            outbox.put(sc.SchedulerMessage(**body))

    def carry_out(self, action: act.Action) -> None:
        match action:
            case act.StartPrefill():
                self._links.send("prefill", action.prefill_id, pw.PrefillCommand(prefill=self._group(action)))
            case act.Prefetch():
                command = prefetch_command(action, list(map(self._pool_of, action.keys)))
                role = "decode" if action.prefill_id is None else "prefill"
                self._links.send(role, action.prefill_id or action.decode_id, command)
            case act.Recall() | act.MarkUrgent():
                self._links.send("decode", action.decode_id, candidates_command(action))
            case act.ReleasePool():
                self._links.send_pool(release_command(action), action.pool_id)
            case act.CancelAt():
                kind = pw.PrefillCommand if action.role == "prefill" else dw.DecodeCommand
                self._links.send(action.role, action.instance_id, kind(cancel=keys_to_proto(action.keys)))
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

    def _group(self, action: act.StartPrefill) -> pw.PrefillGroup:
        address = self.addresses.get(self._owners.of.get(action.keys[0], ""), "")
        group = pw.PrefillGroup(keys=map(key_to_proto, action.keys), gateway_address=address)
        if action.base_tokens:
            group.base.CopyFrom(self._adoption.bases[action.keys[0]])
        else:  # what it had adopted was dropped
            self._adoption.bases.pop(action.keys[0], None)
        return group
