"""Slow bodies, and many bodies at once."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from ray.serve._private.direct_ingress_http_util import ASGIDIReceiveProxy

from alignedserve.errors import AlignedServeError, OverloadedError
from alignedserve.gateway.http.asgi import ClientGoneError, Message, Receive, Scope, Send, send_json
from alignedserve.gateway.http.body_reader import BodyReader, SlowBodyError, TooLargeError
from alignedserve.gateway.http.pacing import Pace

MIB = 1 << 20
SCOPE: dict[str, Any] = {"headers": []}
POSTED = {"type": "http", "headers": [(b"content-length", b"4000000")]}
Play = Callable[[Coroutine[Any, Any, Any]], Any]


class _NoWaiting(selectors.SelectSelector):
    """A virtual clock: it jumps to the next timer when no task is ready, regardless of the machine's load."""

    now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now_s += timeout or 0.0
        return super().select(0)


@pytest.fixture
def play() -> Iterator[Play]:
    """Runs a coroutine by the virtual clock, which `now` reads."""

    def make() -> asyncio.AbstractEventLoop:
        selector = _NoWaiting()
        loop = asyncio.SelectorEventLoop(selector)
        loop.time = lambda: selector.now_s  # type: ignore[method-assign]
        return loop

    with asyncio.Runner(loop_factory=make) as runner:
        yield runner.run


def now() -> float:
    return asyncio.get_running_loop().time()


class Sender:
    """A client that sends each piece after a pause, then nothing until it leaves at `leaves_s`."""

    def __init__(self, *pieces: tuple[float, bytes], whole: bool = True, leaves_s: float = 1e9) -> None:
        self._pieces = list(pieces)
        self._whole = whole
        self._leaves_s = leaves_s
        self.received = 0

    async def __call__(self) -> dict[str, Any]:
        if not self._pieces:
            await asyncio.sleep(max(0.0, self._leaves_s - now()))
            return {"type": "http.disconnect"}
        pause_s, piece = self._pieces[0]
        await asyncio.sleep(pause_s)
        self.received += len(self._pieces.pop(0)[1])
        return {"type": "http.request", "body": piece, "more_body": bool(self._pieces) or not self._whole}


def test_a_body_without_progress_is_given_up_and_says_why(play: Play) -> None:
    async def steps() -> None:
        reader = BodyReader(MIB)
        begun_s = now()
        with pytest.raises(SlowBodyError, match=r"no data for 5 s") as refused:
            await reader.read(SCOPE, Sender((0.0, b"x" * 5000), whole=False))
        assert (refused.value.http_status, refused.value.code) == (408, "request_timeout")
        assert reader.partial_bytes == 0
        assert now() - begun_s == pytest.approx(5.0)

    play(steps())


@pytest.mark.parametrize("first", [1, 5000, 3 * MIB])
def test_a_body_that_trickles_is_given_up_whatever_it_began_with(play: Play, first: int) -> None:
    """Once, a fast beginning allowed an hour of one byte every 4.9 s."""

    async def steps() -> None:
        begun_s = now()
        with pytest.raises(SlowBodyError, match="fewer than 1024 bytes a second over 10 s"):
            await BodyReader(4 * MIB).read(SCOPE, Sender((0.0, b"x" * first), *[(4.9, b"x")] * 100))
        assert now() - begun_s == pytest.approx(10.0, abs=0.1)

    play(steps())


def test_a_body_that_comes_slowly_enough_but_steadily_is_read_whole(play: Play) -> None:
    pieces = [(4.0, b"x" * 4200)] * 40
    assert len(play(BodyReader(MIB).read(SCOPE, Sender(*pieces)))) == 168_000


def test_a_large_body_waits_for_room_that_unfinished_ones_hold_and_a_small_one_does_not(play: Play) -> None:
    async def steps() -> None:
        reader = BodyReader(MIB, most_partial_bytes=200_000)
        holding = asyncio.ensure_future(reader.read(SCOPE, Sender((0.0, b"x" * 190_000), whole=False)))
        await asyncio.sleep(1.0)
        assert reader.partial_bytes == 190_000
        with pytest.raises(OverloadedError):
            await reader.read(SCOPE, Sender((0.0, b"x" * 70_000), (0.0, b"x")))
        assert await reader.read(SCOPE, Sender((0.0, b"x" * 20_000), (0.0, b"x"))) == b"x" * 20_001
        with pytest.raises(SlowBodyError):
            await holding
        assert reader.partial_bytes == 0

    play(steps())


@pytest.mark.parametrize(
    ("receive", "expected"),
    [
        (lambda: Sender((0.0, b"x" * 101)), TooLargeError),
        (lambda: Sender((0.0, b"x" * 60), (0.0, b"x" * 60)), TooLargeError),
        (lambda: Sender(leaves_s=0.0), ClientGoneError),
    ],
)
def test_what_is_given_up_for_another_reason_holds_nothing(
    play: Play, receive: Callable[[], Any], expected: type[AlignedServeError] | type[ClientGoneError]
) -> None:
    reader = BodyReader(100)
    with pytest.raises(expected):
        play(reader.read(SCOPE, receive()))
    assert reader.partial_bytes == 0


