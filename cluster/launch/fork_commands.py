"""Asks node agents how instances start as forks on their nodes."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from typing import Any

import ray

from alignedserve.cancellation import end_tasks

logger = logging.getLogger(__name__)

WAIT_S = 30.0  # for a node agent that is starting, and imports
PLAIN = frozenset({"env_vars", "config"})  # parts of a runtime environment that leave the Python of a worker as it is


class ForkCommands:
    """`ask` each node agent that has been launched or found."""

    def __init__(self) -> None:
        self._agents: dict[str, Any] = {}  # by the node's name
        self._asked: dict[str, asyncio.Task[str]] = {}  # their commands, by the node's name
        self._launched = defaultdict[str, asyncio.Event](asyncio.Event)  # set once the node is in `_asked`
        self._late: set[str] = set()  # nodes whose node agent did not answer in time, and has not since

    def ask(self, node_id: str, agent: Any) -> None:
        """Have this node agent start its fork server."""
        self._agents[node_id] = agent
        self._late.discard(node_id)
        self._ask(node_id)
        self._launched[node_id].set()

    async def command(self, node_id: str) -> str:
        """What runs Python through the node's fork server, as Ray's `py_executable`; "" if it does not say in time."""
        asked = self._asked.get(node_id)
        if asked is None or not asked.done():
            if node_id in self._late:
                return ""
            try:
                async with asyncio.timeout(WAIT_S):
                    await self._launched[node_id].wait()
                    asked = self._asked[node_id]
                    await asyncio.wait([asked])
            except TimeoutError:
                logger.warning("the fork server of node %s is not ready in time", node_id)
                self._late.add(node_id)
                return ""
        command = asked.result()
        self._late.discard(node_id)
        if not command:
            self._ask(node_id)  # for the next start
        return command

    def _ask(self, node_id: str) -> None:
        self._asked[node_id] = asyncio.get_running_loop().create_task(_ask(node_id, self._agents[node_id]))

    async def close(self) -> None:
        await end_tasks(self._asked.values())


async def _ask(node_id: str, agent: Any) -> str:
    try:
        command: str = await agent.fork_command.remote()
    except Exception as error:  # a node agent of an earlier version has no such method
        logger.warning("the node agent of %s does not say how to fork: %r", node_id, error)
        return ""
    return command


def can_fork() -> bool:
    """Whether this cluster's workers run the Python of their nodes: not one of a container or of a virtual environment
    that Ray makes."""
    return PLAIN.issuperset(ray.get_runtime_context().runtime_env)
