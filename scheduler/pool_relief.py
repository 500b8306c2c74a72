"""Keeps room in the KV pool for evictions: else a full pool, full buffers and a full cache would wait for each other.

In this order: clean copies of running requests are dropped; then, where an eviction has waited for a while all the
same, the KV of a request that waits, in the pool or as a candidate: it has to be prefilled again (counted;
architecture.md, section 8).
"""

from __future__ import annotations

from alignedserve.scheduler.admission import Admission
from alignedserve.scheduler.alarm import Recent
from alignedserve.scheduler.books import Books
from alignedserve.scheduler.request_table import Record

PATIENCE_TICKS = 5  # evictions must have waited for so long before the last resort
LOOK_BACK = 64  # waiting requests among which the cheapest to lose is looked for


class PoolRelief:
    def __init__(self, books: Books, admission: Admission) -> None:
        self._books = books
        self._admission = admission
        self._last_resort_s = 0.0  # when it is due; while evictions wait
        self._waiting = False
        self._drops = Recent()
        self.dropped_requests = 0  # by the last resort

    def relieve(self, now_s: float) -> None:
        """Look at the pool; call it with each report of the pool or of evictions that wait, and with each tick."""
        books = self._books
        if not books.ledger.capacity:  # its process is away: evictions wait for that, and not for room
            self._waiting = False
            return
        reports = [view.report for view in books.instances.decode.values() if view.report is not None]
        wanted = sum(report.pool_wait_blocks for report in reports)
        give_backs = sum(view.pool_wait_blocks for view in books.instances.prefill.values())
        missing = max(wanted + give_backs, self._admission.reserve_blocks() - books.ledger.free)
        if missing > 0:
            books.drop_copies(missing)
        tick_s = books.config.scheduler.tick_s
        if wanted and not self._waiting:
            self._last_resort_s = now_s + PATIENCE_TICKS * tick_s
        elif wanted and now_s >= self._last_resort_s:
            self._last_resort_s = now_s + tick_s
            self._last_resort(now_s)
        self._waiting = wanted > 0

    def alarm(self, now_s: float) -> str:
        """What to tell people, with the figures, while the last resort was needed within the last minute; else ""."""
        drops = self._drops.count(now_s)
        if not drops:
            return ""
        ledger = self._books.ledger
        return (
            f"KV was dropped {drops} times in the last minute, to be prefilled again: the KV pool "
            f"({ledger.capacity} blocks) is too small for what decodes; set kv_pool.size_gib higher"
        )

    def _last_resort(self, now_s: float) -> None:
        books = self._books
        record = self._cheapest() if books.in_pool else self._latest_candidate()
        if record is not None:
            self.dropped_requests += 1
            self._drops.add(now_s)
            books.report_lost([record], "the KV pool is full", now_s, keep_copy=False)

    def _cheapest(self) -> Record:
        """Of those that came last: one that has never decoded, so that no generated token is prefilled again."""
        waiting = reversed(self._books.in_pool.values())
        latest = [record for _, record in zip(range(LOOK_BACK), waiting, strict=False)]
        return next((record for record in latest if record.kv_tokens <= record.meta.prefix_tokens), latest[0])

    def _latest_candidate(self) -> Record | None:
        """The last of the candidates that have not joined, as far as is known here."""
        for decode in self._books.instances.decode.values():
            for held in decode.candidates.values():
                if held:
                    return next(reversed(held.values()))
        return None
