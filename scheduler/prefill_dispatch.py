"""Groups go to prefill instances first come, first served, while one can take more and the pool has room."""

from __future__ import annotations

from alignedserve.scheduler.actions import StartPrefill
from alignedserve.scheduler.admission import Admission
from alignedserve.scheduler.books import Books
from alignedserve.scheduler.prefill_queue import QueuedGroup
from alignedserve.scheduler.routing import PrefillLoad, able_to_prefill, choose_prefill


class PrefillDispatch:
    def __init__(self, books: Books, admission: Admission) -> None:
        self._books = books
        self._admission = admission

    def start(self, now_s: float) -> None:
        """Start what can start. Nobody overtakes the first in line, which waits at most until the pool is empty."""
        books = self._books
        while (group := books.queue.head()) is not None and self._admission.ready():
            refusal = self._admission.too_large(books.record(group.keys[0]).meta)
            if refusal is not None:
                books.reject(books.open(list(group.keys)), refusal, now_s)
                continue
            loads = (view.load for view in books.instances.open_prefill())
            able = able_to_prefill(loads, group.tokens, books.config.prefill.queued_tokens, group.kept_tokens)
            if not able or not self._make_room(group):
                return
            load = choose_prefill(able, group.work_tokens)  # last: predicting takes longest, and the pool is often full
            assert load is not None
            self._begin(books.queue.pop(), load, now_s)

    def _make_room(self, group: QueuedGroup) -> bool:
        """Whether the pool has room for the group, if need be by dropping clean copies of what decodes."""
        books = self._books
        first = books.record(group.keys[0])
        books.ledger.pin(first.key)  # room is not made with what it is about to use
        blocks = sum(self._admission.group_blocks(group.tokens, len(group.keys))) - first.blocks
        most_tokens = first.meta.max_total_tokens
        missing = self._admission.missing_blocks(blocks, most_tokens, first.blocks)
        if missing > 0:
            books.drop_copies(missing)
            missing = self._admission.missing_blocks(blocks, most_tokens, first.blocks)
        if missing > 0:
            books.ledger.mark_droppable(first.key)  # it waits on: evictions go before it
        return missing <= 0

    def _begin(self, group: QueuedGroup, load: PrefillLoad, now_s: float) -> None:
        blocks = self._admission.group_blocks(group.tokens, len(group.keys))
        first = self._books.record(group.keys[0])
        blocks[0] -= first.blocks
        for record, needed in zip(self._books.open(group.keys), blocks, strict=True):
            self._books.begin_prefill(record, load.prefill_id, needed, now_s)
        first.prefill_tokens = group.work_tokens
        load.begin(first.prefill_tokens)
        self._books.actions.append(StartPrefill(load.prefill_id, tuple(group.keys), first.kv_tokens))
