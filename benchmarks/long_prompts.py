"""The 99th percentile of short requests with and without clients that post prompts of 4 MiB in a loop, in one run.

Phases alternate. The first has only short requests (Poisson arrivals at `--rate`, streamed, from a separate process).
The second adds `--clients` clients in another process that post an oversized prompt, wait for its refusal and post the
next one: as completions, chats and arrays of prompts, in words and as one endless word. The result is the ratio of the
two percentiles, and the times and codes of the refusals.

    python benchmarks/long_prompts.py --seconds 20 --phases 4 --json long_prompts.json
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import http.client
import json
import multiprocessing
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from alignedserve.cluster.cli.open_loop import Load, Outcome, drive_apart
from alignedserve.cluster.cli.serve_process import ServeProcess

BODY = (4 << 20) - 4096  # bytes of a prompt; the body is just under the limit
WARM_UP_S = 5.0


def bodies() -> list[tuple[str, bytes]]:
    words = ("Return the list of values, or raise a KeyError if there is none. " * (BODY // 64))[:BODY]
    one_word = "a" * BODY
    several = [words[: BODY // 16]] * 15
    chats = [{"role": "user", "content": text} for text in (words, one_word)]
    return [
        ("/v1/completions", json.dumps({"model": "tiny", "prompt": words}).encode()),
        ("/v1/chat/completions", json.dumps({"model": "tiny", "messages": [chats[0]]}).encode()),
        ("/v1/completions", json.dumps({"model": "tiny", "prompt": one_word}).encode()),
        ("/v1/chat/completions", json.dumps({"model": "tiny", "messages": [chats[1]]}).encode()),
        ("/v1/completions", json.dumps({"model": "tiny", "prompt": several}).encode()),
    ]


@dataclass
class Refusals:
    """The codes with which oversized prompts were refused, and the times."""

    codes: collections.Counter[str] = field(default_factory=collections.Counter)
    seconds: list[float] = field(default_factory=list)


def post_in_a_loop(port: int, number: int, until: threading.Event, refusals: Refusals) -> None:
    path, body = bodies()[number % 5]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    while not until.is_set():
        began = time.perf_counter()
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
            refusals.codes[answer["error"]["code"] if "error" in answer else "answered"] += 1
        except (OSError, http.client.HTTPException, ValueError) as error:
            refusals.codes[type(error).__name__] += 1
            connection.close()
            time.sleep(0.01)
        refusals.seconds.append(time.perf_counter() - began)
    connection.close()


def attack(port: int, clients: int, orders: Connection) -> None:
    """A process that posts until it is told to end, and then reports its refusals."""
    until, refusals = threading.Event(), Refusals()
    threads = [
        threading.Thread(target=post_in_a_loop, args=(port, number, until, refusals)) for number in range(clients)
    ]
    for thread in threads:
        thread.start()
    orders.recv()
    until.set()
    for thread in threads:
        thread.join()
    orders.send((dict(refusals.codes), refusals.seconds))


@contextlib.contextmanager
def attackers(port: int, clients: int, found: Refusals) -> Any:
    orders, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=attack, args=(port, clients, theirs))
    process.start()
    try:
        time.sleep(1.0)
        yield
        orders.send(None)
        codes, seconds = orders.recv()
        found.codes.update(codes)
        found.seconds += seconds
    finally:
        process.join(60)
        process.kill()


def percentiles_ms(outcomes: list[Outcome], new_tokens: int) -> dict[str, float]:
    """The percentile of the times from a request's planned start to its last token."""
    seconds = [one.ttft_s + one.tpot_s * (new_tokens - 1) for outcome in outcomes for one in outcome.served]
    parts = statistics.quantiles(seconds, n=100)
    return {f"p{number}": round(parts[number - 1] * 1e3, 1) for number in (50, 90, 99)}


async def benchmark(options: argparse.Namespace) -> dict[str, Any]:
    refusals = Refusals()
    alone: list[Outcome] = []
    beside: list[Outcome] = []
    with ServeProcess("--model", "tiny", *options.serve) as server:

        def load(seed: int, seconds: float) -> Load:
            return Load(server.port, options.rate, seconds, 16, options.new_tokens, seed)

        await drive_apart(load(0, WARM_UP_S))
        for phase in range(options.phases):
            alone.append(await drive_apart(load(phase + 1, options.seconds)))
            with attackers(server.port, options.clients, refusals):
                beside.append(await drive_apart(load(phase + 1, options.seconds)))
            print(
                f"phase {phase + 1}: {show(alone[-1:], options)} alone, {show(beside[-1:], options)} beside", flush=True
            )
        server.check_integrity()
    return report(alone, beside, refusals, options)


def show(outcomes: list[Outcome], options: argparse.Namespace) -> str:
    return ", ".join(f"{name} {value} ms" for name, value in percentiles_ms(outcomes, options.new_tokens).items())


def report(
    alone: list[Outcome], beside: list[Outcome], refusals: Refusals, options: argparse.Namespace
) -> dict[str, Any]:
    figures = [percentiles_ms(outcomes, options.new_tokens) for outcomes in (alone, beside)]
    times = sorted(refusals.seconds)
    return {
        "alone_ms": figures[0],
        "beside_ms": figures[1],
        "ratio": {name: round(figures[1][name] / figures[0][name], 3) for name in figures[0]},
        "short": [sum(len(outcome.served) for outcome in outcomes) for outcomes in (alone, beside)],
        "errors": [dict(outcome.errors) for outcome in (*alone, *beside) if outcome.errors],
        "oversized": dict(refusals.codes),
        "oversized_a_second": round(len(times) / (options.phases * (options.seconds + 1)), 2),
        "oversized_s": {"median": round(statistics.median(times), 3), "longest": round(times[-1], 3)} if times else {},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rate", type=float, default=5.0, help="short requests a second")
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--phases", type=int, default=4, help="of each kind")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("serve", nargs="*", help="more arguments of `alignedserve serve`, after --")
    options = parser.parse_args()
    result = asyncio.run(benchmark(options))
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result) + "\n")
    if result["oversized"].keys() - {"context_length_exceeded"}:
        sys.exit("oversized prompts were answered with codes other than context_length_exceeded")


if __name__ == "__main__":
    main()
