"""Streams whose peer does not read: what is buffered for it is bounded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from alignedserve.control.link import DuplexLink, Outbox
from alignedserve.errors import UnavailableError


async def test_what_a_peer_leaves_unread_is_bounded_and_its_stream_then_breaks() -> None:
    outbox: Outbox[int] = Outbox(most=3)
    for number in range(10_000):
        outbox.put(number)
    with pytest.raises(UnavailableError, match="3 messages unread"):
        async for _ in outbox:
            pass


async def test_up_to_the_limit_everything_comes_in_order() -> None:
    outbox: Outbox[int] = Outbox(most=3)
    for number in range(3):
        outbox.put(number)
    outbox.close()
    assert [number async for number in outbox] == [0, 1, 2]


class StuckCall:
    """A stream that takes one message, then nothing until `go_on` is set."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def write(self, message: Any) -> None:
        await self.go_on.wait()

    async def done_writing(self) -> None:
        return

    def cancel(self) -> None:
        self.cancelled.set()

    async def __aiter__(self) -> AsyncIterator[Any]:
        await self.cancelled.wait()
        raise asyncio.CancelledError  # as gRPC does in a reader of a cancelled call
        yield


async def test_a_link_to_a_peer_that_did_not_read_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.control.link.MOST_UNREAD", 4)
    calls: list[StuckCall] = []
    opened = asyncio.Queue[None]()

    def open_call() -> StuckCall:
        calls.append(StuckCall())
        opened.put_nowait(None)
        return calls[-1]

    link: DuplexLink[int, int] = DuplexLink(open_call, lambda message: None, retry_s=0.001)
    link.start()
    async with asyncio.timeout(5.0):
        await opened.get()
        await asyncio.sleep(0)
        assert link.up
        for number in range(20):
            link.send(number)
            await asyncio.sleep(0)
        calls[0].go_on.set()
        await calls[0].cancelled.wait()
        await opened.get()
    assert len(calls) == 2
    await link.close()


async def test_a_stream_that_is_broken_off_is_told_down_and_opened_again() -> None:
    calls: list[StuckCall] = []
    opened, downs = asyncio.Queue[None](), asyncio.Queue[None]()

    def open_call() -> StuckCall:
        calls.append(StuckCall())
        opened.put_nowait(None)
        return calls[-1]

    link: DuplexLink[int, int] = DuplexLink(
        open_call, lambda message: None, on_down=lambda: downs.put_nowait(None), retry_s=0.001
    )
    link.break_off("nothing is open")
    link.start()
    async with asyncio.timeout(5.0):
        await opened.get()
        await asyncio.sleep(0)
        link.break_off("its peer does not answer")
        await downs.get()
        await opened.get()
    assert (len(calls), calls[0].cancelled.is_set(), calls[1].cancelled.is_set()) == (2, True, False)
    await link.close()


class BrokenCall(StuckCall):
    """A stream that breaks after this many steps of the event loop."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    async def __aiter__(self) -> AsyncIterator[Any]:
        for _ in range(self.steps):
            await asyncio.sleep(0)
        raise RuntimeError("broken")
        yield


@pytest.mark.parametrize("steps", range(8))
async def test_a_link_is_closed_at_whatever_moment_its_stream_breaks(steps: int) -> None:
    for wait in range(12):
        link = DuplexLink[Any, Any](lambda: BrokenCall(steps), lambda message: None)
        link.start()
        for _ in range(wait):
            await asyncio.sleep(0)
        await asyncio.wait_for(link.close(), 5.0)
        assert not link.up


class ConnectingCall(BrokenCall):
    """Like gRPC, it suppresses a cancellation during connecting, which then fails."""

    async def __aiter__(self) -> AsyncIterator[Any]:
        connecting = asyncio.get_running_loop().create_task(self._connect())
        await connecting
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())
        yield

    async def _connect(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            for _ in range(self.steps):
                await asyncio.sleep(0)


@pytest.mark.parametrize("steps", range(1, 6))
@pytest.mark.parametrize("reconnect", [True, False])
async def test_a_link_is_closed_while_it_connects(steps: int, reconnect: bool) -> None:
    for wait in range(12):
        link = DuplexLink[Any, Any](lambda: ConnectingCall(steps), lambda message: None, reconnect=reconnect)
        task = link.start()
        for _ in range(wait):
            await asyncio.sleep(0)
        await asyncio.wait_for(link.close(), 5.0)
        assert task.done()
        assert not link.up


async def test_a_stream_that_cannot_be_opened_is_tried_again() -> None:
    """For example while certificates are exchanged: a link that gave up would never recover."""
    calls: list[StuckCall] = []
    tries = 0

    def open_call() -> StuckCall:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise OSError("the certificate cannot be read")
        calls.append(StuckCall())
        return calls[-1]

    link: DuplexLink[Any, Any] = DuplexLink(open_call, lambda message: None, retry_s=0.01)
    link.start()
    async with asyncio.timeout(5.0):
        while not link.up:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await link.close()
    assert (tries, len(calls)) == (3, 1)
