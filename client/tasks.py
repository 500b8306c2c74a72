"""Batches of the asyncio client: each open call is a task."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable
from typing import Any

from alignedserve.client.batch import Batch, Outcome, checked_items
from alignedserve.client.calls import Call
from alignedserve.client.types import Completion
from alignedserve.errors import AlignedServeError


async def run_batch(
    batch: Batch[Any],
    items: Iterable[Any] | AsyncIterable[Any],
    ask: Callable[[Call[Completion]], Coroutine[Any, Any, Completion]],
) -> list[Outcome]:
    """The results of the batch. If this ends early, open calls are cancelled."""
    ended: asyncio.Queue[tuple[int, Completion | BaseException]] = asyncio.Queue()
    tasks: set[asyncio.Task[Completion]] = set()

    def finish(number: int, task: asyncio.Task[Completion]) -> None:
        """Queue the outcome of a task, also if it was cancelled from outside."""
        tasks.discard(task)
        failure = asyncio.CancelledError() if task.cancelled() else task.exception()
        ended.put_nowait((number, task.result() if failure is None else failure))

    with contextlib.closing(batch):
        try:
            taking = aiter(items) if isinstance(items, AsyncIterable) else _taken(checked_items(items))
            more = True
            while True:
                while more and batch.wants_more:
                    try:
                        added = batch.add(await anext(taking))
                    except StopAsyncIteration:
                        more = False
                    else:
                        if added is not None:
                            number, call = added
                            tasks.add(task := asyncio.create_task(ask(call)))
                            task.add_done_callback(functools.partial(finish, number))
                if not batch.open:
                    return batch.results()
                number, outcome = await ended.get()
                if not isinstance(outcome, Completion | AlignedServeError):
                    raise outcome
                batch.end(number, outcome)
        finally:
            left = list(tasks)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)


async def _taken(items: Iterable[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item
