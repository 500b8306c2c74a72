"""Step 4 of the paper's figure 4: which requests are brought from the pool for which decode instance, and when.

A request leaves the pool in the next candidate batch, or late, into the candidate request buffer (dynamic scheduling,
section 3.5). Fewer than N requests do not form a batch. An idle instance takes them all the same, and never waits for
better-aligned ones. A busy instance with room takes them late, whatever their prefix lengths, once `flush_after_s` have
passed since it was last sent something. A full instance waits for N requests or K blocks, since its next batch can only
run later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from alignedserve.request import RequestKey
from alignedserve.scheduler.batch_generator import BatchLimits
from alignedserve.scheduler.core.actions import MarkUrgent, Prefetch
from alignedserve.scheduler.core.instances import DecodeView, PrefillView
from alignedserve.scheduler.core.prefetch_paths import PrefetchPath, PrefetchPaths
from alignedserve.scheduler.core.rebalance import Rebalancer
from alignedserve.scheduler.core.request_table import Record, RequestState
from alignedserve.scheduler.core.sharing import Share
from alignedserve.scheduler.core.state import CoreState
from alignedserve.scheduler.instance.plan import BufferKind
from alignedserve.scheduler.length_ranges import join_range
from alignedserve.scheduler.policies.base import Entry, InstanceState
from alignedserve.scheduler.priorities import BACKGROUND

# More batches than a predecessor may have sent after the newest running one (about one for each instance)
UNSEEN_BATCHES = 1 << 16


class PrefetchPlanner:
    """Moves requests from WAITING to PREFETCHED; from there on the decode instance decides about them."""

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._config = state.config
        self._block_size = state.block_size
        self._instances = state.instances
        self._sharing = state.sharing
        self._clock = state.clock
        self._rebalancer = Rebalancer(state)
        self._paths = PrefetchPaths(state)
        self._last_batch_id = 0
        self.bypassed_requests = 0  # sent without a candidate buffer, although there are some

    def place(self, record: Record, now_s: float) -> None:
        """A request has entered the pool: send it to an instance that can take it now, if there is one."""
        decodes = self._instances.open_decode()
        for decode in decodes:
            if decode.idle and self._next_batch(decode, now_s) and record.state is not RequestState.WAITING:
                return
        if record.state is not RequestState.WAITING:
            return
        nearest = self._sharing.order(decodes, record.kv_tokens)
        if record.moved:  # it was recalled from a full instance, and must not go to another full one
            nearest = [decode for decode in nearest if decode.has_room(self._config, self._block_size, record.blocks)]
        for decode in nearest:
            lengths = self._range(decode)
            if lengths is None or not self._sharing.takes(decode, record.key):
                continue
            if not self._sharing.share_of(decode).policy.matches(record.kv_tokens, *lengths):
                continue
            if self._takes_late(decode):
                self._late_matches(decode, now_s, record.blocks)
            if record.state is not RequestState.WAITING:
                return
        for decode in nearest:
            if self._next_batch(decode, now_s) and record.state is not RequestState.WAITING:
                return

    def feed(self, decode: DecodeView, now_s: float) -> None:
        """The state of the decode instance has changed: fill its candidate buffers."""
        if decode.report is None or decode.decode_id in self._instances.draining:
            return
        if not self._sharing.totals()[0]:
            self._rebalancer.ask_back(decode, now_s)
            return
        if self._takes_late(decode):
            self._late_matches(decode, now_s)
        self._next_batch(decode, now_s)

    def learn_batch_id(self, batch_id: int) -> None:
        """Learn the id of a running batch.

        A predecessor of this core may have sent later batches that are not known yet. If two batches had the same id,
        they would be taken for one: there would be no batch switch, and no member would count as old.
        """
        if batch_id > self._last_batch_id:
            self._last_batch_id = batch_id + UNSEEN_BATCHES

    def mark_overdue(self, records: Sequence[Record], now_s: float) -> None:
        """Tell the decode instances of these prefetched requests that they became overdue."""
        by_decode: dict[str, dict[RequestKey, float]] = {}
        for record in records:
            due_s = self._clock.due_s(record.key)
            by_decode.setdefault(record.decode_id, {})[record.key] = due_s
            if record.buffer is BufferKind.BATCH:
                self._instances.decode[record.decode_id].overdue[record.key] = due_s
        for decode_id, due in by_decode.items():
            due_in_s = tuple(due_s - now_s for due_s in due.values())
            self._state.actions.append(MarkUrgent(decode_id, tuple(due), due_in_s))

    # the next candidate batch

    def _next_batch(self, decode: DecodeView, now_s: float) -> bool:
        """Form the next candidate batch if this instance's buffer is empty and it is time.

        Returns whether one was sent.
        """
        share, limits = self._taking(decode)
        requests, blocks = share.policy.totals()
        if decode.report is None or not requests:
            return False
        seed = self._seed(decode, share, limits)
        if seed is None and self._send_ahead(decode, share, limits, now_s):
            return True
        if decode.candidates[BufferKind.BATCH]:
            return seed is not None and self._send_overdue(decode, seed, now_s)
        enough = requests >= limits.min_requests or blocks >= limits.max_blocks
        if seed is None and not enough:
            if not self._takes_few(decode, -(-blocks // requests), now_s):
                return False
            if not decode.idle and self._send_few(decode, share, limits, now_s):
                return True
        return self._send_batch(decode, share, limits, seed, now_s)

    def _send_batch(
        self, decode: DecodeView, share: Share, limits: BatchLimits, seed: RequestKey | None, now_s: float
    ) -> bool:
        """Form a candidate batch and send it, if a buffer can hold it. Returns whether one was sent."""
        requests, blocks = share.policy.totals()
        least = min(limits.max_blocks, -(-blocks * min(limits.min_requests, requests) // requests))  # N of mean length
        prefill, room = self._choose_buffer(decode, BufferKind.BATCH, least)
        at_once = decode.idle or seed is not None
        if room <= 0 and at_once and prefill is not None:
            prefill, room = None, limits.max_blocks  # the buffers are full: bypass them
        if room <= 0:
            return False
        share.policy.look_at(_decode_state(decode, self._block_size))
        entries = share.policy.form(replace(limits, max_blocks=min(limits.max_blocks, room)), seed, now_s)
        records = self._fitting(decode, entries)
        total = sum(record.blocks for record in records)
        if not records or (total > limits.max_blocks and self._only_helps(decode, share)):
            return False
        if prefill is not None:  # now that its size is known
            prefill, room = self._choose_buffer(decode, BufferKind.BATCH, total)
        if total > room:  # a single request, larger than K or than the free room
            if prefill is not None and total <= self._largest_buffer(decode) and not at_once:
                return False
            prefill = None  # no buffer can hold it, now or ever: the decode instance copies it from the pool itself
        else:
            decode, prefill = self._specialist(decode, prefill, records, total)
        self._last_batch_id += 1
        decode.batch_id = self._last_batch_id
        decode.batch_rank = min(record.rank for record in records)
        decode.batch_sent_s = now_s
        self._send(decode, prefill, BufferKind.BATCH, decode.batch_id, records, now_s)
        return True

    def _send_overdue(self, decode: DecodeView, key: RequestKey, now_s: float) -> bool:
        """Send an overdue request alone if every taker has a candidate batch and nothing sent here is due before it.

        Only one at a time: until it has joined, nothing else is sent late except requests that are due before it.
        """
        record = self._state.record(key)
        due_s = self._clock.due_s(key)
        if due_s >= min(decode.overdue.values(), default=math.inf):
            return False
        if not all(view.candidates[BufferKind.BATCH] for view in self._sharing.takers(decode)):
            return False
        if not self._fitting(decode, [record]):
            return False
        prefill, room = self._choose_buffer(decode, BufferKind.REQUESTS, record.blocks)
        self._send(
            decode,
            prefill if room >= record.blocks else None,
            BufferKind.REQUESTS,
            decode.running_batch_id(),
            [record],
            now_s,
        )
        decode.overdue[key] = due_s
        return True

    def _send_ahead(self, decode: DecodeView, share: Share, limits: BatchLimits, now_s: float) -> bool:
        """Send requests of the least rank past those that would delay them. Returns whether any were sent.

        They go past a candidate batch of higher ranks, and to the places of requests that only take what others leave.
        """
        rank, behind = share.policy.first_rank(), decode.candidates[BufferKind.BATCH]
        yields = decode.background.requests and rank is not None and rank < BACKGROUND
        if rank is None or decode.bounced or not (yields or (behind and rank < decode.batch_rank)):
            return False
        room, slots = decode.room_for_others(self._config, self._block_size)
        if not yields:
            room = self._choose_buffer(decode, BufferKind.REQUESTS, room)[1]
            slots = decode.max_running(self._config) - len(decode.candidates[BufferKind.REQUESTS])
        if room > 0 and slots > 0:
            share.policy.look_at(_decode_state(decode, self._block_size))
            most = min(limits.max_blocks, room), min(limits.max_requests, slots)
            entries = share.policy.form_of(rank, BatchLimits(most[0], limits.min_requests, most[1]), now_s)
            records = self._fitting(decode, entries)
            total = sum(record.blocks for record in records)
            if records and total <= room:
                prefill, free = self._choose_buffer(decode, BufferKind.REQUESTS, total)
                batch_id = decode.running_batch_id()
                self._send(decode, prefill if free >= total else None, BufferKind.REQUESTS, batch_id, records, now_s)
                return True
        requests, blocks = share.policy.totals_of(rank)
        if decode.batch_rank > rank and (requests >= limits.min_requests or blocks >= limits.max_blocks):
            self._rebalancer.give_way(behind.values(), now_s)
        return False

    def _limits(self, decode: DecodeView, room: int | None = None) -> BatchLimits:
        """K (at most `room`) and N for a decode instance."""
        config = self._config.scheduler
        most = config.max_batch_blocks or max(1, int(config.max_batch_share * decode.cache_blocks))
        most = most if room is None else min(most, room)
        most_requests = decode.max_running(self._config)
        return BatchLimits(most, min(config.min_batch_requests, most_requests), most_requests)

    def _takes_few(self, decode: DecodeView, blocks: int, now_s: float) -> bool:
        """Whether the instance is idle, or has room and was sent nothing for `flush_after_s`."""
        return decode.idle or (
            now_s - decode.batch_sent_s >= self._config.scheduler.flush_after_s
            and decode.has_room(self._config, self._block_size, blocks)
        )

    def _taking(self, decode: DecodeView) -> tuple[Share, BatchLimits]:
        """What the instance takes from now, and how much at a time.

        That is its own share. If that is empty, it is another one that has something for its room; if it is not idle,
        no more than can join at once, for its own lengths may come soon.
        """
        own, limits = self._sharing.share_of(decode), self._limits(decode)
        other = None if own.policy.totals()[0] or decode.report is None else self._sharing.helps(decode)
        if other is None:
            return own, limits
        if decode.idle:
            return other, limits
        requests, blocks = other.policy.totals()
        if not decode.has_room(self._config, self._block_size, -(-blocks // requests)):
            return own, limits
        room, slots = decode.free_blocks(self._config, self._block_size), limits.max_requests - decode.size
        if slots <= 0:
            return own, limits
        return other, replace(limits, max_blocks=min(limits.max_blocks, room), max_requests=slots)

    def _seed(self, decode: DecodeView, share: Share, limits: BatchLimits) -> RequestKey | None:
        """The share's overdue request with the earliest deadline, unless it is too large for an instance that helps."""
        seed = share.seed()
        if seed is None or not self._only_helps(decode, share):
            return seed
        return seed if self._state.record(seed).blocks <= limits.max_blocks else None

    def _only_helps(self, decode: DecodeView, share: Share) -> bool:
        """Whether the share is another one's, and the instance busy with its own lengths."""
        return not decode.idle and share is not self._sharing.share_of(decode)

    def _send_few(self, decode: DecodeView, share: Share, limits: BatchLimits, now_s: float) -> bool:
        """Send all waiting requests, too few for a batch, to join the running batch.

        Returns False if the candidate request buffer cannot hold them.
        """
        waiting = share.policy.totals()[1]
        prefill, room = self._choose_buffer(decode, BufferKind.REQUESTS, waiting)
        if room <= 0 or decode.bounced:
            return False
        share.policy.look_at(_decode_state(decode, self._block_size))
        entries = share.policy.form(replace(limits, max_blocks=min(limits.max_blocks, room)), None, now_s)
        records = self._fitting(decode, entries)
        total = sum(record.blocks for record in records)
        prefill, room = self._choose_buffer(decode, BufferKind.REQUESTS, total)
        if not records or total > min(room, limits.max_blocks):
            return False
        decode.batch_sent_s = now_s
        self._send(decode, prefill, BufferKind.REQUESTS, decode.running_batch_id(), records, now_s)
        return True

    def _specialist(
        self, asking: DecodeView, prefill: PrefillView | None, records: Sequence[Record], total: int
    ) -> tuple[DecodeView, PrefillView | None]:
        """Of the busy instances that need a batch, the one whose running prefix lengths are nearest to this batch's.

        An idle instance keeps the batch it asked for: waiting costs it more than mixed lengths.
        """
        if asking.idle or len(self._instances.decode) == 1 or not self._sharing.REDIRECTS:
            return asking, prefill
        tokens = sum(record.kv_tokens for record in records) // len(records)
        best, best_prefill, nearest = asking, prefill, asking.distance(tokens)
        for other in self._instances.open_decode():
            if other.report is None or other.idle or other.candidates[BufferKind.BATCH]:
                continue
            most = self._limits(other)
            fits = total <= most.max_blocks and len(records) <= most.max_requests
            if other.distance(tokens) < nearest and fits:
                buffer, room = self._choose_buffer(other, BufferKind.BATCH, total)
                if total <= room and len(self._fitting(other, records)) == len(records):
                    best, best_prefill, nearest = other, buffer, other.distance(tokens)
        return best, best_prefill

    # late joins

    def _takes_late(self, decode: DecodeView) -> bool:
        """Whether late joins are allowed: not while an overdue request waits that they would delay.

        During a batch switch they continue, into the new batch: filled only from further batches, it would never become
        one batch again.
        """
        if decode.report is None or decode.overdue or decode.bounced:
            return False
        share = self._sharing.share_of(decode)
        if decode.candidates[BufferKind.BATCH] and (self._sharing.takes_own(decode) or not share.policy.overtakes()):
            return False
        return share.seed() is None

    def _range(self, decode: DecodeView) -> tuple[int, int] | None:
        lengths = decode.batch_lengths()
        return None if lengths is None else join_range(*lengths, self._config.scheduler.join_window)

    def _late_matches(self, decode: DecodeView, now_s: float, least_room: int = 1) -> None:
        """Dynamic scheduling: send requests of the pool whose prefix length has come to match the running batch.

        `least_room`: blocks below which the search is skipped (the other waiting requests did not fit before, either).
        """
        lengths, policy = self._range(decode), self._sharing.share_of(decode).policy
        if lengths is None:
            return
        for prefill, room in self._buffers(decode, BufferKind.REQUESTS):
            slots = decode.max_running(self._config) - len(decode.candidates[BufferKind.REQUESTS])
            if room < least_room or slots <= 0:
                continue
            records = self._fitting(decode, policy.matching(*lengths, BatchLimits(room, 1, slots)))
            if records:
                self._send(decode, prefill, BufferKind.REQUESTS, decode.running_batch_id(), records, now_s)

    # both

    def _buffers(self, decode: DecodeView, kind: BufferKind) -> list[tuple[PrefillView | None, int]]:
        """Where such candidates can go, and the room there in blocks: one prefill instance a link rank, best first.

        None means that there are no buffers; candidates on their way count against the decode instance's own cache.
        """
        if decode.decode_id not in self._instances.pairs and self._config.cluster.prefetch:
            return [(None, 0)]  # the pairing is not known yet
        if roomiest := self._instances.roomiest(decode, kind):
            return [*roomiest]
        return [(None, self._direct_room(decode, kind))]

    def _direct_room(self, decode: DecodeView, kind: BufferKind) -> int:
        """Blocks that may still be announced to the instance for direct copies from the pool."""
        most = self._limits(decode).max_blocks
        share = most if kind is BufferKind.BATCH else max(1, most // 2)
        return share - decode.candidate_blocks[kind]

    def _choose_buffer(self, decode: DecodeView, kind: BufferKind, blocks: int) -> tuple[PrefillView | None, int]:
        """The best-linked buffer with room for `blocks` blocks; if none has, the one with the most room."""
        buffers = self._buffers(decode, kind)
        enough = (buffer for buffer in buffers if buffer[1] >= blocks)
        return next(enough, None) or max(buffers, key=lambda buffer: buffer[1])

    def _largest_buffer(self, decode: DecodeView) -> int:
        return max(prefill.buffers[BufferKind.BATCH].capacity for prefill in self._instances.paired(decode))

    def _fitting(self, decode: DecodeView, entries: Sequence[Entry] | Sequence[Record]) -> list[Record]:
        """The records of the requests that the instance's cache can hold up to their maximum length."""
        most = decode.request_blocks * self._block_size
        records = (self._state.table.get(entry.key) for entry in entries)
        return [record for record in records if record is not None and record.meta.max_total_tokens <= most]

    def _send(
        self,
        decode: DecodeView,
        prefill: PrefillView | None,
        kind: BufferKind,
        batch_id: int,
        records: Sequence[Record],
        now_s: float,
    ) -> None:
        overdue = sorted(filter(self._is_overdue, records), key=lambda record: self._clock.due_s(record.key))
        records = [*overdue, *(record for record in records if not self._is_overdue(record))]
        paths: list[PrefetchPath] = [(prefill, records)]
        if prefill is not None and self._state.ledger.only is None:
            paths = self._paths.split(decode, prefill, kind, records, self._direct_room(decode, kind))
        for buffer, part in paths:
            prefill_id = "" if buffer is None else buffer.prefill_id
            if buffer is None and self._config.cluster.prefetch:
                self.bypassed_requests += len(part)
            for record in part:
                self._state.prefetch(record, decode.decode_id, prefill_id, kind, now_s)
            keys = tuple(record.key for record in part)
            self._state.actions.append(Prefetch(decode.decode_id, prefill_id or None, kind, batch_id, keys))
        self.mark_overdue(overdue, now_s)

    def _is_overdue(self, record: Record) -> bool:
        return self._clock.is_overdue(record.key)


def _decode_state(decode: DecodeView, block_size: int) -> InstanceState:
    report = decode.report
    running = 0 if report is None else report.running
    shortest, longest = (report.shortest_tokens, report.longest_tokens) if report is not None and running else (0, 0)
    mean = min(max(decode.mean_tokens, shortest), longest)
    return InstanceState(running, shortest, longest, mean, decode.cost, decode.cache_blocks * block_size)
