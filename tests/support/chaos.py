"""Kills and stops processes of a running server while greedy streams are in flight, and compares the answers.

A round counts only if the victim was struck while streams were being delivered. The rig needs the server's HTTP
address (status, metrics) and gRPC address (streams, through `alignedserve.client`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from alignedserve.client import AsyncClient
from alignedserve.control.samples import by_instance, value
from alignedserve.errors import AlignedServeError
from support.chaos_asks import Ask, Heard
from support.started import ranks_of

REPEATED = "alignedserve_prefill_repeated_tokens_total"
REUSED = "alignedserve_prefill_reused_tokens_total"
SETTLED_S = 10.0


@dataclass(slots=True)
class Stream:
    """What one client received."""

    ask: Ask
    heard: Heard = field(default_factory=Heard)
    begun_s: float = field(default_factory=time.monotonic)
    times_s: list[float] = field(default_factory=list)
    error: str = ""
    ended: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.heard.tokens

    def wrong(self, expected: Heard) -> bool:
        """Whether it is not `expected`; of a stream that failed, not how `expected` begins."""
        return not self.heard.begins(expected) if self.error else self.heard != expected

    @property
    def invalid(self) -> bool:
        """Whether it ended well and breaks the grammar that it was asked to follow."""
        return not self.error and not self.ask.valid(self.heard)

    @property
    def longest_gap_s(self) -> float:
        """The longest pause between two pieces of the answer, in seconds."""
        return max((b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)), default=0.0)

    def first_token_after_s(self, moment_s: float) -> float:
        """Seconds from then until its first token; 0 if it already had one, or never got one."""
        return max(0.0, self.times_s[0] - max(moment_s, self.begun_s)) if self.times_s else 0.0


@dataclass(frozen=True, slots=True)
class Strike:
    """One strike: the victim, the signal, and how many tokens the streams had by then and still lacked."""

    role: str
    id: str
    how: str
    tokens_before: int
    streams_in_flight: int
    restored_s: float  # until a successor was ready


@dataclass(frozen=True, slots=True)
class Round:
    """The effect of a strike on the streams. `strike`: None: nothing was struck."""

    strike: Strike | None
    streams: int
    wrong: int  # streams whose tokens, text or calls are not those of the undisturbed run
    invalid: int  # streams that ended, and do not follow their grammar
    errors: tuple[str, ...]
    longest_gap_s: float
    longest_first_s: float  # from the strike to the first token, for streams without tokens before it
    repeated_tokens: int  # tokens computed again in prefill
    reused_tokens: int  # tokens not computed again, because the pool still had their KV
    blocks_left: int
    segments_more: int  # segments of the node agent beyond those before the first strike

    @property
    def counts(self) -> bool:
        """Whether the strike came while streams were being delivered."""
        return self.strike is None or self.strike.streams_in_flight > 0


class Chaos:
    """`async with Chaos(url, grpc_address, asks) as chaos`, then `undisturbed()` once and `strike()` at will.

    Every round asks the same, with `max_tokens` for answers without a grammar. It is compared with the undisturbed run.
    """

    def __init__(
        self,
        url: str,
        grpc_address: str,
        asks: Sequence[Ask],
        *,
        max_tokens: int = 96,
        seed: int = 0,
        resume_s: float = 15.0,
    ) -> None:
        self._asks = asks
        self._max_tokens = max_tokens
        self._draw = random.Random(seed)
        self._http = httpx.AsyncClient(base_url=url, timeout=5.0)
        self._client = AsyncClient(grpc_address, resume_s=resume_s)
        self._expected: list[Heard] = []
        self._segments = 0

    async def __aenter__(self) -> Chaos:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._client.close()
        await self._http.aclose()

    async def undisturbed(self) -> Round:
        """The run that the others are compared with. Raises AssertionError if a stream failed."""
        streams = await self._run(None)
        failed = [stream.error for stream in streams if stream.error]
        assert not failed, failed
        self._expected = [stream.heard for stream in streams]
        self._segments = await self._count_segments()
        return await self._judge(None, streams, 0.0, {}, {})

    @property
    def expected_tokens(self) -> int:
        """Tokens of all answers of the undisturbed run."""
        return sum(len(heard.tokens) for heard in self._expected)

    async def strike(self, role: str, number: int = signal.SIGKILL, *, at: float | None = None) -> Round:
        """Signal a process of the role once the share `at` (random by default) of all tokens has been delivered.

        "rank of" and a role: one of the other ranks of an instance.
        """
        share = self._draw.uniform(0.1, 0.7) if at is None else at
        repeated, reused = await self._counters(REPEATED), await self._counters(REUSED)
        victim = self._draw.choice(await self._living(role.removeprefix(RANK_OF)))
        pids = ranks_of(victim["pid"]) if role.startswith(RANK_OF) else [victim["pid"]]
        struck: list[tuple[int, int, float, asyncio.Task[float]]] = []

        def watch(streams: Sequence[Stream]) -> None:
            delivered = sum(len(stream.tokens) for stream in streams)
            if not struck and delivered >= share * self.expected_tokens:
                in_flight = sum(1 for stream in streams if stream.tokens and not stream.ended)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pids[0], number)
                    replaced = asyncio.ensure_future(self._wait_replaced(victim))
                    struck.append((delivered, in_flight, time.monotonic(), replaced))

        streams = await self._run(watch)
        assert struck, f"{victim['id']} was gone before it was struck"
        delivered, in_flight, at_s, replaced = struck[0]
        restored_s = await replaced - at_s
        how = signal.Signals(number).name
        strike = Strike(role, victim["id"], how, delivered, in_flight, restored_s)
        return await self._judge(strike, streams, at_s, repeated, reused)

    # ---- the streams

    async def _run(self, watch: Any) -> list[Stream]:
        streams = [Stream(ask) for ask in self._asks]
        await asyncio.gather(*(self._follow(stream, streams, watch) for stream in streams))
        return streams

    async def _follow(self, stream: Stream, streams: Sequence[Stream], watch: Any) -> None:
        try:
            async for chunk in stream.ask.stream(self._client, self._max_tokens):
                stream.heard.take(chunk)
                stream.times_s.append(time.monotonic())
                if watch is not None:
                    watch(streams)
        except AlignedServeError as error:
            stream.error = f"{type(error).__name__}: {error}"
        stream.ended = True

    async def _judge(
        self,
        strike: Strike | None,
        streams: Sequence[Stream],
        struck_s: float,
        repeated: dict[str, float],
        reused: dict[str, float],
    ) -> Round:
        pairs = zip(streams, self._expected, strict=True)
        left = await self._blocks_left()
        return Round(
            strike=strike,
            streams=len(streams),
            wrong=sum(stream.wrong(expected) for stream, expected in pairs),
            invalid=sum(stream.invalid for stream in streams),
            errors=tuple(stream.error for stream in streams if stream.error),
            longest_gap_s=max(stream.longest_gap_s for stream in streams),
            longest_first_s=max(stream.first_token_after_s(struck_s) for stream in streams),
            repeated_tokens=_grown(repeated, await self._counters(REPEATED)),
            reused_tokens=_grown(reused, await self._counters(REUSED)),
            blocks_left=left,
            segments_more=await self._segments_more(),
        )

    # ---- the server

    async def _get(self, path: str, timeout_s: float = 60.0) -> httpx.Response:
        """Retry until the answer has status 200, even if a process was just killed."""
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(httpx.HTTPError):
                answer = await self._http.get(path)
                if answer.status_code == 200:
                    return answer
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} did not answer within {timeout_s:g} s")
            await asyncio.sleep(0.1)

    async def _roles(self) -> list[dict[str, Any]]:
        return list((await self._get("/alignedserve/status")).json()["roles"])

    async def _living(self, role: str, timeout_s: float = 60.0) -> list[dict[str, Any]]:
        deadline = time.monotonic() + timeout_s
        while True:
            ready = [r for r in await self._roles() if r["role"] == role and r["state"] == "ready"]
            found = [r for r in ready if psutil.pid_exists(r["pid"])]  # a struck process may still be listed
            if found or time.monotonic() > deadline:
                return found
            await asyncio.sleep(0.1)

    async def _wait_replaced(self, victim: dict[str, Any], timeout_s: float = 90.0) -> float:
        """Wait until the victim is dead and as many processes of its role are ready as before. When that was."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            living = [r for r in await self._living(victim["role"]) if r["pid"] != victim["pid"]]
            same = [r for r in living if r["id"] == victim["id"] or victim["role"] == "gateway"]
            if same and not psutil.pid_exists(victim["pid"]):
                await self._get("/health", deadline - time.monotonic())
                return time.monotonic()
            await asyncio.sleep(0.1)
        raise TimeoutError(f"{victim['id']} was not replaced within {timeout_s:g} s")

    async def _counters(self, name: str) -> dict[str, float]:
        return by_instance((await self._get("/metrics")).text, name)

    async def _blocks_left(self) -> int:
        """Blocks with holders after all streams have ended. Waits some time for the last messages."""
        deadline = time.monotonic() + SETTLED_S
        while True:
            text = (await self._get("/metrics")).text
            owned = int(value(text, "alignedserve_kv_blocks", state="owned"))
            if not owned or time.monotonic() > deadline:
                return owned
            await asyncio.sleep(0.2)

    async def _segments_more(self) -> int:
        """Waits some time: a node agent's successor takes segments over, and a role's successor drops old ones."""
        deadline = time.monotonic() + SETTLED_S
        while True:
            more = await self._count_segments() - self._segments
            if not more or time.monotonic() > deadline:
                return more
            await asyncio.sleep(0.2)

    async def _count_segments(self) -> int:
        agents = await self._living("node_agent")
        return sum(int(agent["holds"].partition(" ")[0]) for agent in agents)


