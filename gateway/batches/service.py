"""A gateway's part in the batches of its store: it takes up those that no gateway runs, keeps leases, cleans up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from alignedserve.config import BatchesConfig, GatewayConfig
from alignedserve.errors import StaleError
from alignedserve.gateway.batches.batches import BatchStore, Claim
from alignedserve.gateway.batches.database import BatchesOffError, Database, StoreError
from alignedserve.gateway.batches.files import FileStore
from alignedserve.gateway.batches.gate import Gate
from alignedserve.gateway.batches.lines import Endpoint, LineAnswerer
from alignedserve.gateway.batches.responses import ResponseStore
from alignedserve.gateway.batches.runner import BatchRunner
from alignedserve.gateway.body.planning import ServedModel
from alignedserve.gateway.failures import ShuttingDownError
from alignedserve.gateway.ledger.intake import Intake
from alignedserve.gateway.ledger.ledger import Ledger
from alignedserve.gateway.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

POLL_S = 1.0
RENEWALS = 4  # a lease
SWEEP_S = 60.0
SWEPT_ROWS = 2000  # in one transaction
_DAY_S = 86400.0
P = ParamSpec("P")
T = TypeVar("T")


class BatchService:
    """Without `batches.folder` it does nothing, and `call` raises BatchesOffError.

    `endpoints` (by path) is set before `start`. The store is used in one thread of its own.
    """

    def __init__(
        self,
        config: BatchesConfig,
        gateway: GatewayConfig,
        gateway_id: str,
        ledger: Ledger,
        intake: Intake,
        model: ServedModel,
        metrics: GatewayMetrics,
    ) -> None:
        self.config = config
        self.endpoints: Mapping[str, Endpoint] = {}
        self._gateway = gateway
        self._id = gateway_id
        self._ledger = ledger
        self._model = model
        self._metrics = metrics
        most_lines = config.lines_in_flight or max(1, gateway.max_queue // 2)
        self._gate = Gate(ledger, intake, metrics, min(most_lines, gateway.max_queue))
        self._thread = ThreadPoolExecutor(1, "batches")
        self._database: Database | None = None
        self._files: FileStore | None = None
        self._batches: BatchStore | None = None
        self._responses: ResponseStore | None = None
        self._answerer: LineAnswerer | None = None
        self._runners: dict[asyncio.Task[None], BatchRunner] = {}
        self._task: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        self._swept_s = float("-inf")

    @property
    def files(self) -> FileStore:
        """Raises BatchesOffError without a folder."""
        if self._files is None:
            raise BatchesOffError("this server keeps no files and batches: start it with --batches-folder DIR")
        return self._files

    @property
    def batches(self) -> BatchStore:
        """Raises BatchesOffError without a folder."""
        assert self.files is not None
        assert self._batches is not None
        return self._batches

    @property
    def responses(self) -> ResponseStore | None:
        """None if responses are not stored."""
        return self._responses

    async def call(self, method: Callable[P, T], *given: P.args, **options: P.kwargs) -> T:
        """Runs a method of the store in the store's thread. Raises ShuttingDownError after `close`."""
        try:
            found = asyncio.get_running_loop().run_in_executor(self._thread, lambda: method(*given, **options))
        except RuntimeError:
            raise ShuttingDownError("this gateway has shut down; another one has the files and batches") from None
        return await found

    async def start(self) -> None:
        """Opens the store. Raises ConfigError if the folder cannot be used."""
        if not self.config.folder:
            return
        self._database = await self.call(lambda: Database(self.config.folder, shared=self.config.shared))
        retention_s = self.config.retention_days * _DAY_S
        self._files = FileStore(self._database, int(self.config.quota_gib * (1 << 30)), retention_s)
        self._batches = BatchStore(self._database, self._files)
        if most_bytes := int(self.config.responses_gib * (1 << 30)):
            self._responses = ResponseStore(self._database, most_bytes, retention_s)
        self._answerer = LineAnswerer(self.endpoints, self._gate)
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Ends all runs, and releases their leases. Responses are not stored any more."""
        self._responses = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._stop_runners()
        if self._database is not None:
            await self.call(self._database.close)
            self._database = None
        self._thread.shutdown(wait=False)

    def wake(self) -> None:
        """There is a new batch, or this gateway has begun to end."""
        self._woken.set()

    # ---- the loop

    async def _run(self) -> None:
        interval_s = min(POLL_S, self.config.lease_s / RENEWALS)
        while True:
            try:
                await self._beat()
            except StoreError as error:
                logger.warning("%s", error.message)
            except Exception:
                logger.exception("the batches cannot be looked after")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._woken.wait()
            self._woken.clear()

    async def _beat(self) -> None:
        if self._ledger.draining:
            await self._stop_runners()
            return
        for runner in list(self._runners.values()):
            await self._renew(runner)
        while self._can_take_one():
            claim = await self.call(self.batches.claim, self._id, self.config.lease_s)
            if claim is None:
                break
            self._begin(claim)
        if (now_s := asyncio.get_running_loop().time()) - self._swept_s >= SWEEP_S and not await self._sweep():
            self._swept_s = now_s

    async def _sweep(self) -> bool:
        """Deletes a part of what is to be deleted. Returns whether there is more, for the next beat."""
        pages = await self.call(self.batches.sweep, self.config.retention_days * _DAY_S)
        responses = self.responses is not None and await self.call(self.responses.sweep)
        return await self.call(self.files.sweep, SWEPT_ROWS) or responses or pages

    def _can_take_one(self) -> bool:
        return len(self._runners) < self.config.at_once and self._model.info is not None and not self._ledger.draining

    def _begin(self, claim: Claim) -> None:
        assert self._answerer is not None
        logger.info("batch %s: %s", claim.id, "taken up" if claim.epoch == 1 else "taken over")
        runner = BatchRunner(
            claim,
            self.batches,
            self.call,
            self.files.path_of(claim.input_id),
            self._answerer,
            self._gate,
            self._metrics,
            model=self._model,
            most_lines=self.config.max_lines,
            most_bytes=self._gateway.max_body_bytes,
            by_prefix=self._model.cache is not None,
        )
        task = asyncio.get_running_loop().create_task(runner.run())
        self._runners[task] = runner
        self._metrics.batches_running.set(len(self._runners))
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._runners[task]
        self._metrics.batches_running.set(len(self._runners))
        self.wake()

    async def _renew(self, runner: BatchRunner) -> None:
        """Extends a lease. A runner whose lease has run out meanwhile may not go on."""
        now_s = asyncio.get_running_loop().time()
        try:
            if not runner.claim.status.ended:
                runner.claim = await self.call(self.batches.renew, runner.claim, self.config.lease_s)
            runner.renewed_s = now_s
        except StaleError:
            runner.lose()
        except StoreError:
            if now_s - runner.renewed_s > self.config.lease_s:
                runner.lose()
            raise

    async def _stop_runners(self) -> None:
        for runner in self._runners.values():
            runner.stop()
        if self._runners:
            await asyncio.gather(*self._runners, return_exceptions=True)
