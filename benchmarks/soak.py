"""Twenty minutes at 70 % load: does any process's resident memory grow between minute 5 and the end?

python benchmarks/soak.py --minutes 20 --load 0.7 --json soak.json      (`make soak`)

Beside the load, one client each second disconnects in the middle of its answer, and one sends an invalid body. With
`--cycles` the load is this many crowds of `--streams` requests that all come at once, and time is counted in cycles.
Exit status 1 if a process grew by more than 2 % or ended, or a request failed.

    python benchmarks/soak.py --cycles 20 --streams 500
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import httpx
from footprint import children, memory_mib, name_of

from alignedserve.cluster.cli.open_loop import Load, Outcome, drive_apart
from alignedserve.cluster.cli.serve_process import ServeProcess

SETTLED_SHARE = 0.25  # share of the time: minute 5 of 20
SAMPLE_S = 5.0
MOST_GROWTH = 0.02
CAPACITY_RATE, CAPACITY_S = 400.0, 15.0  # above the capacity of two cores, long enough to fill the queue


async def capacity(port: int) -> float:
    """Requests per second that are served under a load above the capacity."""
    outcome = await drive_apart(Load(port, CAPACITY_RATE, CAPACITY_S))
    return len(outcome.served) / outcome.wall_s


async def misbehave(url: str, until_s: float) -> int:
    """Send clients that disconnect, and invalid bodies. Returns how many."""
    count = 0
    async with httpx.AsyncClient(base_url=url, timeout=30.0) as http:
        while time.monotonic() < until_s:
            body = {"prompt": "Return the", "max_tokens": 64, "stream": True, "ignore_eos": True}
            with contextlib.suppress(httpx.HTTPError):
                async with http.stream("POST", "/v1/completions", json=body) as answer:
                    await anext(answer.aiter_bytes(), b"")
                await http.post("/v1/completions", content=b"{nonsense")
            count += 2
            await asyncio.sleep(1.0)
    return count


async def sample(root: int, until_s: float) -> dict[int, list[tuple[float, float]]]:
    """Sample (seconds, MiB) of each process while it lives."""
    begun_s = time.monotonic()
    samples: dict[int, list[tuple[float, float]]] = {}
    while time.monotonic() < until_s:
        for pid in children(root):
            with contextlib.suppress(OSError):
                samples.setdefault(pid, []).append((time.monotonic() - begun_s, memory_mib(pid)[0]))
        await asyncio.sleep(SAMPLE_S)
    return samples


def growth(samples: list[tuple[float, float]], seconds: float) -> dict[str, float]:
    """Medians in MiB over a tenth of the time, after it has settled and at the end, and the growth as a share."""
    window = seconds * 0.1
    settled = seconds * SETTLED_SHARE
    early = [mib for at, mib in samples if settled - window / 2 <= at <= settled + window / 2]
    late = [mib for at, mib in samples if at >= seconds - window]
    if not early or not late:
        return {}
    before, after = statistics.median(early), statistics.median(late)
    return {"settled_mib": before, "end_mib": after, "growth": after / before - 1.0}


async def crowds(server: ServeProcess, cycles: int, streams: int) -> dict[str, Any]:
    """Serve crowds of requests, and measure each process's memory after each crowd."""
    names = {pid: name_of(pid) for pid in children(server.process.pid)}
    samples: dict[int, list[tuple[float, float]]] = {pid: [] for pid in names}
    served, errors = 0, dict[str, int]()
    for cycle in range(1, cycles + 1):
        draw = random.Random(cycle)
        lengths = [(draw.randint(1, 256), draw.randint(1, 64)) for _ in range(streams)]
        outcome = await drive_apart(Load(server.port, 0, 0, lengths=lengths, at_once=True, seed=cycle))
        served += len(outcome.served)
        for name, count in (*outcome.errors.items(), ("refused", outcome.refused), ("unended", outcome.unended)):
            if count:
                errors[name] = errors.get(name, 0) + count
        await asyncio.sleep(1.0)
        for pid in set(names) & set(children(server.process.pid)):
            samples[pid].append((cycle, memory_mib(pid)[0]))
        most, whose = max((taken[-1][1], names[pid]) for pid, taken in samples.items() if taken)
        print(f"cycle {cycle}: {most:.0f} MiB at most, {whose}", flush=True)
    return {
        "offered": cycles * streams,
        "served": served,
        "errors": errors,
        "unended": 0,
        "ended": [name for pid, name in names.items() if pid not in children(server.process.pid)],
        "processes": {f"{pid} {names[pid]}": growth(taken, cycles) for pid, taken in samples.items()},
    }


async def run(server: ServeProcess, seconds: float, share: float) -> dict[str, Any]:
    most = await capacity(server.port)
    names = {pid: name_of(pid) for pid in children(server.process.pid)}
    until_s = time.monotonic() + seconds
    load = Load(server.port, share * most, seconds, seed=1)
    outcome: Outcome
    outcome, samples, bad = await asyncio.gather(
        drive_apart(load), sample(server.process.pid, until_s), misbehave(server.url, until_s)
    )
    processes = {f"{pid} {names.get(pid, 'new')}": growth(taken, seconds) for pid, taken in samples.items()}
    ttft = sorted(answer.ttft_s for answer in outcome.served)
    return {
        "capacity_per_s": most,
        "offered_per_s": share * most,
        "offered": outcome.offered,
        "served": len(outcome.served),
        "refused": outcome.refused,
        "errors": outcome.errors,
        "unended": outcome.unended,
        "misbehaved": bad,
        "ttft_p50_s": ttft[len(ttft) // 2],
        "ttft_p99_s": ttft[len(ttft) * 99 // 100],
        "ended": [name for pid, name in names.items() if pid not in children(server.process.pid)],
        "processes": processes,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--load", type=float, default=0.7, help="share of the measured capacity")
    parser.add_argument("--cycles", type=int, default=0, help="crowds instead of a steady load")
    parser.add_argument("--streams", type=int, default=500, help="of a crowd")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with ServeProcess("--model", "tiny") as server:
        if arguments.cycles:
            result = asyncio.run(crowds(server, arguments.cycles, arguments.streams))
        else:
            result = asyncio.run(run(server, 60.0 * arguments.minutes, arguments.load))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    for name, value in result.items():
        if name != "processes":
            print(f"{name}: {value}")
    grown = []
    for name, found in result["processes"].items():
        if found:
            print(f"{found['settled_mib']:8.1f} -> {found['end_mib']:8.1f} MiB  {found['growth']:+7.2%}  {name}")
        if found and found["growth"] > MOST_GROWTH:
            grown.append(name)
    bad = grown + result["ended"] + list(result["errors"])
    print("flat" if not bad else f"not well: {bad}")
    return int(bool(bad) or result["unended"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
