"""Cancelling tasks for certain; and whose a CancelledError is: gRPC raises one for a call that its own side closed.

What is awaited in a task may keep a cancel to itself: gRPC does while it connects, and Python 3.11's `asyncio.wait_for`
where what it waits for has ended in that moment, so that a loop around it goes on for ever.
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
    """Whether somebody has cancelled the current task; where not, a CancelledError in it is gRPC's."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks again and again until all have ended, however: what they raised is theirs to tell."""
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
            logger.warning("cancelled, and still not ended: %s", ", ".join(sorted(map(str, left))))
    for task in all_of_them:
        if not task.cancelled():
            task.exception()  # else Python tells of one that nobody has read