def whole(size: int, **options: Any) -> Sender:
    return Sender(*[(0.0, b"x" * 65536)] * (size // 65536), **options)


def test_large_bodies_share_a_pace_and_small_ones_wait_for_none(play: Play) -> None:
    async def steps() -> None:
        reader = BodyReader(4 * MIB)
        begun_s = now()
        for _ in range(2):  # two bodies are within the burst
            assert len(await reader.read(SCOPE, whole(4 * MIB))) == 4 * MIB
        assert now() == begun_s
        large = [asyncio.ensure_future(reader.read(SCOPE, whole(4 * MIB))) for _ in range(4)]
        await asyncio.sleep(0.1)
        assert reader.partial_bytes == 16 * MIB, "read at once, and counted while they wait"
        assert len(await reader.read(SCOPE, Sender((0.0, b"y" * 1000)))) == 1000
        assert now() - begun_s == pytest.approx(0.1)
        assert [len(body) for body in await asyncio.gather(*large)] == [4 * MIB] * 4
        assert now() - begun_s == pytest.approx(2.0)
        assert reader.partial_bytes == 0

    play(steps())


def test_a_client_that_leaves_while_it_waits_has_taken_nothing_of_the_pace(play: Play) -> None:
    async def steps() -> None:
        reader = BodyReader(8 * MIB)
        begun_s = now()
        await reader.read(SCOPE, whole(8 * MIB))
        leaving = [asyncio.ensure_future(reader.read(SCOPE, whole(8 * MIB, leaves_s=begun_s + 0.5))) for _ in range(9)]
        for body in leaving:
            with pytest.raises(ClientGoneError):
                await body
        assert (now() - begun_s, reader.partial_bytes) == (0.5, 0)
        await reader.read(SCOPE, whole(8 * MIB))
        assert now() - begun_s == pytest.approx(1.0)

    play(steps())


def test_what_waits_for_the_pace_has_a_bound(play: Play) -> None:
    async def steps() -> None:
        pace = Pace(bytes_s=MIB, burst_bytes=0, most_waiting_bytes=3 * MIB)
        waiting = [asyncio.ensure_future(pace.take(MIB)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError) as refused:
            await pace.take(MIB)
        assert refused.value.retry_after_s == pytest.approx(1.0)
        await asyncio.gather(*waiting)
        await pace.take(MIB)

    play(steps())


# ---- Ray Serve reads a body as fast as it arrives, and buffers it


def endless(piece: bytes) -> Receive:
    """A client that always has more."""

    async def receive() -> Message:
        await asyncio.sleep(0.001)
        return {"type": "http.request", "body": piece, "more_body": True}

    return receive


def test_what_serve_has_read_is_taken_at_once(play: Play) -> None:
    """Otherwise an unbounded queue would hold it, and nothing would count it."""

    async def steps() -> None:
        received = ASGIDIReceiveProxy({"type": "http"}, endless(b"x" * 65536), asyncio.get_running_loop())
        reading = received.fetch_until_disconnect_task()
        queued = 0

        async def watch() -> None:
            nonlocal queued
            while True:
                queued = max(queued, received.queue.qsize())
                await asyncio.sleep(0.001)

        watching = asyncio.ensure_future(watch())
        reader = BodyReader(64 * MIB)
        with pytest.raises(TooLargeError):
            await reader.read(SCOPE, received)
        assert queued <= 2
        assert reader.partial_bytes == 0
        reading.cancel()
        watching.cancel()

    play(steps())


# ---- refusals before a body has come


async def refusing(scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, {}, 401)


def exchange(play: Play, receive: Receive, *headers: tuple[bytes, bytes]) -> tuple[list[tuple[float, Message]], float]:
    """The messages of a refusing application with the seconds until each, and the seconds until its end."""

    async def steps() -> tuple[list[tuple[float, Message]], float]:
        said = []
        begun_s = now()

        async def send(message: Message) -> None:
            said.append((now() - begun_s, message))

        scope = {**POSTED, "headers": [*POSTED["headers"], *headers]}
        await BodyReader(4 * MIB).closing_where_unread(refusing)(scope, receive, send)
        return said, now() - begun_s

    done: tuple[list[tuple[float, Message]], float] = play(steps())
    return done


CLOSE = (b"connection", b"close")


def test_a_refusal_of_a_body_that_has_come_leaves_the_connection_open(play: Play) -> None:
    said, seconds = exchange(play, Sender((0.01, b"x" * 1000), (0.01, b"x")))
    assert CLOSE not in said[0][1]["headers"]
    assert seconds < 0.05


@pytest.mark.parametrize(("pause_s", "ends_s"), [(4.9, 10.1), (50.0, 5.1)])
def test_a_refused_body_that_trickles_is_read_for_ten_seconds(play: Play, pause_s: float, ends_s: float) -> None:
    """Once, it and its connection stayed open without a limit."""
    said, seconds = exchange(play, Sender((0.0, b"x"), *[(pause_s, b"x")] * 100))
    assert [message.get("more_body") for _, message in said] == [None, True, None]
    assert CLOSE in said[0][1]["headers"]
    assert said[1][0] < 0.1, "the client has its answer before"
    assert seconds == pytest.approx(ends_s, abs=0.1)


def test_a_refused_body_that_comes_is_read_to_its_end_but_not_beyond_the_limit(play: Play) -> None:
    steady = Sender(*[(0.2, b"x" * 65536)] * 40)
    assert exchange(play, steady)[1] == pytest.approx(8.0, abs=0.1)
    assert steady.received == 40 * 65536
    flood = Sender(*[(0.0, b"x" * 65536)] * 1000, whole=False)
    assert exchange(play, flood)[1] < 0.1
    assert flood.received <= 12 * MIB


def test_the_first_caller_is_answered_at_once(play: Play) -> None:
    said, _ = exchange(play, Sender(whole=False), (b"expect", b"100-continue"))
    assert said[0][0] == said[1][0] == 0.0
