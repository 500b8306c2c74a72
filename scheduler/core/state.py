"""The state of the core, and the operations that keep it consistent: state changes, places and endings of requests.

Actions are collected here in the order in which they are to be carried out.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice

from alignedserve.config import Config
from alignedserve.errors import AccountingError, AlignedServeError, CancelledError
from alignedserve.request import RequestKey
from alignedserve.scheduler.cache.recent import RecentPrefixes
from alignedserve.scheduler.core.actions import Action, CancelAt, Forget, Recall, Reject, ReleasePool, ReportLost
from alignedserve.scheduler.core.decode_times import DecodeTimes
from alignedserve.scheduler.core.events import HeldRequest, RequestMeta
from alignedserve.scheduler.core.guarded_policy import Faults
from alignedserve.scheduler.core.instances import DecodeView, Instances
from alignedserve.scheduler.core.length_shares import LengthShares
from alignedserve.scheduler.core.pool_ledger import PoolLedger
from alignedserve.scheduler.core.pool_shard import PoolShard
from alignedserve.scheduler.core.prefill_queue import PrefillQueue
from alignedserve.scheduler.core.request_table import Record, RequestState, RequestTable
from alignedserve.scheduler.core.sharing import Nearest, Pooled, Sharing
from alignedserve.scheduler.core.waiting import WaitingClock
from alignedserve.scheduler.instance.plan import BufferKind
from alignedserve.scheduler.policies.base import Entry
from alignedserve.scheduler.priorities import objective_s, rank_of
from alignedserve.scheduler.systems import default_objective_s, make_policy, sharing_of

MOST_DROPPED = 64  # waiting requests that are looked at to make room for one prompt


class CoreState:
    """State of one cell. The managers (dispatch, prefetch, relief) decide; only these methods move a request."""

    def __init__(self, config: Config, block_size: int) -> None:
        self.config = config
        self.block_size = block_size  # tokens of a KV block
        self.table = RequestTable()  # every open request's record, by key, until it ends
        self.instances = Instances()  # what is known of each instance, by id, while the view names it
        self.recent = RecentPrefixes()  # where beginnings of prompts are, by mark, until newer ones take their place
        self.queue = PrefillQueue()  # keys of QUEUED requests, in the order in which they are to be prefilled
        self.ledger = PoolLedger()  # blocks of each shard by request, until the shard is told to release them
        # Since when each WAITING request waits, by key, and when it is overdue.
        self.clock = WaitingClock(default_objective_s(config.scheduler), config.scheduler.late_share)
        self.decode_times = DecodeTimes()  # how long answers decode, for predictions
        self.policy_faults = Faults()  # of a user-defined policy, in all shares together, also those that have ended
        self.sharing = self._make_sharing()  # entries of WAITING requests, by key
        self.changed: dict[str, None] = {}  # decode instances to look at again, by id, until they were
        self.actions: list[Action] = []  # in order, until `take_actions`; like the next two
        self._released: list[RequestKey] = []  # requests whose copies the pool may drop
        self._forgotten: list[RequestKey] = []  # ended requests, whose data the actor may drop

    def _make_sharing(self) -> Sharing:
        config = self.config.scheduler
        rule = sharing_of(config)
        if rule != "quantiles":
            kind = Nearest if rule == "nearest" else Pooled
            return kind(config, partial(make_policy, config, self.policy_faults), self.instances, self.clock)
        cost = None
        if config.cost_model:
            from alignedserve.scheduler.cost.load import shared_cost  # imports numpy

            cost = shared_cost(config)
        new_policy = partial(make_policy, config, self.policy_faults)
        return LengthShares(self.config, self.block_size, new_policy, self.instances, self.decode_times, cost)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def home(self, instance_id: str) -> PoolShard | None:
        """The shard that the instance writes to; None if it is not known, or gone."""
        return self.ledger.shard(self.instances.homes.get(instance_id, ""))

    def place(self) -> None:
        """Instances or shards were added, removed or moved."""
        self.instances.placed()
        for view in self.instances.prefill.values():
            view.load.home = self.home(view.prefill_id)

    def decode_at(self, shard: PoolShard) -> Iterable[DecodeView]:
        """The decode instances that evict to the shard."""
        return self.instances.decode_at(shard.pool_id) if self.ledger.named else self.instances.decode.values()

    def record(self, key: RequestKey) -> Record:
        """The record of an open request. Raises AccountingError if it is not open."""
        record = self.table.get(key)
        if record is None:
            raise AccountingError(f"{key} is not open", request_id=key.request_id)
        return record

    def open(self, keys: Iterable[RequestKey]) -> list[Record]:
        """The records of the requests that are open."""
        return [record for key in keys if (record := self.table.get(key)) is not None]

    def change(self, decode_id: str) -> None:
        if decode_id:
            self.changed[decode_id] = None

    def change_all(self) -> None:
        self.changed.update(dict.fromkeys(self.instances.decode))

    def take_actions(self) -> list[Action]:
        """The collected actions; releases and Forget come last, each merged into one action."""
        if self._released:
            self.actions.append(ReleasePool(tuple(self._released)))
            self._released = []
        if self._forgotten:
            self.actions.append(Forget(tuple(self._forgotten)))
            self._forgotten = []
        actions = list(self.actions)
        self.actions.clear()
        return actions

    # moves between states

    def add(self, group: Sequence[RequestMeta], now_s: float) -> None:
        """Open requests: QUEUED, or WAITING at once if the pool has all the KV that a request needs to decode."""
        for meta in group:
            record = self.table.add(meta, now_s)
            if meta.base_tokens:
                record.kv_tokens, record.blocks = meta.base_tokens, meta.base_blocks
                record.pool_tokens = meta.base_tokens
                record.shard = self.ledger.shard(meta.base_pool_id)
                self.ledger.commit(meta.key, meta.own_blocks, record.shard)
        first = group[0]
        if first.whole:
            record = self.record(first.key)
            self.enter_pool(record, first.base_tokens, first.base_blocks, record.shard, now_s, now_s)
            return
        if first.base_tokens:
            self.ledger.mark_droppable(first.key)
        again, rank = first.key.epoch > 0, rank_of(first.priority)
        keys = [meta.key for meta in group]
        # KV of its own is used where it is, and the caches are not asked.
        cached = () if first.base_tokens else first.cached
        coming = 0 if first.base_tokens else self.recent.queued(first.key, first.marks)
        kept = first.base_tokens
        self.queue.add(keys, first.prefix_tokens, kept, again=again, rank=rank, cached=cached, coming=coming)

    def restore(self, held: HeldRequest, decode_id: str, now_s: float) -> None:
        """Adopt a predecessor's request, as described by the decode instance that decides about it."""
        record = self.table.add(held.meta, now_s)
        record.kv_tokens, record.blocks = held.kv_tokens, held.blocks
        self.enter_pool(record, held.kv_tokens, held.blocks, None, now_s, now_s)
        prefill_id = held.prefill_id if held.prefill_id in self.instances.prefill else ""
        self.prefetch(record, decode_id, prefill_id, held.buffer, now_s)
        if held.running:
            self.join(record, now_s)

    def begin_prefill(self, record: Record, prefill_id: str, pool_blocks: int, now_s: float) -> None:
        """QUEUED -> PREFILLING; the caller has taken it out of the queue."""
        self.table.move(record, RequestState.PREFILLING, now_s)
        record.prefill_id = prefill_id
        self.instances.prefill[prefill_id].prefilling[record.key] = None
        self.ledger.pin(record.key)
        self.ledger.reserve(record.key, pool_blocks, self.home(prefill_id))

    def store(self, record: Record, own_blocks: int, shard: PoolShard, now_s: float) -> None:
        """The shard now holds its KV, in `own_blocks` unshared blocks; an older copy in another shard is dropped."""
        older = self.ledger.commit(record.key, own_blocks, shard)
        self.recent.stored(record.key, record.meta.marks, shard.pool_id, now_s)
        if older is not None:
            self._drop(older, [record])

    def enter_pool(
        self, record: Record, kv_tokens: int, blocks: int, shard: PoolShard | None, since_s: float, now_s: float
    ) -> None:
        """PREFILLING, PREFETCHED or DECODING -> WAITING, since `since_s`.

        `shard`: where the KV is; None for a predecessor's request whose shard is not known yet.
        """
        self._detach(record)
        evicted = record.state is RequestState.DECODING
        record.kv_tokens, record.blocks, record.pool_tokens, record.shard = kv_tokens, blocks, kv_tokens, shard
        record.prefill_id = record.decode_id = ""
        record.moved, record.recalled = record.moved or record.recalled, False
        self.table.move(record, RequestState.WAITING, now_s)
        if shard is not None:
            shard.waiting[record.key] = record
            if record.background:
                shard.background[record.key] = record
        self.clock.start(record.key, since_s, objective_s(record.meta.wait_objective_s, record.rank, 0.0))
        entry = Entry(record.key, kv_tokens, blocks, since_s, evicted, record.rank)
        self.sharing.insert(entry, record.meta.max_total_tokens)

    def prefetch(self, record: Record, decode_id: str, prefill_id: str, kind: BufferKind, now_s: float) -> None:
        """WAITING -> PREFETCHED: from here on `decode_id` decides."""
        self._detach(record)
        self.clock.leave_pool(record.key)
        self.table.leave_pool(record, decode_id, now_s)
        record.decode_id, record.prefill_id, record.buffer = decode_id, prefill_id, kind
        decode = self.instances.decode[decode_id]
        decode.candidates[kind][record.key] = record
        decode.candidate_blocks[kind] += record.blocks
        decode.add_length(record.kv_tokens)
        decode.background.count(record, 1)
        if prefill_id:
            prefill = self.instances.prefill[prefill_id]
            prefill.buffered[record.key] = None
            prefill.buffers[kind].take(record.blocks)

    def recall(self, records: list[Record]) -> None:
        """Ask the decode instances of these requests to return those that have not joined.

        Each request is asked once.
        """
        by_decode: dict[str, list[RequestKey]] = {}
        for record in records:
            if not record.recalled:
                record.recalled = True
                by_decode.setdefault(record.decode_id, []).append(record.key)
        for decode_id, keys in by_decode.items():
            self.actions.append(Recall(decode_id, tuple(keys)))

    def join(self, record: Record, now_s: float) -> None:
        """PREFETCHED -> DECODING: its copy in the pool may be dropped from now on."""
        self._detach(record)
        self.clock.decode(record.key, now_s)
        record.moved = record.recalled = False
        record.prefill_id = ""
        self.table.move(record, RequestState.DECODING, now_s)
        decode = self.instances.decode[record.decode_id]
        decode.decoding[record.key] = record
        decode.add_length(record.kv_tokens)
        decode.background.count(record, 1)
        if not record.background:
            self.decode_times.begin(now_s)
        decode.joined_blocks += record.blocks
        record.joined_iteration = decode.iterations
        self.ledger.mark_droppable(record.key)
        self.change(record.decode_id)

    def _detach(self, record: Record) -> None:
        """Remove the request from the accounting of the state that it leaves, except the clock and the ledger."""
        key = record.key
        prefill = self.instances.prefill.get(record.prefill_id)
        decode = self.instances.decode.get(record.decode_id)
        match record.state:
            case RequestState.PREFILLING if prefill is not None:
                del prefill.prefilling[key]
                if record.prefill_tokens:
                    prefill.load.drop(record.prefill_tokens, record.background, record.reading_s)
            case RequestState.WAITING:
                self.sharing.remove(key)
                if record.shard is not None:
                    del record.shard.waiting[key]
                    record.shard.background.pop(key, None)
            case RequestState.PREFETCHED:
                if decode is not None:
                    del decode.candidates[record.buffer][key]
                    decode.candidate_blocks[record.buffer] -= record.blocks
                    decode.overdue.pop(key, None)
                    decode.drop_length(record.kv_tokens)
                    decode.background.count(record, -1)
                if prefill is not None:
                    del prefill.buffered[key]
                    prefill.buffers[record.buffer].committed -= record.blocks
            case RequestState.DECODING:
                if not record.background:
                    self.decode_times.leave(record.entered_s[RequestState.DECODING])
                if decode is not None:
                    del decode.decoding[key]
                    decode.drop_length(record.kv_tokens)
                    decode.background.count(record, -1)
        record.prefill_tokens = 0

    # endings

    def end(self, record: Record, now_s: float, *, keep_copy: bool = False) -> None:
        """The request is over: remove it from the state, and release its copy in the pool.

        `keep_copy`: the copy remains, for the request's next epoch to adopt.
        """
        if record.state is RequestState.QUEUED:
            self.queue.cancel(record.key)
        if not keep_copy and (record.state is not RequestState.QUEUED or record.kv_tokens):
            self._released.append(record.key)
        if record.state in (RequestState.WAITING, RequestState.PREFETCHED):
            self.clock.stop(record.key)
        self.change(record.decode_id)
        self._detach(record)
        self.recent.ended(record.key, record.meta.marks)
        if keep_copy:
            self.ledger.leave(record.key)
        else:
            self.ledger.release(record.key)
        self.table.move(record, RequestState.ENDED, now_s)
        self._forgotten.append(record.key)

    def drop_copies(self, blocks: int, shard: PoolShard) -> None:
        """Drop clean copies of running or queued requests, oldest first, until `blocks` more blocks are free."""
        records = [self.record(key) for key in self.ledger.drop_copies(blocks, shard)]
        if records:
            self._drop(shard, records)
            for record in records:
                if record.state is RequestState.QUEUED:
                    self._lose_kept(record)

    def drop_background(self, blocks: int, shard: PoolShard, now_s: float) -> None:
        """Drop the KV of waiting requests that only take what others leave, latest first, for `blocks` blocks.

        Those that have decoded go last. Nothing is dropped if that is not enough.
        """
        records, freed = [], 0
        latest = list(islice(reversed(shard.background.values()), MOST_DROPPED))
        for record in sorted(latest, key=lambda record: record.kv_tokens > record.meta.prefix_tokens):
            if freed >= blocks:
                break
            records.append(record)
            freed += self.ledger.committed_of(record.key) or 0
        if freed >= blocks:
            self.report_lost(records, "its KV made room for a request with a lower priority", now_s, keep_copy=False)

    def _drop(self, shard: PoolShard, records: Sequence[Record]) -> None:
        keys, lengths = (tuple(r.key for r in records), tuple(r.pool_tokens for r in records))
        self.actions.append(ReleasePool(keys, dropped=True, kv_tokens=lengths, pool_id=shard.pool_id))

    def drop_strays(self, shard: PoolShard, copies: Mapping[RequestKey, tuple[int, int]]) -> None:
        """Drop copies that belong to another shard. `copies`: the contents of a shard, as (KV tokens, blocks).

        Only requests that the core alone decides about are considered: other copies may be on their way here.
        """
        if self.ledger.only is not None:
            return
        idle = (RequestState.QUEUED, RequestState.WAITING)
        strays = [r.key for r in self.open(copies) if r.state in idle and self.ledger.shard_of(r.key) is not shard]
        if strays:
            lengths = tuple(copies[key][0] for key in strays)
            self.actions.append(ReleasePool(tuple(strays), True, lengths, shard.pool_id))

    def lose_kept(self, shard: PoolShard, held: Container[RequestKey], asked_s: float) -> None:
        """Queued requests whose kept KV is not among what the shard holds are prefilled from their first token on."""
        for record in self.table.records():
            if record.state is not RequestState.QUEUED or not record.kv_tokens or record.shard is not shard:
                continue
            if record.key not in held and record.entered_s[RequestState.QUEUED] <= asked_s:
                self.ledger.release(record.key)
                self._lose_kept(record)

    def lose_shard(self, shard: PoolShard, now_s: float) -> None:
        """A shard is gone for good with its node.

        Requests that decode, or are in a buffer, no longer need their copy there.
        """
        gone = list(shard.waiting.values())
        for record in self.open(shard.holders()):
            if record.state is RequestState.QUEUED:
                self._lose_kept(record)
            elif record.state is RequestState.PREFETCHED and not record.prefill_id:
                gone.append(record)  # its decode instance was to copy it from there
            elif record.shard is shard:
                record.pool_tokens = 0
        self.report_lost(gone, f"{shard.pool_id} has gone with its node", now_s)
        self.recent.lose_shard(shard.pool_id)
        self.ledger.forget(shard)

    def _lose_kept(self, record: Record) -> None:
        record.kv_tokens = record.blocks = 0
        record.shard = None
        self.queue.lose_kept(record.key)

    def refuse(self, group: Sequence[RequestMeta], error: AlignedServeError) -> None:
        """Refuse requests that were never opened."""
        keys = tuple(meta.key for meta in group)
        self.actions.append(Reject(keys, error))
        self._released += [meta.key for meta in group if meta.base_tokens]
        self._forgotten += keys

    def reject(self, records: list[Record], error: AlignedServeError, now_s: float) -> None:
        """End these requests and tell the gateway why. No worker holds anything of them."""
        if not records:
            return
        self.actions.append(Reject(tuple(record.key for record in records), error))
        for record in records:
            self.end(record, now_s)

    def reject_cancelled(self, records: list[Record], now_s: float) -> None:
        self.reject(records, CancelledError("the request was cancelled"), now_s)

    def report_lost(self, records: list[Record], reason: str, now_s: float, *, keep_copy: bool = True) -> None:
        """End these requests wherever they are; the gateway submits them again, except those that were cancelled.

        The pool's copies are kept for their next epoch, unless they have to make room.
        """
        lost = tuple(record.key for record in records if not record.cancelled)
        if lost:
            self.actions.append(ReportLost(lost, reason))
        self.cancel_at(records)
        self.reject_cancelled([record for record in records if record.cancelled], now_s)
        for key in lost:
            self.end(self.record(key), now_s, keep_copy=keep_copy)

    def abandon(self, record: Record, now_s: float) -> None:
        """End it wherever it is, without a message to the gateway, which already knows."""
        self.cancel_at([record])
        self.end(record, now_s)

    def cancel_at(self, records: Iterable[Record]) -> None:
        """Tell every live instance that may hold these requests: a prefetched one may be on either side."""
        holders: dict[tuple[str, str], list[RequestKey]] = {}
        for record in records:
            if record.prefill_id in self.instances.prefill:
                holders.setdefault(("prefill", record.prefill_id), []).append(record.key)
            if record.decode_id in self.instances.decode:
                holders.setdefault(("decode", record.decode_id), []).append(record.key)
        for (role, instance_id), keys in holders.items():
            self.actions.append(CancelAt(role, instance_id, tuple(keys)))

    def check_integrity(self) -> None:
        """Recount everything. Raises AccountingError if two counts of the same thing differ."""
        for part in (self.table, self.queue, self.ledger, self.sharing, self.clock):
            part.check_integrity()
        counts = self.table.counts
        decodes, prefills = self.instances.decode.values(), self.instances.prefill.values()
        waiting, prefetched = counts[RequestState.WAITING], counts[RequestState.PREFETCHED]
        candidates = sum(len(held) for view in decodes for held in view.candidates.values())
        counted = {
            "queued": (counts[RequestState.QUEUED], len(self.queue)),
            "prefilling": (counts[RequestState.PREFILLING], sum(len(view.prefilling) for view in prefills)),
            "policy": (waiting, self.sharing.totals()[0]),
            "pool": (waiting, sum(len(shard.waiting) for shard in self.ledger.shards)),
            "clock": (waiting + prefetched, len(self.clock)),
            "candidates": (prefetched, candidates),
            "decode times": (self.table.hurried(RequestState.DECODING), len(self.decode_times)),
            "decoding": (counts[RequestState.DECODING], sum(len(view.decoding) for view in decodes)),
        }
        for view in decodes:
            behind = sum(record.background for record in view.held())
            counted[f"{view.decode_id} background"] = (view.background.requests, behind)
            for kind, held in view.candidates.items():
                blocks = sum(record.blocks for record in held.values())
                counted[f"{view.decode_id} {kind.name}"] = (view.candidate_blocks[kind], blocks)
        for prefill in prefills:
            blocks = sum(record.blocks for record in self.open(prefill.buffered))
            counted[prefill.prefill_id] = (sum(buffer.committed for buffer in prefill.buffers.values()), blocks)
        wrong = {name: pair for name, pair in counted.items() if pair[0] != pair[1]}
        if wrong:
            raise AccountingError(f"counts that should agree differ: {wrong}")
