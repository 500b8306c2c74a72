"""Keeps room in the pool for evictions. Otherwise a full pool, full buffers and a full cache would wait for each other.

First, clean copies of running requests are dropped from the full shard. If an eviction still waits after a while,
prompts let go of the cached prefixes that they hold, and the KV of a request that waits in the pool or as a candidate
is dropped. That request is prefilled again, and is counted.
"""

from __future__ import annotations

from alignedserve.scheduler.core.actions import GiveUpPins
from alignedserve.scheduler.core.admission import Admission
from alignedserve.scheduler.core.alarm import LastMinute
from alignedserve.scheduler.core.pool_shard import PoolShard
from alignedserve.scheduler.core.request_table import Record
from alignedserve.scheduler.core.state import CoreState

PATIENCE_TICKS = 5  # evictions must have waited this long before the last resort
LOOK_BACK = 64  # how many waiting requests are searched for the cheapest to lose


class PoolRelief:
    def __init__(self, state: CoreState, admission: Admission) -> None:
        self._state = state
        self._admission = admission
        self._due_s: dict[PoolShard, float] = {}  # when the last resort is due, for each shard that evictions wait for
        self._drops = LastMinute()
        self._capacity = 0  # of the shard of the latest drop
        self.dropped_requests = 0  # by the last resort

    def relieve(self, now_s: float, shard: PoolShard | None) -> None:
        """Make room in a shard. Called at each report of it or of evictions that wait for it, and at each tick.

        Room in another shard does not help writes to this one.
        """
        if shard is None:
            return
        state = self._state
        if not shard.capacity:  # its process is away: evictions wait for its return, not for room
            self._due_s.pop(shard, None)
            return
        reports = [view.report for view in state.decode_at(shard) if view.report is not None]
        wanted = sum(report.pool_wait_blocks for report in reports)
        waiting = [view for view in state.instances.prefill.values() if view.pool_wait_blocks]
        give_backs = sum(view.pool_wait_blocks for view in waiting if state.home(view.prefill_id) is shard)
        missing = max(wanted + give_backs, self._admission.reserve_blocks(shard) - shard.free)
        if missing > 0:
            state.drop_copies(missing, shard)
        tick_s = state.config.scheduler.tick_s
        if not wanted:
            self._due_s.pop(shard, None)
        elif shard not in self._due_s:
            self._due_s[shard] = now_s + PATIENCE_TICKS * tick_s
        elif now_s >= self._due_s[shard]:
            self._due_s[shard] = now_s + tick_s
            if state.config.kv_pool.prefix_cache:
                state.actions.append(GiveUpPins(shard.pool_id))
            self._last_resort(shard, now_s)

    def forget(self, shard: PoolShard) -> None:
        """Forget a shard that is gone with its node."""
        self._due_s.pop(shard, None)

    def alarm(self, now_s: float) -> str:
        """Alarm text with figures if the last resort was needed within the last minute; else ""."""
        drops = self._drops.count(now_s)
        if not drops:
            return ""
        return (
            f"KV was dropped {drops} times in the last minute, and prefilled again: the KV pool "
            f"({self._capacity} blocks) is too small for the running requests; increase kv_pool.size_gib"
        )

    def _last_resort(self, shard: PoolShard, now_s: float) -> None:
        record = self._cheapest(shard) if shard.waiting else self._latest_candidate(shard)
        if record is not None:
            self.dropped_requests += 1
            self._drops.add(now_s)
            self._capacity = shard.capacity
            self._state.report_lost([record], "the KV pool is full", now_s, keep_copy=False)

    def _cheapest(self, shard: PoolShard) -> Record:
        """Among the latest waiting requests, one that has never decoded, so that no generated token is recomputed.

        Of those that only take what others leave, if any wait.
        """
        waiting = reversed((shard.background or shard.waiting).values())
        latest = [record for _, record in zip(range(LOOK_BACK), waiting, strict=False)]
        return next((record for record in latest if record.kv_tokens <= record.meta.prefix_tokens), latest[0])

    def _latest_candidate(self, shard: PoolShard) -> Record | None:
        """The latest candidate that has not joined, as far as the core knows, and has a copy in the shard."""
        for decode in self._state.instances.decode.values():
            for held in decode.candidates.values():
                for record in reversed(held.values()):
                    if self._state.ledger.only or self._state.ledger.shard_of(record.key) is shard:
                        return record
        return None
