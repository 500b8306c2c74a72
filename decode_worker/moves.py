"""Requests on their way from the cache of one rank to that of another, where each has its own. They pause meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from alignedserve.decode_worker.held import Held, Outcome
from alignedserve.errors import TransferError
from alignedserve.metrics import Page
from alignedserve.request import RequestKey, Stage
from alignedserve.scheduler.instance.iteration import IterationScheduler
from alignedserve.scheduler.instance.plan import Relocate
from alignedserve.transfer.completion import Completion

logger = logging.getLogger(__name__)

CopyWithin = Callable[[Sequence[int], Sequence[int], str], Completion]
"""Starts a copy from blocks of the cache to others, for the request of an id."""
Tell = Callable[[Callable[[Outcome], None]], None]


class Moves:
    """Used by the decode thread. `tell` gives it a message."""

    def __init__(
        self, scheduler: IterationScheduler, held: dict[RequestKey, Held], copy: CopyWithin | None, tell: Tell
    ) -> None:
        """`copy`: None if the scheduler moves nothing."""
        self._scheduler, self._held, self._copy, self._tell = scheduler, held, copy, tell
        self._moves = self._failed = self._blocks = 0  # since the start

    def show_metrics(self, page: Page) -> None:
        meaning = "where ranks have a cache each: requests that went from one to another"
        page.counter("decode_moves_total", meaning, self._moves)
        page.counter("decode_failed_moves_total", "moves whose copy failed: the request stayed", self._failed)
        page.counter("decode_moved_blocks_total", "blocks that were copied for them", self._blocks)

    def begin(self, move: Relocate) -> None:
        """Start to copy the request. It runs on when the copy has ended, here or, if it fails, where it was."""
        assert self._copy is not None
        live, label = self._held[move.key].live, move.key.request_id
        assert live is not None
        live.spec.stopwatch.enter(Stage.HANDOVER, time.time_ns())
        try:
            copy = self._copy(move.source_ids, move.block_ids, label)
        except TransferError as error:
            copy = Completion(label)
            copy.finish(error)
        copy.add_callback(lambda ended: self._tell(lambda outcome: self._ended(move, ended.error, outcome)))

    def _ended(self, move: Relocate, error: TransferError | None, outcome: Outcome) -> None:
        key = move.key
        if error is None:
            self._moves += 1
            self._blocks += len(move.block_ids)
            runs_on = self._scheduler.copied_in(key)
        else:
            self._failed += 1
            logger.warning("a move between ranks failed: %s", error, extra={"request_id": key.request_id})
            runs_on = self._scheduler.copy_failed(key)
        if not runs_on:  # cancelled meanwhile
            del self._held[key]
            outcome.finished.append(key)
