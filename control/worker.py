"""The base of prefill and decode workers: sending tokens to gateways, and tasks beside the compute thread."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from alignedserve.control.runtime import RoleServer, RoleSettings
from alignedserve.control.tokens import TokenEmitter
from alignedserve.errors import AlignedServeError
from alignedserve.proto import supervisor_pb2 as sv

logger = logging.getLogger(__name__)


class WorkerServer(RoleServer):
    """A role with a model. Subclasses load it in `load`; `on_gateway_lost` is called for unreachable gateways."""

    def __init__(self, settings: RoleSettings) -> None:
        super().__init__(settings)
        self.loop = asyncio.get_running_loop()
        self.emitter = TokenEmitter(self.process, settings.token, self.on_gateway_lost)
        self._tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def load(self) -> None:
        """Loads the model and prepares everything for work."""

    @abstractmethod
    async def unload(self) -> None:
        """Releases all resources."""

    @abstractmethod
    def on_gateway_lost(self, address: str) -> None:
        """Events for this gateway could not be delivered: report its requests lost, so that it submits them again."""

    def ranks(self, pids: Mapping[str, Sequence[int]]) -> str:
        """What a status begins with; "" for one rank. `pids`: of all ranks by node ("": this one), once started."""
        degrees = self.config.degrees(self.role)
        on_nodes = [(f"{', '.join(map(str, own))}", f" on {node}" if node else "") for node, own in pids.items()]
        started = f" (pids {'; '.join(own + where for own, where in on_nodes)})" if pids else ""
        return f"{degrees}{started}, " if degrees.ranks > 1 else ""

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
