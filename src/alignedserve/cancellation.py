"""Reliable cancellation of tasks, and the origin of a CancelledError: gRPC also raises one for a call it closed itself.

Code that a task awaits may swallow a cancellation, so that a loop around it never ends. gRPC does so while it connects,
and Python 3.11's `asyncio.wait_for` does so if the awaited object finishes at that moment.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

logger = logging.getLogger(__name__)

AGAIN_S = 0.2
STUBBORN_S = 5.0


def task_is_cancelled() -> bool:
    """Whether the current task was cancelled. If not, a CancelledError raised in it comes from gRPC."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks repeatedly until all have ended. Their exceptions are ignored."""
    loop = asyncio.get_running_loop()
    tell_at_s = loop.time() + STUBBORN_S
    all_of_them = set(tasks)
    left = {task for task in all_of_them if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=AGAIN_S)
        if left and loop.time() > tell_at_s:
            tell_at_s += STUBBORN_S
            logger.warning("tasks still run after they were cancelled: %s", ", ".join(sorted(map(str, left))))
    for task in all_of_them:
        if not task.cancelled():
            task.exception()  # otherwise Python logs an exception that was never retrieved
