"""Places processes: asks the launcher for room, and passes nodes and places to the core."""

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
from alignedserve.control.runtime import RoleSettings
from alignedserve.errors import AlignedServeError

logger = logging.getLogger(__name__)

NODES_LOOK_S = 0.5
MEMORY_ASK_S = 2.0
FRESH_S = 0.05  # results of this age are reused


class Placing:
    """Call `settle` once, then `follow` for the supervisor's life, and `look` to place something now.

    `carry_out` gets the actions of the core. `leaving` waits for a look that has begun.
    """

    def __init__(
        self,
        core: SupervisorCore,
        launcher: Launcher,
        cluster_id: str,
        fencer: Fencer,
        carry_out: Callable[[list[Action]], None],
        leaving: Leaving,
    ) -> None:
        self._core = core  # gets nodes and places, and has the instances
        self._launcher = launcher  # reserves room, and knows nodes
        self._cluster_id = cluster_id
        self._fencer = fencer  # asks node agents for their free memory
        self._carry_out = carry_out
        self._leaving = leaving
        self._looking = asyncio.Lock()  # held during a look
        self._looked_at = 0.0  # monotonic time of the last placement, in seconds
        self._placed: list[tuple[str, str]] = []  # instances, (role, id), that room was last reserved for

    async def settle(self, now: float) -> None:
        """Find nodes and places without starting anything. Raises ResourceError if there can never be room."""
        self._core.settle(await self._placement(), now)

    async def look(self, older_s: float = 0.0) -> None:
        """Reserve room for the planned instances, and update the nodes, unless that was done less than `older_s` ago.
        Raises ResourceError and UnavailableError."""
        if older_s and time.monotonic() - self._looked_at <= older_s:
            return
        async with self._looking:  # so that an older result does not replace a newer one
            self._carry_out(self._core.located(await self._placement(), time.monotonic()))

    async def follow(self) -> None:
        """Call `look` periodically, except during a pause, when a successor places."""
        while True:
            await asyncio.sleep(NODES_LOOK_S)
            if self._core.paused:
                continue
            try:
                with self._leaving.finishes():
                    await self.look()
            except AlignedServeError as error:
                logger.warning("the places of instances cannot be determined now: %s", error.message)
            except Exception:  # it must go on, because only this task notices removed nodes
                logger.exception("the places of instances cannot be determined now")

    async def prepare(self, settings: RoleSettings, generation: int, *, again: bool) -> RoleSettings | None:
        """Start what the instance has on further nodes. Returns the settings to launch it with; None if this process of
        it is not wanted any more, or a successor of the supervisor starts it. Raises AlignedServeError.
        """
        prepared = await self._launcher.prepare(settings, again=again)
        left_to_successor = bool(prepared.rank_hosts) and self._core.paused
        wanted = self._core.roster.starting(settings.id, generation) is not None
        return prepared if wanted and not left_to_successor else None

    async def _placement(self) -> Placement:
        """The placement, with room for the planned and the remaining instances only."""
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
        """Free memory of nodes for these instances. Nodes that do not answer in time count as full."""
        free_bytes = await self._fencer.free_memory_bytes(MEMORY_ASK_S) if new else {}
        planner = self._core.planner
        return self._core.scaling.room(new, planner.model_info, planner.store_plan, free_bytes)

    def _instances(self) -> list[PlannedRole]:
        return [slot.planned for slot in self._core.roster.slots.values() if slot.planned.role in MODEL_ROLES]
