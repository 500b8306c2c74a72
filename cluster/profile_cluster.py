"""What passes take in a cluster on this machine, against what they take alone: a part of `alignedserve profile`.

A prefill and a decode instance, pool, scheduler, gateway and proxy share the machine's cores and caches, and a pass
waits for its core. So `alignedserve serve` runs as a small cluster and serves mixed lengths, first one request at a
time, then a crowd, and its workers' counters say how long passes took against what the cost model predicts of them.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import statistics
import tempfile
import time
import urllib.request
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from alignedserve.cluster.serve_process import ServeProcess
from alignedserve.config import Config
from alignedserve.config_sources import to_tree
from alignedserve.control.samples import value
from alignedserve.errors import ResourceError, UnavailableError

CROWD = 8  # requests at once
WARM_UP_SHARE, ALONE_SHARE = 0.1, 0.3  # of the time; the crowd has the rest
SHORT, LONG, SHORT_SHARE = (16, 128), (256, 1024), 0.8  # prompt tokens
ANSWER = (16, 128)  # tokens
LEAST_BESIDE = 0.2  # of the time with the neighbour computing, to tell what that costs
START_S = 180.0


@dataclass(frozen=True, slots=True)
class Sums:
    """Of one role's passes: how many, the seconds that they took and that were predicted; `wall_s` of the clock."""

    passes: float
    seconds: float
    predicted_s: float
    wall_s: float

    def since(self, before: Sums) -> Sums:
        return Sums(*(getattr(self, entry.name) - getattr(before, entry.name) for entry in fields(Sums)))

    @property
    def busy(self) -> float:
        """The share of the time in which a pass ran."""
        return min(1.0, self.seconds / self.wall_s)

    def slowdown(self, host_overhead_s: float) -> float:
        """Seconds that passes took for each that was predicted. Raises ResourceError where none ended."""
        if not self.predicted_s:
            raise ResourceError("no pass ended in the time there was to profile the cluster; give --seconds more")
        return (self.seconds - self.passes * host_overhead_s) / self.predicted_s


def slowdown_beside(all_of_them: float, alone: float, share: float) -> float:
    """Of passes beside the neighbour's: `all_of_them` have this slowdown, of which `share` ran beside it."""
    if share < LEAST_BESIDE:
        return max(alone, all_of_them)
    return max(alone, (all_of_them - (1.0 - share) * alone) / share)


