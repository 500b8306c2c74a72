"""Waves of clients that leave after half a second, and their cost for the clients that stay.

One run against `alignedserve serve` with default settings. The capacity is the rate of answers to a load that comes
all at once. Then clients that stay offer `--share` of it (Poisson), in turn without and with the storm. The storm is
waves of `--wave` clients, together `--times` the capacity. Each client sends headers and body in two pieces and leaves
after `--patience` seconds. Goodput is the rate of answers whose TTFT and TPOT are at most five times those of an idle
cluster. After each storm all blocks must be free within a second.

    python benchmarks/storm.py --json storm.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from overload import Objectives, quantiles_ms

from alignedserve.cluster.cli.open_loop import Load, Outcome, drive_apart
from alignedserve.cluster.cli.serve_process import ServeProcess
from alignedserve.control.samples import value

AT_ONCE = 64
RELEASED_WITHIN_S = 1.0


async def leave_early(port: int, prompt_tokens: int, patience_s: float, seed: int) -> None:
    """One client of a wave. It reads nothing before it leaves."""
    draw = random.Random(seed)
    prompt = [draw.randrange(10, 2000) for _ in range(prompt_tokens)]
    body = json.dumps({"prompt": prompt, "max_tokens": 256, "ignore_eos": True, "stream": bool(seed % 2)}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + b"\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.005)  # else the kernel joins the two pieces
        writer.write(body)
        await asyncio.sleep(patience_s)
    finally:
        writer.close()


async def storm(port: int, options: argparse.Namespace, period_s: float, seconds: float) -> int:
    """Send waves for `seconds` seconds. Returns the number of clients."""
    begun_s, waves = time.monotonic(), 0
    while waves * period_s < seconds:
        await asyncio.sleep(max(0.0, begun_s + waves * period_s - time.monotonic()))
        first = waves * options.wave
        clients = (
            leave_early(port, options.prompt_tokens, options.patience, first + one) for one in range(options.wave)
        )
        await asyncio.gather(*clients, return_exceptions=True)  # a refused connection affects only the storm
        waves += 1
    return waves * options.wave


async def storm_apart(port: int, options: argparse.Namespace, period_s: float) -> int:
    """Run the storm in a separate process."""
    orders = json.dumps({"port": port, "period_s": period_s})
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, *options.given, "--storm", orders, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    return int(output)


async def held(server: ServeProcess) -> dict[str, float]:
    """The numbers of owned blocks and open requests."""
    metrics = await asyncio.to_thread(server.metrics)
    found = {
        "owned": value(metrics, "alignedserve_kv_blocks", state="owned"),
        "open": value(metrics, "alignedserve_gateway_open_requests"),
    }
    return {name: count for name, count in found.items() if count}


async def seconds_until_free(server: ServeProcess) -> float:
    begun_s = time.monotonic()
    while await held(server):
        if time.monotonic() - begun_s > 60:
            raise TimeoutError(f"a minute after the last request: {await held(server)}")
        await asyncio.sleep(0.02)
    return round(time.monotonic() - begun_s, 2)


class Bench:
    def __init__(self, server: ServeProcess, options: argparse.Namespace) -> None:
        self._server, self._options, self._seed = server, options, options.seed

    async def offer(self, rate: float, seconds: float, **more: Any) -> Outcome:
        self._seed += 1
        options = self._options
        load = Load(self._server.port, rate, seconds, options.prompt_tokens, options.new_tokens, self._seed, **more)
        return await drive_apart(load)

    async def capacity(self) -> float:
        """Requests per second of a load that is offered all at once."""
        lengths = [(self._options.prompt_tokens, self._options.new_tokens)] * AT_ONCE
        outcome = await self.offer(0, 0, lengths=lengths, at_once=True)
        return len(outcome.served) / outcome.wall_s

    async def phase(self, name: str, rate: float, period_s: float, objectives: Objectives) -> dict[str, Any]:
        options = self._options
        offering = asyncio.ensure_future(self.offer(rate, options.seconds))
        clients = await storm_apart(self._server.port, options, period_s) if period_s else 0
        outcome = await offering
        met = sum(objectives.met(served) for served in outcome.served)
        line = {
            "phase": name,
            "offered": outcome.offered,
            "ended": len(outcome.served),
            "refused": outcome.refused,
            "errors": outcome.errors,
            "goodput": round(met / options.seconds, 3),
            "storm_clients": clients,
            "ttft_ms": quantiles_ms([served.ttft_s for served in outcome.served]),
            "tpot_ms": quantiles_ms([served.tpot_s for served in outcome.served]),
            "free_after_s": await seconds_until_free(self._server),
        }
        print(json.dumps(line), flush=True)
        return line


async def benchmark(options: argparse.Namespace) -> dict[str, Any]:
    with ServeProcess("--model", "tiny", *options.serve) as server:
        bench = Bench(server, options)
        await bench.offer(0, 3.0)
        idle = (await bench.offer(0, 15.0)).served
        medians = [statistics.median(getattr(served, name) for served in idle) for name in ("ttft_s", "tpot_s")]
        objectives = Objectives(*(5 * median for median in medians))
        capacity = await bench.capacity()
        period_s = options.wave / (options.times * capacity)
        print(f"capacity {capacity:.2f}/s, a wave every {period_s:.1f} s, objectives {objectives}", flush=True)
        lines = []
        for _ in range(options.rounds):
            for name, period in (("quiet", 0.0), ("storm", period_s)):
                lines.append(await bench.phase(name, options.share * capacity, period, objectives))
        server.check_integrity()
    quiet, stormy = (
        statistics.fmean(line["goodput"] for line in lines if line["phase"] == name) for name in ("quiet", "storm")
    )
    return {
        "capacity": round(capacity, 2),
        "lines": lines,
        "goodput_ratio": round(stormy / quiet, 3),
        "free_within_a_second": all(line["free_after_s"] <= RELEASED_WITHIN_S for line in lines),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--share", type=float, default=0.5, help="share of the capacity that clients that stay offer")
    parser.add_argument("--times", type=float, default=3.0, help="multiple of the capacity that the storm offers")
    parser.add_argument("--wave", type=int, default=200)
    parser.add_argument("--patience", type=float, default=0.5)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--storm", help=argparse.SUPPRESS)  # internal: port and period for the storm's process
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="options for `alignedserve serve`; last")
    options = parser.parse_args()
    if options.storm:
        orders = json.loads(options.storm)
        print(asyncio.run(storm(orders["port"], options, orders["period_s"], options.seconds)))
        return 0
    kept = ("seconds", "wave", "patience", "prompt_tokens")
    options.given = [word for name in kept for word in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
    result = asyncio.run(benchmark(options))
    print(f"goodput with the storm over without: {result['goodput_ratio']}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
