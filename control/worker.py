"""The base of prefill and decode workers: sending tokens to gateways, and tasks beside the compute thread."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import abstractmethod
from collections.abc import Coroutine, Sequence
from typing import Any

from alignedserve.control.runtime import RoleServer, RoleSettings
from alignedserve.control.tokens import TokenEmitter
from alignedserve.errors import AlignedServeError
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.ranks.now import RankNow, RankWatch

logger = logging.getLogger(__name__)


class WorkerServer(RoleServer):
    """A role with a model. Subclasses load it in `load`; `on_gateway_lost` is called for unreachable gateways."""

    def __init__(self, settings: RoleSettings) -> None:
        super().__init__(settings)
        self.loop = asyncio.get_running_loop()
        self.emitter = TokenEmitter(self.process, settings.token, self.on_gateway_lost)
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch = RankWatch()  # of its ranks

    @abstractmethod
    async def load(self) -> None:
        """Loads the model and prepares everything for work."""

    @abstractmethod
    async def unload(self) -> None:
        """Releases all resources."""

    @abstractmethod
    def on_gateway_lost(self, address: str) -> None:
        """Events for this gateway could not be delivered: report its requests lost, so that it submits them again."""

    def with_ranks(self, ranks: Sequence[RankNow], text: str) -> str:
        """A status that begins with its ranks, if there are several. `ranks`: all of them, once they are started."""
        degrees = self.config.degrees(self.role)
        if degrees.ranks == 1:
            return text
        return ", ".join(filter(None, (self._watch.describe(degrees, ranks, time.monotonic()), text)))

    @abstractmethod
    def trouble(self) -> AlignedServeError | None:
        """The error for which this process must be replaced, or None. It is checked at each heartbeat."""

    def heartbeat(self) -> sv.Heartbeat:
        trouble = self.trouble()
        if trouble is not None and self.state != "failed":
            logger.error("%s must be replaced: %s", self.settings.id, trouble)
            self.fail(trouble)
        return super().heartbeat()

    async def on_start(self) -> None:
        self.set_state("loading")
        await self.load()
        self.set_state("ready")

    async def on_close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await self.emitter.close()
        await self.unload()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` in a background task. An error that it raises is logged."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            logger.error("a background task failed", exc_info=error)
