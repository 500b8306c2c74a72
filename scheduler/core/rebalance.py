"""Recalls candidates that wait for a full decode instance while another has room and the pool is empty.

They return to the pool and are then sent where there is room. Until the decode instance has returned a candidate, it
still decides about it: a candidate that joins in the meantime stays. A late candidate is not moved a second time before
it has joined, so that requests do not go back and forth. Only for an idle instance, part of a candidate batch is
recalled.
"""

from __future__ import annotations

from collections.abc import Iterable

from alignedserve.scheduler.core.instances import DecodeView
from alignedserve.scheduler.core.request_table import Record, RequestState
from alignedserve.scheduler.core.state import CoreState
from alignedserve.scheduler.instance.plan import BufferKind

PREFETCHED = RequestState.PREFETCHED


class Rebalancer:
    """Recalls candidates for instances that have room and nothing on its way to them."""

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._config = state.config
        self._block_size = state.block_size
        self._instances = state.instances

    def ask_back(self, decode: DecodeView, now_s: float) -> None:
        """The pool has nothing for this instance: recall candidates that wait for full instances."""
        if decode.idle:
            self._halve_batches(now_s)
        if len(self._instances.decode) < 2 or decode.size >= decode.max_running(self._config):
            return
        if any(decode.candidates.values()):
            return
        pending = [record for record in decode.asked_back if record.recalled and record.state is PREFETCHED]
        slots = decode.max_running(self._config) - decode.size - len(pending)
        room = decode.free_blocks(self._config, self._block_size) - sum(record.blocks for record in pending)
        found: list[Record] = []
        for full in self._instances.open_decode():
            for record in self._stranded(full, now_s):
                if len(found) < slots and record.blocks <= room:
                    found.append(record)
                    room -= record.blocks
        if found:
            decode.asked_back = pending + found
            self._state.recall(found)

    def give_way(self, candidates: Iterable[Record], now_s: float) -> None:
        """Recall candidates for a batch that is to go before them; each once before it joins."""
        self._state.recall([record for record in candidates if not record.moved and self._settled(record, now_s)])

    def _halve_batches(self, now_s: float) -> None:
        """Recall half of each candidate batch that waits for an instance without free slots or blocks."""
        for full in self._instances.open_decode():
            waiting = [*full.candidates[BufferKind.BATCH].values()]
            crowded = full.size > full.max_running(self._config)
            if waiting and (crowded or full.free_blocks(self._config, self._block_size) < 0):
                self._state.recall([record for record in waiting[len(waiting) // 2 :] if self._settled(record, now_s)])

    def _settled(self, record: Record, now_s: float) -> bool:
        """Whether it was sent at least a tick ago.

        A newer candidate may not have been announced yet and miss the recall. An instance ignores recalls of unknown
        requests, and no request is recalled twice.
        """
        return record.entered_s[PREFETCHED] <= now_s - self._config.scheduler.tick_s

    def _stranded(self, full: DecodeView, now_s: float) -> list[Record]:
        """Late candidates that an instance has no room for, latest first."""
        late = full.candidates[BufferKind.REQUESTS]
        if not late:
            return []
        too_many = len(full.decoding) + len(late) - full.max_running(self._config)
        # Late candidates join before the batch, so the batch takes no room from them.
        free = full.free_blocks(self._config, self._block_size) + full.candidate_blocks[BufferKind.BATCH]
        found = []
        for record in reversed(late.values()):
            if too_many <= 0 and free >= 0:
                break
            if record.moved or not self._settled(record, now_s):
                continue
            if not record.recalled:  # otherwise it is already on its way back
                found.append(record)
            too_many -= 1
            free += record.blocks
        return found
