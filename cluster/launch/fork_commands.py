"""Asks node agents how instances start as forks on their nodes."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from typing import Any

import ray
from ray.exceptions import RayError

from alignedserve.cancellation import end_tasks

logger = logging.getLogger(__name__)

WAIT_S = 10.0  # for a node agent that is starting, too
PLAIN = frozenset({"env_vars", "config"})  # parts of a runtime environment that leave the Python of a worker as it is


class ForkCommands:
    """`ask` each node agent that has been launched or found."""

    def __init__(self) -> None:
        self._asked: dict[str, asyncio.Task[str]] = {}  # the commands, by the node's name
        self._launched = defaultdict[str, asyncio.Event](asyncio.Event)  # set once the node is in `_asked`

    def ask(self, node_id: str, agent: Any) -> None:
        """Have this node agent start its fork server."""
        self._asked[node_id] = asyncio.get_running_loop().create_task(_ask(node_id, agent))
        self._launched[node_id].set()

    async def command(self, node_id: str) -> str:
        """What runs Python through the node's fork server, as Ray's `py_executable`; "" if it does not say in time."""
        if not _is_plain():
            return ""
        try:
            async with asyncio.timeout(WAIT_S):
                await self._launched[node_id].wait()
                return await asyncio.shield(self._asked[node_id])
        except TimeoutError:
            return ""

    async def close(self) -> None:
        await end_tasks(self._asked.values())


async def _ask(node_id: str, agent: Any) -> str:
    try:
        command: str = await agent.fork_command.remote()
    except (RayError, AttributeError) as error:  # a node agent of an earlier version has no such method
        logger.warning("instances on node %s start without a fork server: %s", node_id, error)
        return ""
    return command


def _is_plain() -> bool:
    """Whether this cluster's workers run the Python of their nodes: not one of a container or of a virtual environment
    that Ray makes."""
    return PLAIN.issuperset(ray.get_runtime_context().runtime_env)
