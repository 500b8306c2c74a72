"""Clients that are slow on purpose, through HAProxy: they are ended, and keep no other client out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import time
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
import pytest_asyncio

from alignedserve.client import AsyncClient
from alignedserve.config import Config
from alignedserve.config_sources import from_tree
from alignedserve.request import FinishReason, RequestSpec
from support.callers import head_of
from support.fake_cluster import FakeCluster
from support.gateway import RunningGateway, running_gateway
from support.haproxy_front import HaProxyFront
from support.raw_h2 import RawH2

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

BODY = {"model": "tiny", "prompt": [10, 11, 12], "max_tokens": 2}
HALF_OPEN = 4200  # where this machine's limit of open files allows so many
QUEUE, BODIES = 32, 40
FIRST_AFTER_S, NEXT_AFTER_S = 12.0, 8.0  # longer than a client has for anything
CLIENT_S = 3  # `timeout client` of the front where that is waited for
PLACES = 240  # of 400 connections HTTP has so many (`haproxy_exec`)
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
GRPC = {"content-type": "application/grpc", "te": "trailers"}
GENERATE = "/alignedserve.v1.Inference/Generate"


@pytest.fixture(scope="module", autouse=True)
def most_half_open() -> Iterator[int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    yield min(HALF_OPEN, most // 8)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def answer(cluster: FakeCluster, spec: RequestSpec) -> None:
    """Two tokens at once, or for a prompt that begins with 99 each only after a slow client's time."""
    waits = spec.prompt_token_ids[0] == 99
    if not spec.output_token_ids:
        await asyncio.sleep(FIRST_AFTER_S * waits)
        cluster.emit(spec, [11])
    await asyncio.sleep(NEXT_AFTER_S * waits)
    cluster.emit(spec, [12], finish=FinishReason.LENGTH)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[RunningGateway]:
    async with FakeCluster(answer) as cluster, running_gateway(cluster, max_queue=QUEUE) as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(gateway: RunningGateway) -> AsyncIterator[HaProxyFront]:
    async with in_front_of(gateway) as front:
        yield front


@contextlib.asynccontextmanager
async def in_front_of(
    gateway: RunningGateway, config: Config | None = None, **variables: str
) -> AsyncIterator[HaProxyFront]:
    """HAProxy that has found the gateway, with other variables of Ray Serve's."""
    async with (
        HaProxyFront([gateway.url], [gateway.grpc_address], config, variables) as front,
        httpx.AsyncClient(base_url=front.live_url) as http,
    ):
        async with asyncio.timeout(30.0):
            while (await http.get("/health")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        yield front


async def send(
    front: HaProxyFront, first: bytes, *more: tuple[float, bytes], port: int | None = None
) -> tuple[int, float]:
    """Sends the pieces, each after a pause, until the other end closes the connection; the status of what was said (0:
    nothing) and the seconds until then."""
    begun_s = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port or front.port)
    writer.write(first)
    reading = asyncio.ensure_future(reader.read())
    try:
        for pause_s, piece in more:
            if (await asyncio.wait((reading,), timeout=pause_s))[0]:
                break
            writer.write(piece)
        said = b""
        with contextlib.suppress(ConnectionError):
            said = await reading
    finally:
        writer.close()
    return (int(said.split()[1]) if said else 0), time.monotonic() - begun_s


async def ask(url: str, *, h2c: bool = False, **options: object) -> float:
    """Seconds that a whole completion takes."""
    async with httpx.AsyncClient(base_url=url, timeout=40.0, http1=not h2c, http2=h2c) as http:
        begun_s = time.monotonic()
        answered = await http.post("/v1/completions", json={**BODY, **options})
        assert answered.status_code == 200, answered.text
        assert '"finish_reason":"length"' in answered.text
        return time.monotonic() - begun_s


async def half_sent_headers_keep_no_other_out_and_end(front: HaProxyFront, count: int) -> None:
    half_open = [asyncio.ensure_future(send(front, HALF)) for _ in range(count)]
    await asyncio.sleep(0.5)

    await ask(front.url)
    async with httpx.AsyncClient(timeout=15.0) as http:
        for url in (front.url, front.live_url):
            for path in ("/live", "/health"):
                assert (await http.get(url + path)).status_code == 200
        assert (await http.post(f"{front.live_url}/v1/completions", json=BODY)).status_code == 404
    async with AsyncClient(front.grpc_address, timeout_s=15) as client:
        assert (await client.generate(prompt_token_ids=[10], max_tokens=2)).token_ids == (11, 12)

    ended = await asyncio.gather(*half_open)
    assert {status for status, _ in ended} == {408}
    assert max(seconds for _, seconds in ended) < 40  # ten, on a machine with nothing else to do


async def bodies_that_stop_or_trickle_end_and_hold_no_place(front: HaProxyFront) -> None:
    body = json.dumps({**BODY, "user": "x" * 30000}).encode()
    stopped = [asyncio.ensure_future(send(front, head_of(len(body)) + body[:1])) for _ in range(BODIES)]
    trickle = asyncio.ensure_future(send(front, head_of(len(body)) + body[:1], *[(1.0, b" ")] * 60))
    size = 2000
    pieces = [(1.0, body[at : at + size]) for at in range(0, len(body), size)]
    slow_but_fair = asyncio.ensure_future(send(front, head_of(len(body)), *pieces))
    await asyncio.sleep(1.0)

    for _ in range(3):
        await ask(front.url)

    assert {status for status, _ in await asyncio.gather(*stopped)} == {408}
    async with RawH2(front.port) as connection:
        number = connection.send("POST", "/v1/completions", {"content-length": str(len(body))}, end=False)
        connection.send_body(number, body[:1], end=False)
        assert (await connection.answer(number)).error["code"] == "request_timeout"
        assert (await connection.answer(connection.send("GET", "/live"))).status == 200
    status, seconds = await trickle
    assert status == 408
    assert 10 <= seconds < 30
    assert (await slow_but_fair)[0] == 200


