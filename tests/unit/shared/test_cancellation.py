"""Cancelled tasks end, even if what they wait for suppresses the cancellation."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest

from alignedserve import cancellation
from alignedserve.cancellation import end_tasks


class Stubborn:
    """Goes on after its first `kept` cancels."""

    def __init__(self, kept: int) -> None:
        self.kept = kept
        self.task = asyncio.create_task(self.run())

    async def run(self) -> None:
        while True:
            try:
                await asyncio.sleep(60.0)
            except asyncio.CancelledError:
                if not self.kept:
                    raise
                self.kept -= 1


async def fail_when_cancelled() -> None:
    try:
        await asyncio.sleep(60.0)
    finally:
        raise ValueError("of its own")


async def test_one_that_goes_on_after_a_cancel_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancellation, "AGAIN_S", 0.01)
    tasks = [Stubborn(kept).task for kept in (0, 1, 3)]
    await asyncio.sleep(0)
    async with asyncio.timeout(5.0):
        await end_tasks(tasks)
    assert all(task.cancelled() for task in tasks)


async def test_the_error_of_an_ended_task_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    task = asyncio.create_task(fail_when_cancelled())
    done = asyncio.create_task(asyncio.sleep(0))
    await asyncio.sleep(0.01)
    await end_tasks({task, done})
    assert (task.done(), done.done()) == (True, True)
    del task
    gc.collect()
    assert caplog.text == ""


async def test_one_that_does_not_end_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cancellation, "AGAIN_S", 0.01)
    monkeypatch.setattr(cancellation, "STUBBORN_S", 0.1)
    task = Stubborn(30).task
    await asyncio.sleep(0)
    with caplog.at_level(logging.WARNING):
        await end_tasks([task])
    assert "still run after they were cancelled" in caplog.text
    assert "Stubborn.run()" in caplog.text
