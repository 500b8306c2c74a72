"""Runs one batch whose lease this gateway holds: validates its file, answers its lines, and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from alignedserve.errors import AlignedServeError, CancelledError, StaleError
from alignedserve.gateway.batches.batches import BatchStore, Claim, LineAnswer
from alignedserve.gateway.batches.database import StoreError
from alignedserve.gateway.batches.gate import Gate
from alignedserve.gateway.batches.grouped import lines_in_order
from alignedserve.gateway.batches.jsonl import Line, LineReader, Named, Validator
from alignedserve.gateway.batches.lines import LineAnswerer, unanswered
from alignedserve.gateway.batches.states import BatchStatus
from alignedserve.gateway.ledger.calls import caller
from alignedserve.gateway.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

GATHER_S = 0.02  # answers of this time are written together
MOST_AT_ONCE = 256
STORE_AGAIN_S = 1.0

# Runs a method of the store in the store's thread.
Call = Callable[..., Awaitable[Any]]


class BatchExpiredError(AlignedServeError):
    """The line was not answered within the batch's completion window."""

    code = "batch_expired"


class BatchCancelledError(CancelledError):
    """The batch was cancelled before the line was answered."""

    code = "batch_cancelled"


class BatchRunner:
    """`run` returns when the batch has ended, the lease was lost, or after `stop`.

    `path`: the input file. `model`: which lines may name. Lines have at most `most_bytes` bytes. `by_prefix`:
    lines whose prompts begin alike are submitted together.
    """

    def __init__(
        self,
        claim: Claim,
        store: BatchStore,
        call: Call,
        path: Path,
        answerer: LineAnswerer,
        gate: Gate,
        metrics: GatewayMetrics,
        *,
        model: Named,
        most_lines: int,
        most_bytes: int,
        by_prefix: bool = False,
    ) -> None:
        self.claim = claim
        self.renewed_s = asyncio.get_running_loop().time()  # when the lease was last extended
        self._store = store
        self._call = call
        self._path = path
        self._answerer = answerer
        self._gate = gate
        self._metrics = metrics
        self._model = model
        self._most_lines = most_lines
        self._most_bytes = most_bytes
        self._by_prefix = by_prefix
        self._stopped = False
        self._lost = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._unwritten: list[tuple[LineAnswer, int]] = []  # answers with the sizes of their lines
        self._writing = asyncio.Lock()

    def stop(self) -> None:
        """Ends the run, so that another gateway may go on with the batch. Lines in flight are dropped."""
        self._stopped = True

    def lose(self) -> None:
        """The lease is another gateway's, or may be: nothing more is submitted or written."""
        self._lost = True

    def _going(self) -> bool:
        return self.claim.status is BatchStatus.IN_PROGRESS and not (self._stopped or self._lost)

    async def run(self) -> None:
        caller.set(self.claim.owner)  # its requests belong to the API key that made the batch
        try:
            if self.claim.status is BatchStatus.VALIDATING:
                await self._validate()
            if self._going():
                await self._answer_lines()
            if not (self._stopped or self._lost or self.claim.status.ended):
                await self._end()
        except StaleError:
            self._lost = True
        except Exception:  # its lease is kept until it runs out, so that the next try is not at once
            logger.exception("batch %s: the run ended", self.claim.id)
            return
        if self._lost:
            logger.warning("batch %s: another gateway has taken it over", self.claim.id)
            return
        with contextlib.suppress(StoreError):  # then the lease runs out
            await self._call(self._store.release, self.claim)

    # ---- validation

    async def _validate(self) -> None:
        claim = self.claim
        if claim.overdue:  # it could not be read all this time
            message = "the input file could not be validated within the completion window"
            await self._fail([{"code": BatchExpiredError.code, "message": message, "param": None, "line": None}])
            return
        try:
            validator = await asyncio.to_thread(
                Validator, self._path, claim.endpoint, self._model, self._most_lines, self._most_bytes
            )
        except FileNotFoundError:
            await self._fail(
                [{"code": "file_not_found", "message": "the input file is gone", "param": None, "line": None}]
            )
            return
        try:
            while not await asyncio.to_thread(validator.step):
                if self._stopped or self._lost or self.claim.status is not BatchStatus.VALIDATING:
                    return
        finally:
            validator.close()
        if validator.errors:
            await self._fail(validator.errors)
        else:
            self.claim = await self._call(self._store.begin, claim, validator.total)

    async def _fail(self, errors: list[dict[str, Any]]) -> None:
        self.claim = await self._call(self._store.fail, self.claim, errors)
        if self.claim.status is BatchStatus.FAILED:
            self._metrics.on_batch_end(self.claim.status)

    # ---- answers

    async def _answer_lines(self) -> None:
        try:
            await self._submit_lines()
            while self._tasks and self._going():
                await asyncio.wait(self._tasks, timeout=GATHER_S)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._write()
            for _, size in self._unwritten:  # the lease is lost, or the store has failed
                self._gate.leave(size, answered=False)
            self._unwritten.clear()

    async def _submit_lines(self) -> None:
        """Returns when every line without an answer was submitted, or the run ends."""
        with await asyncio.to_thread(lines_in_order, self._path, by_prefix=self._by_prefix) as reader:
            while part := await asyncio.to_thread(reader.part):
                known = await self._call(self._store.answered_among, self.claim, [line.index for line in part])
                for line in part:
                    if line.index in known:
                        continue
                    if not await self._gate.enter(len(line.text), self._going):
                        return
                    task = asyncio.create_task(self._answer(line))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)

    async def _answer(self, line: Line) -> None:
        size, kept = len(line.text), False
        try:
            answer = await self._answerer.answer(self.claim.endpoint, line)
            self._unwritten.append((answer, size))
            kept = True
            await asyncio.sleep(GATHER_S)
            await self._write()
        finally:
            if not kept:
                self._gate.leave(size, answered=False)

    async def _write(self) -> None:
        """Writes the answers that have come. If another task is writing, it writes these too."""
        if self._writing.locked():  # waiting for it would keep a task for each line: they come faster than they go
            return
        async with self._writing:
            while self._unwritten and not self._lost:
                some = self._unwritten[:MOST_AT_ONCE]
                try:
                    await self._record([answer for answer, _ in some])
                except StoreError as error:  # a full disk: the answers wait, and with them the batch
                    logger.warning("batch %s: %s", self.claim.id, error.message)
                    if self._stopped:  # the gateway is ending: the lines are computed again elsewhere
                        return
                    await asyncio.sleep(STORE_AGAIN_S)
                    continue
                except StaleError:
                    self._lost = True
                    return
                del self._unwritten[: len(some)]
                for _, size in some:
                    self._gate.leave(size, answered=True)

    async def _record(self, answers: list[LineAnswer]) -> None:
        await self._call(self._store.record, self.claim, answers)
        failed = sum(answer.failed for answer in answers)
        self._metrics.on_lines(answered=len(answers) - failed, failed=failed)

    # ---- the end

    async def _end(self) -> None:
        """Says of each line without an answer why it has none, then ends the batch."""
        if self.claim.overdue or (self.claim.status is BatchStatus.CANCELLING and self.claim.total is not None):
            with LineReader(self._path) as reader:
                while part := await asyncio.to_thread(reader.part):
                    if self._stopped or self._lost:
                        return
                    await self._call(self._close_part, part)
        status = await self._call(self._store.finish, self.claim)
        self._metrics.on_batch_end(status)
        logger.info("batch %s: %s", self.claim.id, status)

    def _close_part(self, part: list[Line]) -> None:
        if self.claim.overdue:
            error: AlignedServeError = BatchExpiredError("the request was not executed within the completion window")
        else:
            error = BatchCancelledError("the batch was cancelled before the request was executed")
        known = self._store.answered(self.claim, part[0].index, part[-1].index)
        self._store.record(self.claim, [unanswered(line, error) for line in part if line.index not in known])
