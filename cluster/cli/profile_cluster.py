"""Measures how much longer passes take in a cluster on this machine than alone: a part of `alignedserve profile`.

A prefill and a decode instance, pool, scheduler, gateway and proxy share the machine's cores and caches, and a pass
waits for its core. So `alignedserve serve` runs a small cluster that serves mixed lengths, first one request at a time,
then Poisson arrivals at half of its capacity. Its workers' counters give the time of passes, which is compared with the
prediction of the cost model.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn

from alignedserve.cluster.cli.open_loop import Load, drive_apart
from alignedserve.cluster.cli.serve_process import ServeProcess
from alignedserve.config import Config, GatewayConfig, SchedulerConfig
from alignedserve.config_sources import is_setting, to_tree
from alignedserve.control.samples import value
from alignedserve.errors import ResourceError, UnavailableError
from alignedserve.memory import GIB, available_memory_bytes
from alignedserve.model import resolve_model

CROWD = 60  # requests sent at once, to measure the capacity
SHARE_OF_CAPACITY = 0.5
ROUNDS = 3
ALONE_SHARE, TOGETHER_SHARE, SETTLE_SHARE = 0.08, 0.16, 0.02  # of the time, per round; the crowd takes the rest
MESSAGES = 20
SHORT, LONG, SHORT_SHARE = (16, 128), (256, 1024), 0.8  # prompt tokens
ANSWER = (16, 128)  # tokens
REQUESTS = 400
STORES = 8  # in units of the crowd's blocks: pool 3, decode cache 2, prefill cache and each buffer 1
MEMORY_SHARE = 0.25  # of the free memory, for all stores together: two workers hold the model too
LEAST_BESIDE = 0.2  # minimum share of the time beside a computing neighbour to measure its effect
START_S = 180.0


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over one role's passes: their number, their measured and predicted seconds; `wall_s` is clock time."""

    passes: float
    seconds: float
    predicted_s: float
    wall_s: float

    def since(self, before: Sums) -> Sums:
        return Sums(*(getattr(self, entry.name) - getattr(before, entry.name) for entry in fields(Sums)))

    def plus(self, more: Sums) -> Sums:
        return Sums(*(getattr(self, entry.name) + getattr(more, entry.name) for entry in fields(Sums)))

    @property
    def busy(self) -> float:
        """The share of the time in which a pass ran."""
        return min(1.0, self.seconds / self.wall_s)

    def slowdown(self, host_overhead_s: float) -> float:
        """Measured divided by predicted seconds of the passes. Raises ResourceError if no pass ended."""
        if not self.predicted_s:
            raise ResourceError("no pass ended while the cluster was profiled; raise --seconds")
        return (self.seconds - self.passes * host_overhead_s) / self.predicted_s


NOTHING = Sums(0.0, 0.0, 0.0, 0.0)


def slowdown_beside(all_of_them: float, alone: float, share: float) -> float:
    """Slowdown of passes beside the neighbour's, from that of all passes, of passes alone, and the share beside it."""
    if share < LEAST_BESIDE:
        return max(alone, all_of_them)
    return max(alone, (all_of_them - (1.0 - share) * alone) / share)


def measure_in_cluster(config: Config, content: Mapping[str, Any], cost_file: Path, limit_s: float) -> dict[str, Any]:
    """Serve for about `limit_s` seconds with the cost model `content`, which is stored in `cost_file`.

    Returns `hardware`, the slowdowns and the seconds of a message, as in the simulator's Hardware; and `fit`, the
    measurements that they come from. Raises UnavailableError if the cluster does not start or answer, ResourceError if
    the time is too short. If a signal ends this process, the cluster is ended, too.
    """
    with signals_as_exits(), tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(to_tree(_small(config, content, cost_file))), encoding="utf-8")
        log = Path(folder) / "serve.log"
        own = _environment(os.environ)
        try:
            with ServeProcess("--config", str(file), environment=own, log=log, timeout_s=START_S) as server:
                try:
                    return asyncio.run(_measure(server, _vocabulary(config), content, limit_s))
                finally:
                    print("ending that cluster", file=sys.stderr, flush=True)  # this takes seconds, also after Ctrl-C
        except (RuntimeError, OSError, http.client.HTTPException, subprocess.SubprocessError) as error:
            raise UnavailableError(
                f"the cluster to profile did not start, answer or end (--no-cluster skips it): {error}"
            ) from error


@contextmanager
def signals_as_exits() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit, so that started processes are ended, as after Ctrl-C."""

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _environment(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Removes the variables that would change the small cluster's configuration or make it join a Ray cluster."""
    return dict.fromkeys(name for name in environ if is_setting(name) or name == "RAY_ADDRESS")


def _vocabulary(config: Config) -> int:
    """The model's vocabulary size."""
    from alignedserve.engine.model.inspect import inspect_model

    model, trusted = config.model, config.model.trust_remote_code
    path = resolve_model(model.path, trusted)
    return inspect_model(config.served_model_name, path, model.dtype, "cpu", trusted).vocab_size