async def one_that_says_nothing_is_told_nothing(front: HaProxyFront) -> None:
    """It may be about to send its first request, and would take anything for the answer to that."""
    for port in (front.port, int(front.live_url.rpartition(":")[2])):
        status, seconds = await send(front, b"", port=port)
        assert status == 0
        assert seconds < 30


async def a_grpc_call_whose_message_never_comes_ends(front: HaProxyFront) -> None:
    async with asyncio.timeout(30.0), RawH2(front.grpc_port) as connection:
        answer = await connection.answer(connection.send("POST", GENERATE, GRPC, end=False))
    assert answer.headers["grpc-status"] == "14"


async def one_that_waits_for_tokens_is_not_slow(gateway: RunningGateway) -> None:
    async def call(address: str, *, stream: bool) -> None:
        async with AsyncClient(address, timeout_s=60, resume_s=0, max_retries=0) as client:
            if not stream:
                assert (await client.generate(prompt_token_ids=[99], max_tokens=2)).token_ids == (11, 12)
                return
            async with client.stream(prompt_token_ids=[99], max_tokens=2) as chunks:
                assert [chunk.token_ids async for chunk in chunks] == [(11,), (12,)]

    async with (
        in_front_of(gateway, RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S=str(CLIENT_S)) as front,
        asyncio.TaskGroup() as group,
    ):
        for stream in (False, True):
            group.create_task(ask(front.url, prompt=[99], stream=stream))
            group.create_task(ask(front.url, h2c=True, prompt=[99], stream=stream))
            group.create_task(call(front.grpc_address, stream=stream))


@pytest.mark.slow
async def test_slow_clients_end_and_keep_no_other_out(
    front: HaProxyFront, gateway: RunningGateway, most_half_open: int
) -> None:
    """All at once, since each takes as long as a slow client has."""
    async with asyncio.TaskGroup() as group:
        group.create_task(half_sent_headers_keep_no_other_out_and_end(front, most_half_open))
        group.create_task(bodies_that_stop_or_trickle_end_and_hold_no_place(front))
        group.create_task(one_that_says_nothing_is_told_nothing(front))
        group.create_task(a_grpc_call_whose_message_never_comes_ends(front))
        group.create_task(one_that_waits_for_tokens_is_not_slow(gateway))


@pytest.mark.slow
async def test_a_full_front_is_alive_and_has_places_again_once_slow_clients_have_had_their_time(
    gateway: RunningGateway,
) -> None:
    """Bodies that stop take all places; as many half-sent heads wait for these, and a completion waits behind them."""
    async with in_front_of(gateway, RAY_SERVE_HAPROXY_MAXCONN="400") as front:
        body = json.dumps(BODY).encode()
        slow = [asyncio.ensure_future(send(front, head_of(len(body)) + body[:1])) for _ in range(PLACES)]
        await asyncio.sleep(0.5)
        slow += [asyncio.ensure_future(send(front, HALF)) for _ in range(PLACES)]
        await asyncio.sleep(0.5)
        completion = asyncio.ensure_future(ask(front.url))
        await asyncio.sleep(0.5)
        async with httpx.AsyncClient(base_url=front.live_url, timeout=2.0) as http:
            assert (await http.get("/live")).status_code == 200
        async with AsyncClient(front.grpc_address, timeout_s=2) as client:
            assert (await client.generate(prompt_token_ids=[10], max_tokens=2)).token_ids == (11, 12)
        assert not completion.done()
        assert await completion < 25
        assert {status for status, _ in await asyncio.gather(*slow)} == {408}


@pytest.mark.slow
async def test_an_address_has_a_limit_where_one_is_set(front: HaProxyFront) -> None:
    limited = from_tree({"gateway": {"address_connections": 5, "address_requests": 3}})
    async with (
        HaProxyFront([front.url], [front.grpc_address], limited) as narrow,
        httpx.AsyncClient(base_url=narrow.url, http1=False, http2=True) as http,
        RawH2(narrow.grpc_port) as grpc,
    ):
        async with asyncio.timeout(30.0):
            while (await http.get("/live")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.5)
        await asyncio.sleep(1.1)
        answers = await asyncio.gather(*(http.get("/live") for _ in range(20)))
        assert {answer.status_code for answer in answers} == {200, 429}
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert refused.headers["retry-after"] == "1"
        calls = [grpc.send("POST", GENERATE, GRPC, end=False) for _ in range(20)]
        headers = (await grpc.answer(calls[-1])).headers
        assert (headers["content-type"], headers["grpc-status"]) == ("application/grpc", "8")
        assert headers["grpc-message"].endswith(" [code=overloaded retry-after-s=1]")
        ended = [asyncio.ensure_future(is_ended_at_once(narrow.port)) for _ in range(8)]
        assert sum(await asyncio.gather(*ended)) >= 3


async def is_ended_at_once(port: int) -> bool:
    """Whether a new connection, on which nothing is said, is closed within two seconds."""
    writer = None
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(2.0):
            return await reader.read(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    finally:
        if writer is not None:
            writer.close()
