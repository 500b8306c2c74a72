"""A channel's queue and its completions, with a channel whose copies end when the test says so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from alignedserve.errors import TransferError
from alignedserve.geometry import KvGeometry
from alignedserve.transfer.block_store import HostBlockStore
from alignedserve.transfer.channel import Copy, QueuedChannel
from alignedserve.transfer.completion import Completion

GEOMETRY = KvGeometry("random", "float32", 1, 1, 4, 4)


class SteeredChannel(QueuedChannel):
    """Each copy waits for a permit. Block 7 fails to copy; block 6 raises an unexpected error."""

    name = "steered"  # type: ignore[assignment]

    def __init__(self, in_flight: int = 1) -> None:
        self.permits = threading.Semaphore(0)
        self.log: list[str] = []
        stores = [HostBlockStore.private(name, GEOMETRY, 8) for name in "ab"]
        super().__init__(stores[0], stores[1], in_flight=in_flight, max_pending=3)

    def _begin(self, copy: Copy) -> Any:
        self.log.append(f"begin {copy.source_ids[0]}")
        return copy.source_ids[0]

    def _end(self, copy: Copy, begun: Any) -> None:
        assert self.permits.acquire(timeout=10)
        self.log.append(f"end {begun}")
        if begun == 7:
            raise TransferError("block 7 is bad")
        if begun == 6:
            raise ZeroDivisionError("six")


@pytest.fixture
def channel() -> Iterator[SteeredChannel]:
    channel = SteeredChannel()
    yield channel
    channel.permits.release(100)
    channel.close()


def test_copies_end_in_the_order_in_which_they_were_asked_for(channel: SteeredChannel) -> None:
    completions = [channel.copy([i], [i]) for i in range(3)]
    assert channel.pending == 3
    assert not completions[0].done()
    assert completions[0].wait(0.01) is False
    channel.permits.release(3)
    assert completions[2].wait(10)
    assert channel.log == ["begin 0", "end 0", "begin 1", "end 1", "begin 2", "end 2"]
    assert channel.pending == 0


def test_with_two_in_flight_the_second_begins_before_the_first_ends() -> None:
    channel = SteeredChannel(in_flight=2)
    first, second = channel.copy([0], [0]), channel.copy([1], [1])
    channel.permits.release()
    first.wait(10)
    channel.permits.release()
    second.wait(10)
    assert channel.log.index("begin 1") < channel.log.index("end 1")
    assert channel.counters().copies == 2
    channel.close()


def test_a_failed_copy_says_why_and_the_channel_goes_on(channel: SteeredChannel) -> None:
    failed, odd, well = channel.copy([7], [0]), channel.copy([6], [1]), channel.copy([0], [2])
    channel.permits.release(3)
    with pytest.raises(TransferError, match="block 7 is bad"):
        failed.wait(10)
    with pytest.raises(TransferError, match="ZeroDivisionError"):
        odd.wait(10)
    assert well.wait(10)
    assert failed.done()
    assert not failed.succeeded()
    assert isinstance(failed.error, TransferError)
    counters = channel.counters()
    assert (counters.copies, counters.failed, counters.blocks) == (1, 2, 1)


def test_a_full_queue_refuses_and_never_blocks(channel: SteeredChannel) -> None:
    for block in range(3):
        channel.copy([block], [block])
    with pytest.raises(TransferError, match="too many"):
        channel.copy([3], [3])
    channel.permits.release(3)


def test_a_cancelled_copy_that_has_not_begun_never_does(channel: SteeredChannel) -> None:
    first, second = channel.copy([0], [0]), channel.copy([1], [1])
    second.cancel()
    assert not second.done()  # its blocks may not be used yet: the channel has not reached it
    channel.permits.release(1)
    assert first.wait(10)
    with pytest.raises(TransferError, match="cancelled"):
        second.wait(10)
    assert "begin 1" not in channel.log


def test_closing_fails_what_waits_and_lets_finish_what_has_begun(channel: SteeredChannel) -> None:
    first, second = channel.copy([0], [0]), channel.copy([1], [1])
    while channel.log != ["begin 0"]:
        pass
    closing = threading.Thread(target=channel.close)
    closing.start()
    with pytest.raises(TransferError, match="was closed"):
        second.wait(10)
    assert not first.done()
    channel.permits.release(1)
    assert first.wait(10)
    closing.join(10)
    assert channel.pending == 0


def test_callbacks_run_once_also_when_added_late(channel: SteeredChannel) -> None:
    heard: list[Completion] = []
    completion = channel.copy([0], [0])
    completion.add_callback(heard.append)
    channel.permits.release(1)
    completion.wait(10)
    completion.add_callback(heard.append)
    while len(heard) < 2:
        pass
    assert heard == [completion, completion]


def test_a_callback_that_raises_is_logged_and_harms_no_other(
    channel: SteeredChannel, caplog: pytest.LogCaptureFixture
) -> None:
    completion = channel.copy([0], [0])
    completion.add_callback(lambda _: 1 / 0)  # type: ignore[arg-type, return-value]
    channel.permits.release(2)
    assert channel.copy([1], [1]).wait(10)
    assert "a callback of copy a to b failed" in caplog.text


def test_a_completion_is_awaited_and_raises_its_error(channel: SteeredChannel) -> None:
    async def scenario() -> None:
        well, failed = channel.copy([0], [0]), channel.copy([7], [1])
        channel.permits.release(2)
        await asyncio.wait_for(_awaited(well), 10)
        await well  # a second time, when it is done
        with pytest.raises(TransferError, match="block 7"):
            await asyncio.wait_for(_awaited(failed), 10)

    asyncio.run(scenario())


def test_a_task_that_stops_waiting_leaves_the_copy_alone(channel: SteeredChannel) -> None:
    async def scenario() -> Completion:
        completion = channel.copy([0], [0])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_awaited(completion), 0.01)
        return completion

    completion = asyncio.run(scenario())  # the loop is closed when the copy ends
    channel.permits.release(1)
    assert completion.wait(10)


async def _awaited(completion: Completion) -> None:
    await completion
