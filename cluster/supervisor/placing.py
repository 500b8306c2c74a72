"""Where the supervisor's processes are to run: asks the launcher for room, and tells the core what nodes there are."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from alignedserve.cluster.launch.launcher import Launcher
from alignedserve.cluster.launch.node_room import NodeRoom
from alignedserve.cluster.supervisor.actions import Action
from alignedserve.cluster.supervisor.core import SupervisorCore
from alignedserve.cluster.supervisor.fencer import Fencer
from alignedserve.cluster.supervisor.handover import Leaving
from alignedserve.cluster.supervisor.nodes import Placement
from alignedserve.cluster.supervisor.plan import MODEL_ROLES, PlannedRole
from alignedserve.errors import AlignedServeError

logger = logging.getLogger(__name__)

NODES_LOOK_S = 0.5
MEMORY_ASK_S = 2.0
FRESH_S = 0.05  # what was found out so shortly before holds


class Placing:
    """`settle` once, then `follow` for as long as the supervisor lives; `look` when something is to be placed now."""

    def __init__(
        self,
        core: SupervisorCore,
        launcher: Launcher,
        cluster_id: str,
        fencer: Fencer,
        carry_out: Callable[[list[Action]], None],
        leaving: Leaving,
    ) -> None:
        self._core = core
        self._launcher = launcher
        self._cluster_id = cluster_id
        self._fencer = fencer
        self._carry_out = carry_out
        self._leaving = leaving
        self._looking = asyncio.Lock()
        self._looked_at = 0.0
        self._placed: list[tuple[str, str]] = []

    async def settle(self, now: float) -> None:
        """Nothing is started by it. Raises ResourceError where there can never be room."""
        self._core.settle(await self._placement(), now)

    async def look(self, older_s: float = 0.0) -> None:
        """Have room for the instances there are to be, and take in what nodes there are, unless that was done
        `older_s` ago. Raises ResourceError, UnavailableError."""
        if older_s and time.monotonic() - self._looked_at <= older_s:
            return
        async with self._looking:  # so that nothing older is taken in after what is newer
            self._carry_out(self._core.located(await self._placement(), time.monotonic()))

    async def follow(self) -> None:
        """Look again and again, but in a pause: then it is a successor that places."""
        while True:
            await asyncio.sleep(NODES_LOOK_S)
            if self._core.paused:
                continue
            try:
                with self._leaving.finishes():
                    await self.look()
            except AlignedServeError as error:
                logger.warning("where instances are to run is not known now: %s", error.message)
            except Exception:  # it must go on: nobody else hears of nodes that have gone
                logger.exception("where instances are to run is not known now")

    async def _placement(self) -> Placement:
        """With room for the instances that there are to be, and for those that are still there, and for no others."""
        slots = self._instances()
        ids = [(planned.role, planned.id) for planned in slots]
        if ids != self._placed:
            on_gpu = any(planned.on_gpu for planned in slots)
            room = await self._room([instance for instance in ids if instance not in self._placed])
            await self._launcher.place(self._cluster_id, self._core.scaling.shape, ids, room, on_gpu=on_gpu)
            self._placed = ids
        placement = await self._launcher.placement()
        self._looked_at = time.monotonic()
        return placement

    async def _room(self, new: Sequence[tuple[str, str]]) -> NodeRoom:
        """What nodes have for these instances. Nodes that do not say it in time count as full."""
        free_bytes = await self._fencer.free_memory_bytes(MEMORY_ASK_S) if new else {}
        planner = self._core.planner
        return self._core.scaling.room(new, planner.model_info, planner.store_plan, free_bytes)

    def _instances(self) -> list[PlannedRole]:
        return [slot.planned for slot in self._core.roster.slots.values() if slot.planned.role in MODEL_ROLES]
