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
from alignedserve.config_sources import from_tree
from alignedserve.request import FinishReason, RequestSpec
from alignedserve.testing.callers import head_of
from alignedserve.testing.fake_cluster import FakeCluster
from alignedserve.testing.gateway import running_gateway
from alignedserve.testing.haproxy_front import HaProxyFront

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

HALF_OPEN = 4200
BODIES = 1030
BODY = {"model": "tiny", "prompt": [10, 11, 12], "max_tokens": 2}
PATIENCE_S = 12.0  # longer than a client has for anything


@pytest.fixture(scope="module", autouse=True)
def open_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    if most < 3 * (HALF_OPEN + BODIES):
        pytest.skip(f"a process may have {most} open files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def answer(cluster: FakeCluster, spec: RequestSpec) -> None:
    """The first token at once, or for a prompt that begins with 99 only after a slow client's time."""
    if spec.prompt_token_ids[0] == 99:
        await asyncio.sleep(PATIENCE_S)
    cluster.emit(spec, [11])
    if spec.prompt_token_ids[0] == 99:
        await asyncio.sleep(1.0)
    cluster.emit(spec, [12], finish=FinishReason.LENGTH)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front() -> AsyncIterator[HaProxyFront]:
    async with (
        FakeCluster(answer) as cluster,
        running_gateway(cluster, max_queue=1024) as gateway,
        HaProxyFront([gateway.url], [gateway.grpc_address]) as front,
        httpx.AsyncClient(base_url=front.url) as http,
    ):
        async with asyncio.timeout(30.0):
            while (await http.get("/health")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        yield front


async def send(front: HaProxyFront, first: bytes, *more: tuple[float, bytes]) -> tuple[int, float]:
    """Sends the pieces, each after a pause, until something is said; the status of that (0: closed unsaid) and the
    seconds until then."""
    begun_s = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(first)
    reading = asyncio.ensure_future(reader.read(65536))
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


async def ask(url: str, **options: object) -> float:
    """Seconds that a whole completion takes."""
    async with httpx.AsyncClient(base_url=url, timeout=15.0) as http:
        begun_s = time.monotonic()
        answered = await http.post("/v1/completions", json={**BODY, **options})
        assert answered.status_code == 200, answered.text
        return time.monotonic() - begun_s


async def half_sent_headers_keep_no_other_out_and_end(front: HaProxyFront) -> None:
    half = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
    half_open = [asyncio.ensure_future(send(front, half)) for _ in range(HALF_OPEN)]
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
    trickle = asyncio.ensure_future(send(front, head_of(len(body)) + body[:1], *[(3.0, b" ")] * 20))
    size = 2000
    pieces = [(1.0, body[at : at + size]) for at in range(0, len(body), size)]
    slow_but_fair = asyncio.ensure_future(send(front, head_of(len(body)), *pieces))
    await asyncio.sleep(1.0)

    for _ in range(3):
        await ask(front.url)

    assert {status for status, _ in await asyncio.gather(*stopped)} == {408}
    status, seconds = await trickle
    assert status == 408
    assert 10 <= seconds < 30
    assert (await slow_but_fair)[0] == 200


async def one_that_waits_for_tokens_is_not_slow(front: HaProxyFront) -> None:
    waited = await asyncio.gather(*(ask(front.url, prompt=[99], stream=stream) for stream in (False, True)))
    assert min(waited) > PATIENCE_S


async def a_grpc_call_whose_message_never_comes_ends(front: HaProxyFront) -> None:
    """An HTTP/2 stream with headers and no data."""
    import h2.config
    import h2.connection

    async def half_a_call() -> tuple[bytes, float]:
        begun_s = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", front.grpc_port)
        connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        connection.initiate_connection()
        path = "/alignedserve.v1.Inference/Generate"
        headers = [(":method", "POST"), (":path", path), (":scheme", "http"), (":authority", "a")]
        connection.send_headers(1, [*headers, ("content-type", "application/grpc"), ("te", "trailers")])
        writer.write(connection.data_to_send())
        async with asyncio.timeout(40.0):
            while True:
                for event in connection.receive_data(await reader.read(65536)):
                    if hasattr(event, "headers"):
                        writer.close()
                        return dict(event.headers)[b"grpc-status"], time.monotonic() - begun_s

    status, seconds = await half_a_call()
    assert status == b"14"
    assert seconds < 30


async def test_slow_clients_end_and_keep_no_other_out(front: HaProxyFront) -> None:
    """All at once, since each takes as long as a slow client has."""
    async with asyncio.TaskGroup() as group:
        for scenario in (
            half_sent_headers_keep_no_other_out_and_end,
            bodies_that_stop_or_trickle_end_and_hold_no_place,
            one_that_waits_for_tokens_is_not_slow,
            a_grpc_call_whose_message_never_comes_ends,
        ):
            group.create_task(scenario(front))


async def test_an_address_has_a_limit_where_one_is_set(front: HaProxyFront) -> None:
    limited = from_tree({"gateway": {"address_connections": 5, "address_requests": 3}})
    async with (
        HaProxyFront([front.url], [front.grpc_address], limited) as narrow,
        httpx.AsyncClient(base_url=narrow.url) as http,
    ):
        async with asyncio.timeout(30.0):
            while (await http.get("/live")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.5)
        await asyncio.sleep(1.1)
        answers = [await http.get("/live") for _ in range(6)]
        assert {answer.status_code for answer in answers} == {200, 429}
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert refused.headers["retry-after"] == "1"
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
