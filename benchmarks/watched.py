"""What looking costs: tokens a second and CPU with five viewers of the live page, traces at 10 % and a scrape a second.

    python benchmarks/watched.py --rounds 8 --json watched.json

Two servers are up, and the same closed loop of streams runs on one of them at a time, by turns; the other is idle. The
watched one has viewers (their event streams, read by a process of its own), a scraper and a collector of its traces;
the plain one has no live page at all. The ratio is the median over the rounds (aim: 0.98). On a small machine viewers
and collector share the cores with the servers; the CPU of the server's own processes for each token is printed beside,
watched over plain. Before the first round both are idle, and the share of a core that the watched one takes more is
measured without a viewer (aim: 0.01) and with five (aim: 0.03).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import psutil

from alignedserve.cluster.cli.serve_process import ServeProcess, free_port

FEED = "/dashboard/feed"
VIEWERS = 5
SCRAPE_EVERY_S = 1.0
SAMPLE = 0.1
NOTHING, VIEWING, EVERYTHING = range(3)  # what the process beside does
SETTLE_S = 5.0


class _Collector(BaseHTTPRequestHandler):
    """Takes whatever is exported."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


async def view(http: httpx.AsyncClient, seen: Any) -> None:
    async with http.stream("GET", FEED) as events:
        events.raise_for_status()
        async for line in events.aiter_lines():
            seen[0] += line.startswith("data: ")


async def scrape(http: httpx.AsyncClient, seen: Any) -> None:
    while True:
        (await http.get("/metrics")).raise_for_status()
        seen[1] += 1
        await asyncio.sleep(SCRAPE_EVERY_S)


def look(url: str, collector_port: int, looking: Any, seen: Any) -> None:
    """Collect traces; while `looking` says so, view, and scrape. `seen`: the number of states and scrapes."""
    Thread(target=ThreadingHTTPServer(("127.0.0.1", collector_port), _Collector).serve_forever, daemon=True).start()

    async def run() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60.0) as http:
            while True:
                while looking.value == NOTHING:  # noqa: ASYNC110  (it is set in another process)
                    await asyncio.sleep(0.05)
                tasks = [asyncio.create_task(view(http, seen)) for _ in range(VIEWERS)]
                if looking.value == EVERYTHING:
                    tasks.append(asyncio.create_task(scrape(http, seen)))
                while looking.value != NOTHING:
                    await asyncio.sleep(0.05)
                    for task in tasks:
                        if task.done():
                            task.result()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


def cpu_s(server: ServeProcess) -> float:
    """CPU time of all processes of a server so far."""
    total = 0.0
    for process in (psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:2])
    return total


async def load(url: str, streams: int, seconds: float, seed: int) -> int:
    """Output tokens of a closed loop."""
    until_s, tokens = time.monotonic() + seconds, 0

    async def one(http: httpx.AsyncClient, number: int) -> None:
        nonlocal tokens
        draw = random.Random(f"{seed} {number}")
        while time.monotonic() < until_s:
            body = {"prompt": [draw.randrange(10, 2000) for _ in range(draw.randrange(20, 200))], "max_tokens": 48,
                    "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}  # fmt: skip
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if line.startswith("data: {") and time.monotonic() < until_s:
                        tokens += len(json.loads(line[6:])["choices"][0]["token_ids"])

    async with httpx.AsyncClient(base_url=url, timeout=120.0, limits=httpx.Limits(max_connections=streams)) as http:
        await asyncio.gather(*(one(http, number) for number in range(streams)))
    return tokens


Rounds = list[dict[str, Any]]


def measure(plain: ServeProcess, watched: ServeProcess, looking: Any, options: argparse.Namespace) -> Rounds:
    rounds: Rounds = []
    for number in range(options.rounds + 1):  # the first one warms up
        found: dict[str, Any] = {}
        order = [("plain", plain), ("watched", watched)]
        for name, server in order if number % 2 else reversed(order):
            if name == "watched":
                looking.value = EVERYTHING
            before_s = cpu_s(server)
            tokens = asyncio.run(load(server.url, options.streams, options.seconds, number))
            spent_ms = 1e3 * (cpu_s(server) - before_s)
            found[name] = {"tokens_per_s": tokens / options.seconds, "cpu_ms_per_token": spent_ms / tokens}
            looking.value = NOTHING
            time.sleep(1.0)
        if number:
            rounds.append(found)
            said = (
                f"{name} {one['tokens_per_s']:.1f} tokens/s, {one['cpu_ms_per_token']:.2f} ms of CPU a token"
                for name, one in sorted(found.items())
            )
            print(f"round {number}: {'; '.join(said)}", flush=True)
    return rounds


def idle(plain: ServeProcess, watched: ServeProcess, looking: Any, seconds: float) -> dict[str, float]:
    """The share of a core that the watched server takes more than the plain one, both without requests."""
    shares = {}
    for name, state in (("no viewer", NOTHING), ("five viewers", VIEWING)):
        looking.value = state
        time.sleep(SETTLE_S)
        before_s = cpu_s(watched) - cpu_s(plain)
        begun_s = time.monotonic()
        time.sleep(seconds)
        shares[name] = (cpu_s(watched) - cpu_s(plain) - before_s) / (time.monotonic() - begun_s)
        print(f"idle, {name}: {shares[name]:.4f} of a core", flush=True)
    looking.value = NOTHING
    time.sleep(1.0)
    return shares


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each load")
    parser.add_argument("--idle-seconds", type=float, default=60.0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    port = free_port()
    traced = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "ALIGNEDSERVE_TRACES__SAMPLE": str(SAMPLE),
    }
    fixed = ("--model", "tiny", "--set", "kv_pool.size_gib=0.2", "--set", "scheduler.refuse_for_load=false")
    traced["ALIGNEDSERVE_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="alignedserve-watched-")
    context = multiprocessing.get_context("spawn")
    looking, seen = context.Value("i", NOTHING), context.Array("q", 2)
    with ServeProcess(*fixed, "--no-dashboard") as plain, ServeProcess(*fixed, environment=traced) as watched:
        with urllib.request.urlopen(f"{watched.url}/", timeout=30) as page:
            assert page.status == 200
        viewers = context.Process(target=look, args=(watched.url, port, looking, seen), daemon=True)
        viewers.start()
        shares = idle(plain, watched, looking, options.idle_seconds)
        rounds = measure(plain, watched, looking, options)
        assert viewers.is_alive(), "the viewers failed"
        viewers.kill()
    ratios = {
        key: statistics.median(found["watched"][key] / found["plain"][key] for found in rounds)
        for key in ("tokens_per_s", "cpu_ms_per_token")
    }
    result = {"idle": shares, "rounds": rounds, "ratios": ratios, "states": seen[0], "scrapes": seen[1]}
    print(f"watched / plain: tokens/s {ratios['tokens_per_s']:.3f}, CPU a token {ratios['cpu_ms_per_token']:.3f}")
    print(f"{seen[0]} states were seen, {seen[1]} scrapes made")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
