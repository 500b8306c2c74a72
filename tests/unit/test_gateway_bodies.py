"""Bodies that come slowly, and many of them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from alignedserve.errors import AlignedServeError, OverloadedError
from alignedserve.gateway import bodies, pacing
from alignedserve.gateway.asgi import ClientGoneError
from alignedserve.gateway.bodies import BodyReader, SlowBodyError, TooLargeError

SCOPE: dict[str, Any] = {"headers": []}


class Sender:
    """A client that sends each piece after a pause, and then nothing more."""

    def __init__(self, *pieces: tuple[float, bytes], whole: bool = True) -> None:
        self._pieces = list(pieces)
        self._whole = whole

    async def __call__(self) -> dict[str, Any]:
        if not self._pieces:
            await asyncio.sleep(3600)
        pause_s, piece = self._pieces.pop(0)
        await asyncio.sleep(pause_s)
        return {"type": "http.request", "body": piece, "more_body": bool(self._pieces) or not self._whole}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rules, faster; with room for a machine that is busy."""
    monkeypatch.setattr(bodies, "NO_PROGRESS_S", 0.6)
    monkeypatch.setattr(bodies, "AVERAGE_AFTER_S", 1.0)
    monkeypatch.setattr(bodies, "LEAST_BYTES_S", 10240.0)


async def test_a_body_without_progress_is_given_up_and_says_why() -> None:
    reader = BodyReader(1 << 20)
    with pytest.raises(SlowBodyError, match=r"nothing of it came for 0\.6 s") as refused:
        await reader.read(SCOPE, Sender((0.0, b"x" * 5000), whole=False))
    assert (refused.value.http_status, refused.value.code) == (408, "request_timeout")
    assert reader.partial_bytes == 0


async def test_a_body_that_trickles_is_given_up_though_it_progresses() -> None:
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    with pytest.raises(SlowBodyError, match="fewer than 10240 a second"):
        await BodyReader(1 << 20).read(SCOPE, Sender(*[(0.1, b"x")] * 100))
    assert 1.0 <= loop.time() - begun_s < 5.0


async def test_a_body_that_comes_slowly_enough_but_steadily_is_read_whole() -> None:
    pieces = [(0.1, b"x" * 6000)] * 12
    assert await BodyReader(1 << 20).read(SCOPE, Sender(*pieces)) == b"x" * 72000


async def test_a_large_body_waits_for_room_that_unfinished_ones_hold_and_a_small_one_does_not() -> None:
    reader = BodyReader(1 << 20, most_partial_bytes=200_000)
    holding = asyncio.ensure_future(reader.read(SCOPE, Sender((0.0, b"x" * 190_000), whole=False)))
    while not reader.partial_bytes:  # noqa: ASYNC110
        await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await reader.read(SCOPE, Sender((0.0, b"x" * 70_000), (0.0, b"x")))
    assert await reader.read(SCOPE, Sender((0.0, b"x" * 20_000), (0.0, b"x"))) == b"x" * 20_001
    with pytest.raises(SlowBodyError):
        await holding
    assert reader.partial_bytes == 0


@pytest.mark.parametrize(
    ("receive", "expected"),
    [
        (lambda: Sender((0.0, b"x" * 101)), TooLargeError),
        (lambda: Sender((0.0, b"x" * 60), (0.0, b"x" * 60)), TooLargeError),
        (lambda: _gone, ClientGoneError),
    ],
)
async def test_what_is_given_up_for_another_reason_holds_nothing(
    receive: Callable[[], Any], expected: type[AlignedServeError] | type[ClientGoneError]
) -> None:
    reader = BodyReader(100)
    with pytest.raises(expected):
        await reader.read(SCOPE, receive())
    assert reader.partial_bytes == 0


async def _gone() -> dict[str, Any]:
    return {"type": "http.disconnect"}


async def test_large_bodies_share_a_pace_and_small_ones_wait_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing.Pace.__init__, "__defaults__", (4 << 20, 1 << 20))
    loop = asyncio.get_running_loop()
    reader = BodyReader(4 << 20)
    begun_s = loop.time()
    assert len(await reader.read(SCOPE, Sender(*[(0.0, b"x" * 65536)] * 16))) == 1 << 20
    assert loop.time() - begun_s < 0.2, "one after a while in which there were none"
    large = [asyncio.ensure_future(reader.read(SCOPE, Sender(*[(0.0, b"x" * 65536)] * 16))) for _ in range(3)]
    await asyncio.sleep(0.1)
    asked_s = loop.time()
    assert await reader.read(SCOPE, Sender((0.0, b"y" * 1000))) == b"y" * 1000
    assert loop.time() - asked_s < 0.1
    assert [len(body) for body in await asyncio.gather(*large)] == [1 << 20] * 3
    assert 0.5 <= loop.time() - begun_s < 3.0
