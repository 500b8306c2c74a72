"""What a full cluster costs its gateway: refusals before reading, bodies over the limit, slow readers."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import pytest

from alignedserve.client import AsyncClient
from alignedserve.errors import OverloadedError, TooLargeError
from alignedserve.request import FinishReason, RequestSpec, TokenLogprobs
from support.fake_cluster import FakeCluster
from support.gateway import RunningGateway, running_gateway

PATH = "/v1/completions"
BODY = {"model": "tiny", "prompt": [10, 11, 12], "max_tokens": 2}


@pytest.fixture
async def gateway(cluster: FakeCluster) -> AsyncIterator[RunningGateway]:
    async with running_gateway(cluster, max_body_mib=0.25, max_queue=64) as gateway:
        yield gateway


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    async with asyncio.timeout(10.0):
        while True:
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.01)


async def told(gateway: RunningGateway) -> None:
    """Wait for the scheduler's updates. They are ordered, so a capacity sent last arrives last."""
    await until(lambda: gateway.server.model.capacity_tokens == 4242)
    gateway.server.model.capacity_tokens = None


async def connect(
    gateway: RunningGateway, head: str, **options: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send the head of a request; `options` are the client's socket options."""
    host, port = gateway.url.removeprefix("http://").split(":")
    plain = socket.socket()
    for name, value in options.items():
        plain.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
    plain.setblocking(False)
    await asyncio.get_running_loop().sock_connect(plain, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=plain, limit=4096)
    writer.write(head.replace("\n", "\r\n").encode())
    return reader, writer


def head_of(length: str, *more: str) -> str:
    return "\n".join(
        [f"POST {PATH} HTTP/1.1", "Host: gateway", "Content-Type: application/json", length, *more, "", ""]
    )


async def read_head(reader: asyncio.StreamReader) -> tuple[int, str]:
    async with asyncio.timeout(5.0):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    return int(head.split()[1]), head


async def test_a_full_cluster_answers_429_before_it_has_read_the_body(
    cluster: FakeCluster, gateway: RunningGateway, http: httpx.AsyncClient
) -> None:
    cluster.publish_intake(0, again_s=30.0)
    cluster.publish_capacity(4242)
    await told(gateway)
    reader, writer = await connect(gateway, head_of("Content-Length: 100000"))
    status, head = await read_head(reader)
    assert status == 429
    assert "\r\nretry-after: 30\r\n" in head
    assert "\r\nx-alignedserve-hold: 1\r\n" in head
    writer.close()
    assert not cluster.submitted

    cluster.publish_intake(limited=False)
    cluster.publish_capacity(4242)
    await told(gateway)
    assert (await http.post(PATH, json=BODY)).status_code == 200


async def test_over_grpc_a_full_cluster_is_resource_exhausted(cluster: FakeCluster, gateway: RunningGateway) -> None:
    cluster.publish_intake(0, again_s=2.5)
    cluster.publish_capacity(4242)
    await told(gateway)
    async with AsyncClient(gateway.grpc_address, max_retries=0) as client:
        with pytest.raises(OverloadedError) as refused:
            await client.generate("a", max_tokens=1)
    assert refused.value.retry_after_s == pytest.approx(2.5)
    assert not cluster.submitted


async def test_as_many_as_there_is_room_for_pass_and_then_one_to_find_out(
    cluster: FakeCluster, gateway: RunningGateway, http: httpx.AsyncClient
) -> None:
    cluster.publish_intake(2, again_s=2.0)
    cluster.publish_capacity(4242)
    await told(gateway)
    statuses = [(await http.post(PATH, json=BODY)).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]

    async def passes() -> bool:
        return (await http.post(PATH, json=BODY)).status_code == 200

    await until(passes)
    assert (await http.post(PATH, json=BODY)).status_code == 429, "one, not all"


async def test_without_a_scheduler_no_request_is_held_back(cluster: FakeCluster, gateway: RunningGateway) -> None:
    cluster.publish_intake(0, again_s=30.0)
    cluster.publish_capacity(4242)
    await told(gateway)
    cluster.break_links()
    async with httpx.AsyncClient(base_url=gateway.url, timeout=10.0) as http:

        async def passes() -> bool:
            return (await http.post(PATH, json=BODY)).status_code == 200

        await until(passes)


async def test_bodies_that_have_not_come_hold_no_place(cluster: FakeCluster) -> None:
    async with running_gateway(cluster, max_queue=2) as gateway:
        slow = [await connect(gateway, head_of("Content-Length: 100")) for _ in range(8)]
        async with httpx.AsyncClient(base_url=gateway.url, timeout=10.0) as http:
            answers = [await http.post(PATH, json=BODY) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200] * 3
        for _, writer in slow:
            writer.close()


async def test_a_body_over_the_limit_is_refused_before_it_is_asked_for(gateway: RunningGateway) -> None:
    """With `Expect: 100-continue` the client waits before it sends its body, and gets 413."""
    reader, writer = await connect(gateway, head_of("Content-Length: 400000000", "Expect: 100-continue"))
    status, _ = await read_head(reader)
    assert status == 413
    assert gateway.server.intake.reading == 0
    writer.close()


async def test_a_chunked_body_is_refused_as_soon_as_it_is_over_the_limit(gateway: RunningGateway) -> None:
    reader, writer = await connect(gateway, head_of("Transfer-Encoding: chunked"))
    piece = b" " * 65536
    for _ in range(5):  # 320 KiB of an endless body; the limit is 256 KiB
        writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
    status, _ = await read_head(reader)
    assert status == 413
    writer.close()


async def test_a_grpc_message_over_the_limit_reaches_no_handler(cluster: FakeCluster, gateway: RunningGateway) -> None:
    async with AsyncClient(gateway.grpc_address) as client:
        with pytest.raises(TooLargeError, match="over the limit"):
            await client.generate("a " * 300_000, max_tokens=1)
    assert not cluster.submitted


TOP = tuple((token, -1.5) for token in range(100, 105))


async def scored_script(cluster: FakeCluster, spec: RequestSpec) -> None:
    """400 tokens with six log-probabilities each, as fast as possible."""
    while spec.remaining_tokens > 0:
        count = min(50, spec.remaining_tokens)
        finish = FinishReason.LENGTH if count == spec.remaining_tokens else None
        scores = [TokenLogprobs(-1.0, TOP)] * count
        cluster.emit(spec, [100 + number for number in range(count)], logprobs=scores, finish=finish)
        await asyncio.sleep(0)


async def test_a_client_that_does_not_read_holds_nothing_but_its_own_answer(
    cluster: FakeCluster, gateway: RunningGateway, http: httpx.AsyncClient
) -> None:
    cluster.script = scored_script
    body = {
        **BODY,
        "prompt": [[10, 11]] * 3,
        "n": 16,
        "max_tokens": 400,
        "stream": True,
        "logprobs": 5,
        "temperature": 1.0,
    }
    text = json.dumps(body)
    reader, writer = await connect(gateway, head_of(f"Content-Length: {len(text)}") + text, SO_RCVBUF=4096)
    await until(lambda: len(cluster.submitted) == 48)
    await until(lambda: len(gateway.server.ledger) == 0)  # everything is generated; the client has read almost nothing
    answers = await asyncio.gather(*(http.post(PATH, json=BODY) for _ in range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8
    whole = b""
    async with asyncio.timeout(30.0):
        while b"data: [DONE]" not in whole[-200:]:
            piece = await reader.read(1 << 20)
            assert piece, "the stream broke off"
            whole += piece
    assert len(whole) > 2_000_000, "more than buffers hold"
    assert whole.count(b'"finish_reason":"length"') == 48
    writer.close()
