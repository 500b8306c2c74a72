"""Whose a CancelledError is: gRPC raises one too, for a call that its own side closed."""

from __future__ import annotations

import asyncio


def task_is_cancelled() -> bool:
    """Whether somebody has cancelled the current task; where not, a CancelledError in it is gRPC's."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