def _small(config: Config, content: Mapping[str, Any], cost_file: Path) -> Config:
    """One instance of each role, with room for the crowd only, on loopback and without API keys."""
    block_size = content["hardware"]["block_size"]
    block_bytes = block_size * content["hardware"]["kv_bytes_per_token"]
    most = int(MEMORY_SHARE * available_memory_bytes() / STORES / block_bytes)
    least = -(-(LONG[1] + ANSWER[1]) // block_size)
    blocks = max(least, min(most, CROWD * least))
    return replace(
        config,
        cluster=replace(config.cluster, prefill=1, decode=1),
        gateway=GatewayConfig(proxy=config.gateway.proxy),
        log=replace(config.log, dir=""),
        kv_pool=replace(config.kv_pool, size_gib=max(0.125, 3 * blocks * block_bytes / GIB)),
        prefill=replace(config.prefill, cache_blocks=blocks, batch_buffer_blocks=blocks, requests_buffer_blocks=blocks),
        decode=replace(config.decode, cache_blocks=2 * blocks),
        scheduler=SchedulerConfig(cost_model=str(cost_file), refuse_for_load=False),  # not the user's
        supervisor=replace(config.supervisor, spares=0),
    )


def _lengths(longest: int) -> list[tuple[int, int]]:
    """(prompt, answer) tokens of requests. `longest`: the model's maximum number of positions."""
    draw, most = random.Random(0), max(1, longest // 2)
    prompts = [draw.randint(*(SHORT if draw.random() < SHORT_SHARE else LONG)) for _ in range(REQUESTS)]
    return [(min(most, prompt), min(most, draw.randint(*ANSWER))) for prompt in prompts]


@asynccontextmanager
async def _offered(load: Load) -> AsyncIterator[None]:
    """Offers the load from its own process while the context lasts. Raises RuntimeError if that process failed."""
    task = asyncio.ensure_future(drive_apart(load))
    try:
        yield
        if task.done():  # it lasts longer than the context, unless it fails
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _capacity(load: Load) -> float:
    """Requests answered per second of a crowd that arrives at once."""
    outcome = await drive_apart(load)
    if not outcome.served:
        raise UnavailableError(f"the cluster to profile answered with errors: {outcome.errors}")
    return len(outcome.served) / outcome.wall_s


def _message_s(server: ServeProcess, load: Load) -> float:
    """Half of a request's time, in seconds, from the gateway through the scheduler to an idle prefill instance."""
    prompt = [min(5, load.vocabulary - 1)] * min(prompt for prompt, _ in load.lengths)
    body = {"model": load.model, "prompt": prompt, "max_tokens": 1, "include_timings": True}
    waits_s = [float(server.post("/v1/completions", body)["timings"]["queue_s"]) for _ in range(MESSAGES)]
    return statistics.mean(waits_s) / 2


async def _measure(server: ServeProcess, vocabulary: int, content: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    host_s = content["hardware"].get("host_overhead_s", 0.0)
    card = server.get("/v1/models")["data"][0]
    load = Load(server.port, 0.0, 0.0, model=card["id"], lengths=_lengths(card["max_model_len"]), drain_s=limit_s)
    load = replace(load, vocabulary=min(load.vocabulary, vocabulary))
    rate = SHARE_OF_CAPACITY * await _capacity(replace(load, lengths=load.lengths[:CROWD], at_once=True))
    message_s = await asyncio.to_thread(_message_s, server, load)
    alone = together = {"prefill": NOTHING, "decode": NOTHING}
    for _ in range(ROUNDS):  # the speed of a machine varies over time
        async with _offered(replace(load, seconds=limit_s)):
            await asyncio.sleep(SETTLE_SHARE * limit_s)
            alone = _plus(alone, await _watch(server, ALONE_SHARE * limit_s))
        async with _offered(replace(load, rate=rate, seconds=limit_s)):
            await asyncio.sleep(SETTLE_SHARE * limit_s)
            together = _plus(together, await _watch(server, TOGETHER_SHARE * limit_s))
    prefill, decode = (alone[role].slowdown(host_s) for role in ("prefill", "decode"))
    prefill_all, decode_all = (together[role].slowdown(host_s) for role in ("prefill", "decode"))
    hardware = {
        "prefill_slowdown": prefill,
        "prefill_slowdown_beside": slowdown_beside(prefill_all, prefill, together["decode"].busy),
        "decode_slowdown": decode,
        "decode_slowdown_beside": slowdown_beside(decode_all, decode, together["prefill"].busy),
        "message_s": message_s,
    }
    return {
        "hardware": {name: round(number, 6) for name, number in hardware.items()},
        "fit": {
            "rate_per_s": round(rate, 3),
            **{
                f"{role}_{what}": {
                    "passes": int(sums.passes),
                    "seconds": round(sums.seconds, 3),
                    "busy": round(sums.busy, 3),
                }
                for what, found in (("alone", alone), ("together", together))
                for role, sums in found.items()
            },
        },
    }


def _plus(sums: Mapping[str, Sums], more: Mapping[str, Sums]) -> dict[str, Sums]:
    return {role: sums[role].plus(more[role]) for role in sums}


async def _watch(server: ServeProcess, seconds: float) -> dict[str, Sums]:
    """The sums of the workers over `seconds`, by role."""
    before = await _sums(server)
    await asyncio.sleep(seconds)
    after = await _sums(server)
    return {role: after[role].since(before[role]) for role in after}


async def _sums(server: ServeProcess) -> dict[str, Sums]:
    metrics, now_s = await asyncio.to_thread(server.metrics), time.monotonic()

    def of(passes: str, seconds: str, predicted: str) -> Sums:
        counted, took_s, predicted_s = (value(metrics, f"alignedserve_{name}") for name in (passes, seconds, predicted))
        return Sums(counted, took_s, predicted_s, now_s)

    return {
        "prefill": of("prefill_passes_total", "prefill_seconds_total", "prefill_predicted_seconds_total"),
        "decode": of("decode_iterations_total", "decode_seconds_total", "iteration_predicted_seconds_total"),
    }