def measure_in_cluster(config: Config, content: Mapping[str, Any], cost_file: Path, limit_s: float) -> dict[str, Any]:
    """Serve for about `limit_s` seconds with the cost model `content`, which lies in `cost_file`.

    Returns `hardware`: the slowdowns and the seconds of a message, as the simulator's Hardware has them; and `fit`:
    what they come from. Raises UnavailableError where the cluster does not start, ResourceError where the time is too
    short for it.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(to_tree(_small(config, content, cost_file))), encoding="utf-8")
        try:
            with ServeProcess("--config", str(file), log=Path(folder) / "serve.log", timeout_s=START_S) as server:
                return asyncio.run(_measure(server, content, limit_s))
        except (RuntimeError, TimeoutError) as error:
            raise UnavailableError(
                f"the cluster to profile did not start; --no-cluster does without it: {error}"
            ) from error


def _small(config: Config, content: Mapping[str, Any], cost_file: Path) -> Config:
    """One instance of each role, with room for the crowd and no more."""
    block_size = content["hardware"]["block_size"]
    blocks = -(-CROWD * (LONG[1] + ANSWER[1]) // block_size)
    token_bytes = content["hardware"]["kv_bytes_per_token"]
    return replace(
        config,
        cluster=replace(config.cluster, prefill=1, decode=1),
        kv_pool=replace(config.kv_pool, size_gib=max(0.125, 3 * blocks * block_size * token_bytes / 2**30)),
        prefill=replace(config.prefill, cache_blocks=blocks, batch_buffer_blocks=blocks, requests_buffer_blocks=blocks),
        decode=replace(config.decode, cache_blocks=2 * blocks),
        scheduler=replace(
            config.scheduler,
            policy="aligned",
            cost_model=str(cost_file),
            kernel_mode="split_kv",
            refuse_for_load=False,
        ),
        supervisor=replace(config.supervisor, heartbeat_s=0.1, spares=0),
    )


class _Load:
    """Streamed requests of mixed lengths, in a closed loop. `longest`: what the model has positions for.

    Over bare connections: a client library's work would be a good part of what this is to measure.
    """

    def __init__(self, server: ServeProcess, model: str, longest: int) -> None:
        self._server = server
        self._model = model
        self._longest = longest
        self._draw = random.Random(0)
        self.queue_s: list[float] = []  # of requests that ended

    def _body(self) -> bytes:
        most = max(1, self._longest // 2)
        prompt = self._draw.randint(*(SHORT if self._draw.random() < SHORT_SHARE else LONG))
        body = {
            "model": self._model,
            "prompt": [1 + self._draw.randrange(100) for _ in range(min(most, prompt))],
            "max_tokens": min(most, self._draw.randint(*ANSWER)),
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "include_timings": True,
        }
        return json.dumps(body).encode()

    async def _go_on(self) -> None:
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
            try:
                body = self._body()
                head = (
                    "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                    f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
                )
                writer.write(head.encode() + body)
                answer = deque[bytes](maxlen=4)
                while data := await reader.read(1 << 16):
                    answer.append(data)
                self._note(b"".join(answer))
            finally:
                writer.close()

    def _note(self, answer: bytes) -> None:
        """The last of an answer. Raises UnavailableError where it is none."""
        timings = re.search(rb'"timings": ?({[^}]*})', answer)
        if timings is None:
            raise UnavailableError(f"the cluster to profile answered {answer[-200:].decode(errors='replace')!r}")
        self.queue_s.append(json.loads(timings[1])["queue_s"])

    @asynccontextmanager
    async def of(self, requests: int) -> AsyncIterator[None]:
        """So many at a time, as long as the context lasts. Raises what a request failed with."""
        self.queue_s = []
        tasks = [asyncio.ensure_future(self._go_on()) for _ in range(requests)]
        try:
            yield
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _measure(server: ServeProcess, content: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    host_s = content["hardware"].get("host_overhead_s", 0.0)
    card = server.get("/v1/models")["data"][0]
    load = _Load(server, card["id"], card["max_model_len"])
    async with load.of(CROWD):
        await asyncio.sleep(WARM_UP_SHARE * limit_s)
    async with load.of(1):
        alone = await _watch(server, ALONE_SHARE * limit_s)
        queue_s = load.queue_s
    async with load.of(CROWD):
        crowd = await _watch(server, (1.0 - WARM_UP_SHARE - ALONE_SHARE) * limit_s)
    prefill, decode = (alone[role].slowdown(host_s) for role in ("prefill", "decode"))
    prefill_all, decode_all = (crowd[role].slowdown(host_s) for role in ("prefill", "decode"))
    hardware = {
        "prefill_slowdown": prefill,
        "prefill_slowdown_beside": slowdown_beside(prefill_all, prefill, crowd["decode"].busy),
        "decode_slowdown": decode,
        "decode_slowdown_beside": slowdown_beside(decode_all, decode, crowd["prefill"].busy),
    }
    if queue_s:  # an idle cluster: a message to the scheduler, one to the prefill instance
        hardware["message_s"] = statistics.mean(queue_s) / 2
    return {
        "hardware": {name: round(number, 6) for name, number in hardware.items()},
        "fit": {
            "requests_alone": len(queue_s),
            **{
                f"{role}_{what}": {
                    "passes": int(sums.passes),
                    "seconds": round(sums.seconds, 3),
                    "busy": round(sums.busy, 3),
                }
                for what, found in (("alone", alone), ("crowd", crowd))
                for role, sums in found.items()
            },
        },
    }


async def _watch(server: ServeProcess, seconds: float) -> dict[str, Sums]:
    """What the workers count in so many seconds, by role."""
    before = await _sums(server)
    await asyncio.sleep(seconds)
    after = await _sums(server)
    return {role: after[role].since(before[role]) for role in after}


async def _sums(server: ServeProcess) -> dict[str, Sums]:
    metrics, now_s = await asyncio.to_thread(_scrape, server), time.monotonic()

    def of(passes: str, seconds: str, predicted: str) -> Sums:
        counted, took_s, predicted_s = (value(metrics, f"alignedserve_{name}") for name in (passes, seconds, predicted))
        return Sums(counted, took_s, predicted_s, now_s)

    return {
        "prefill": of("prefill_passes_total", "prefill_seconds_total", "prefill_predicted_seconds_total"),
        "decode": of("decode_iterations_total", "decode_seconds_total", "iteration_predicted_seconds_total"),
    }


def _scrape(server: ServeProcess) -> str:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30.0) as response:
        return str(response.read().decode())
