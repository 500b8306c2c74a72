"""A warm spare: a process that has imported everything and waits for a role, so that it starts faster.

It does not read a model or use a GPU before it has a role, because the role determines both.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from alignedserve.cluster.supervisor.plan import SPARE, SPARED_ROLES
from alignedserve.control import runtime
from alignedserve.control.runtime import RoleServer

logger = logging.getLogger(__name__)


class SpareServer(RoleServer):
    """Role `spare`. It joins, so that it is listed and watched. `leave` ends the role, not the process."""

    role: ClassVar[str] = SPARE

    def servicers(self) -> Sequence[tuple[Callable[[Any, Any], None], object]]:
        return []

    async def on_start(self) -> None:
        self.set_state("loading")
        begun = time.monotonic()
        await asyncio.to_thread(_import_roles)
        logger.info("imported everything in %.1f s", time.monotonic() - begun)
        self.set_state("ready")

    def leave(self) -> None:
        self.end("its process has a role now")


def _import_roles() -> None:
    for role in SPARED_ROLES:
        runtime.role_class(role)