def _grown(before: dict[str, float], after: dict[str, float]) -> int:
    """How much counters have grown. A counter that is smaller now belongs to a new process."""
    return int(sum(now - (before.get(name, 0) if before.get(name, 0) <= now else 0) for name, now in after.items()))


RANK_OF = "rank of "
HEADER = (
    "role",
    "struck by",
    "kills",
    "streams",
    "wrong",
    "invalid",
    "errors",
    "longest gap",
    "first token",
    "restored",
    "again",
    "blocks",
    "segments",
)


def table(rounds: Sequence[Round]) -> list[list[str]]:
    """One row for each role and kind of strike, with worst cases and sums of tokens."""
    groups: dict[tuple[str, str], list[Round]] = {}
    for one in rounds:
        name = ("none", "") if one.strike is None else (one.strike.role, one.strike.how)
        groups.setdefault(name, []).append(one)
    rows = []
    for (role, how), found in groups.items():
        restored = max((one.strike.restored_s for one in found if one.strike), default=0.0)
        rows.append(
            [
                role,
                how,
                str(sum(one.strike is not None for one in found)),
                str(sum(one.streams for one in found)),
                str(sum(one.wrong for one in found)),
                str(sum(one.invalid for one in found)),
                str(sum(len(one.errors) for one in found)),
                f"{max(one.longest_gap_s for one in found):.2f} s",
                f"{max(one.longest_first_s for one in found):.2f} s",
                f"{restored:.1f} s",
                f"{sum(one.repeated_tokens for one in found)} ({sum(one.reused_tokens for one in found)} reused)",
                str(sum(one.blocks_left for one in found)),
                str(sum(one.segments_more for one in found)),
            ]
        )
    return rows
