"""Sends groups to prefill instances in the order of the queue, if an instance can take one and its shard has room.

A prompt's KV is written to the shard of the node that computes it. So the first group also waits if one instance is
free but its shard is full while another shard has room but its instances are busy, until either changes.

Requests that only take what others leave keep BACKGROUND_ROOM of a shard free for others. If that is not enough,
waiting ones lose their KV, and are prefilled again later.
"""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.scheduler.core.actions import StartPrefill
from alignedserve.scheduler.core.admission import Admission
from alignedserve.scheduler.core.pool_shard import PoolShard
from alignedserve.scheduler.core.prefill_queue import QueuedGroup
from alignedserve.scheduler.core.request_table import Record, RequestState
from alignedserve.scheduler.core.routing.base import Route
from alignedserve.scheduler.core.routing.load import PrefillLoad, able_to_prefill
from alignedserve.scheduler.core.routing.names import make_routing
from alignedserve.scheduler.core.state import CoreState

BACKGROUND_ROOM = 0.25  # of a shard's capacity


class PrefillDispatch:
    def __init__(self, state: CoreState, admission: Admission) -> None:
        self._state = state
        self._admission = admission
        self.routing = make_routing(state.config.scheduler)

    def start(self, now_s: float) -> None:
        """Start the groups that can start. No group overtakes the first, which waits at most until a shard is empty.

        Only a first group that overtakes lower ranks in its turn gives way to these if it cannot start.
        """
        state = self._state
        while (group := state.queue.head()) is not None and self._admission.ready():
            first = state.record(group.keys[0])
            refusal = self._admission.too_large(first.meta)
            if refusal is not None:
                state.reject(state.open(list(group.keys)), refusal, now_s)
                continue
            group.recent = state.recent.find(first.meta.marks)
            group.reads_s = first.meta.reads_left(now_s - first.entered_s[RequestState.QUEUED])
            loads = (view.load for view in state.instances.open_prefill())
            most = state.config.prefill.queued_tokens
            able = able_to_prefill(loads, group, most, first.background)
            roomy = self._with_room(group, first, able, now_s) if able else []
            if roomy:
                self._begin(state.queue.pop(), self._choose(roomy, first, group), now_s)
            elif not state.queue.give_way():
                return

    def _with_room(
        self, group: QueuedGroup, first: Record, able: Sequence[PrefillLoad], now_s: float
    ) -> Sequence[PrefillLoad]:
        """The instances whose shard has room for the group, if necessary after dropping copies of running requests.

        Copies are dropped in one shard only: the one that lacks least afterwards; of several that lack nothing
        afterwards, the one that lacked least before.
        """
        state = self._state
        found = {load.home: None for load in able if load.home is not None and load.home.up}
        homes = {home: [load for load in able if load.home is home] for home in found}
        state.ledger.pin(first.key)  # do not make room by dropping the copy that it is about to use
        missing = {home: self._missing(home, group, first) for home in homes}
        roomy = [load for home, loads in homes.items() if missing[home] <= 0 for load in loads]
        if not roomy and missing:
            home = min(missing, key=lambda home: (max(0, missing[home] - home.droppable_blocks), missing[home]))
            state.drop_copies(missing[home], home)
            if self._missing(home, group, first) <= 0:
                return homes[home]
            if not first.background:
                state.drop_background(self._missing(home, group, first), home, now_s)
                if self._missing(home, group, first) <= 0:
                    return homes[home]
        if not roomy:
            state.ledger.mark_droppable(first.key)  # it keeps waiting: evictions take priority over its copy
        return roomy

    def _missing(self, home: PoolShard, group: QueuedGroup, first: Record) -> int:
        own_blocks = first.blocks if first.shard is home else 0
        blocks = sum(self._admission.group_blocks(group.tokens, len(group.keys))) - own_blocks
        missing = self._admission.missing_blocks(home, blocks, first.meta.max_total_tokens, own_blocks)
        if first.background and (home.committed > own_blocks or home.reserved):
            missing += int(BACKGROUND_ROOM * home.capacity)
        return missing

    def _choose(self, roomy: Sequence[PrefillLoad], first: Record, group: QueuedGroup) -> Route:
        """As the routing chooses, except that an idle instance on the node of the base takes priority.

        Waiting for a busy instance there would take longer than copying the base between nodes.
        """
        state = self._state
        near: list[PrefillLoad] = []
        if state.ledger.only is None and first.shard is not None:
            near = [load for load in roomy if not load.pending_tokens and load.home is first.shard]
        # Last: predicting is expensive, and the pool is often full.
        return self.routing.choose(near or roomy, group, first.background)

    def _begin(self, group: QueuedGroup, route: Route, now_s: float) -> None:
        load = route.load
        blocks = self._admission.group_blocks(group.tokens, len(group.keys))
        first = self._state.record(group.keys[0])
        if first.shard is load.home:
            blocks[0] -= first.blocks
        for record, needed in zip(self._state.open(group.keys), blocks, strict=True):
            self._state.begin_prefill(record, load.prefill_id, needed, now_s)
        first.prefill_tokens = route.tokens
        first.reading_s = load.cost.predict_reading_s(route.tokens, group.tokens - route.tokens)
        load.begin(route.tokens, first.background, first.reading_s)
        self._state.recent.sent(first.key, first.meta.marks, load.prefill_id, load.pool_id)
        self._state.actions.append(StartPrefill(load.prefill_id, tuple(group.keys), first.kv_tokens, route.copy_from))
