"""Cancels gRPC calls whose Serve proxy has died: Serve itself leaves their handlers running."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import RayActorError

from alignedserve.gateway.serve import ray_private

logger = logging.getLogger(__name__)

ASK_EVERY_S = 0.25
_ANSWER_WITHIN_S = 1.0
_LIST_EVERY_S = 2.0


class ProxyWatch:
    """Checks that the proxies are alive while calls that came through a proxy are open.

    Ray does not tell which proxy a call came through. When a proxy dies, all calls that were open then and came through
    any proxy are cancelled; clients of other proxies must send theirs again. Create it in the replica's constructor.
    """

    def __init__(self) -> None:
        self._start = ray.get_runtime_context().get_task_id()
        self._calls: dict[asyncio.Task[Any], float] = {}  # when each began (time.monotonic)
        self._proxies: dict[str, Any] = {}  # handles, by actor id
        self._listed_s = 0.0
        self._watcher: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def covers(self) -> Iterator[None]:
        """Inside this context, the current task is cancelled when the proxy that its call came through dies."""
        task = asyncio.current_task()
        # Calls through HAProxy are not Ray tasks. They run in the constructor's task, which started their server.
        if task is None or ray.get_runtime_context().get_task_id() == self._start:
            yield
            return
        self._calls[task] = time.monotonic()
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.get_running_loop().create_task(self._watch())
        try:
            yield
        finally:
            self._calls.pop(task, None)

    async def _watch(self) -> None:
        self._proxies.clear()  # a proxy that has died in the meantime served no call that is open now
        self._listed_s = 0.0
        while self._calls:
            asked_s = time.monotonic()
            try:
                if asked_s - self._listed_s > _LIST_EVERY_S:
                    self._listed_s = asked_s
                    self._proxies |= await asyncio.to_thread(_list_proxies)
                if await self._any_died():
                    self._cancel(asked_s)
            except Exception as error:  # Ray's own processes may be ending
                logger.debug("the proxies cannot be checked: %s", error)
            await asyncio.sleep(ASK_EVERY_S)

    async def _any_died(self) -> bool:
        handles = list(self._proxies.items())
        for (actor_id, _), died in zip(handles, await asyncio.gather(*(_died(h) for _, h in handles)), strict=True):
            if died:
                del self._proxies[actor_id]
        return len(self._proxies) < len(handles)

    def _cancel(self, asked_s: float) -> None:
        calls = [task for task, since_s in self._calls.items() if since_s < asked_s]
        logger.info("a proxy has ended; cancelling %d calls", len(calls))
        for task in calls:
            task.cancel()


def _list_proxies() -> dict[str, Any]:
    """Handles of the proxies on all nodes, by actor id."""
    found = {}
    namespace, prefix = ray_private.serve_proxies()
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == namespace and actor["name"].startswith(prefix):
            with contextlib.suppress(ValueError):  # it has just ended
                handle = ray.get_actor(actor["name"], namespace=namespace)
                found[ray_private.actor_id(handle)] = handle
    return found


async def _died(proxy: Any) -> bool:
    try:
        async with asyncio.timeout(_ANSWER_WITHIN_S):
            await proxy.__ray_ready__.remote()
    except RayActorError:
        return True
    except TimeoutError:  # busy or stopped: Serve's own health check handles this
        return False
    return False
