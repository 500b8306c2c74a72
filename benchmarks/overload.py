"""An open loop at ten times the measured capacity: refusals, latencies of accepted requests, and growth of processes.

In one run, the objectives are five times the medians of an unloaded cluster. With them configured, the capacity is the
highest rate of a growing series at which at least 90 % of all offered requests meet both objectives. Its goodput is
measured again for a quarter of `--seconds`. Then ten times that rate is offered for `--seconds`. Requests are streamed,
all answers have the same length, and arrivals are Poisson. A separate process makes the load; its CPU time is shown.

    python benchmarks/overload.py --seconds 120 --json overload.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from footprint import children, cpu_s, memory_mib, name_of

from alignedserve.cluster.cli.open_loop import Load, Outcome, Served, drive_apart
from alignedserve.cluster.cli.serve_process import ServeProcess

SHARE = 0.9
WARM_UP_S = 3.0


@dataclass(frozen=True)
class Objectives:
    ttft_s: float
    tpot_s: float

    def met(self, served: Served) -> bool:
        return served.ttft_s <= self.ttft_s and served.tpot_s <= self.tpot_s


class Bench:
    """Offers loads to one server, and measures its processes."""

    def __init__(self, server: ServeProcess, options: argparse.Namespace) -> None:
        self._server = server
        self._options = options
        self._seed = options.seed

    async def offer(self, rate: float, seconds: float) -> Outcome:
        self._seed += 1
        options = self._options
        load = Load(self._server.port, rate, seconds, options.prompt_tokens, options.new_tokens, self._seed)
        return await drive_apart(load)

    def processes(self) -> dict[int, str]:
        """All processes of the cluster, including Ray's: pid to name."""
        roles = {role["pid"]: role["id"] for role in self._server.roles()}
        return {pid: roles.get(pid) or name_of(pid) for pid in {*children(self._server.process.pid), *roles}}


def row(name: str, rate: float, outcome: Outcome, objectives: Objectives, cpu: float) -> dict[str, Any]:
    """One line of the table. `goodput`: requests per second that met both objectives."""
    answered = [served for served in outcome.served if objectives.met(served)]
    seconds = outcome.wall_s if not rate else outcome.offered / rate
    served = outcome.served
    return {
        "phase": name,
        "rate": round(rate, 2),
        "offered": outcome.offered,
        "refused": outcome.refused,
        "without_retry_after": outcome.refused_without_retry_after,
        "ended": len(served),
        "errors": outcome.errors,
        "unended": outcome.unended,
        "goodput": round(len(answered) / seconds, 2) if seconds else 0.0,
        "met_of_offered": round(len(answered) / max(1, outcome.offered), 3),
        "met_of_ended": round(len(answered) / max(1, len(served)), 3),
        "ttft_ms": quantiles_ms([answer.ttft_s for answer in served]),
        "tpot_ms": quantiles_ms([answer.tpot_s for answer in served]),
        "refusal_ms": quantiles_ms(outcome.refusal_s),
        "latest_departure_ms": round(outcome.late_s * 1e3, 1),
        "load_cpu": round(outcome.cpu_s / max(outcome.wall_s, 1e-9), 3),
        "cluster_cpu": round(cpu, 3),
    }


def quantiles_ms(seconds: list[float]) -> dict[str, float]:
    if len(seconds) < 2:
        return {}
    parts = statistics.quantiles(seconds, n=100)
    return {name: round(parts[int(name[1:]) - 1] * 1e3, 2) for name in ("p50", "p90", "p99")}


def resident_mib(pids: Iterable[int]) -> dict[int, float]:
    return {pid: round(memory_mib(pid)[0], 1) for pid in pids if alive(pid)}


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def measured(bench: Bench, name: str, rate: float, seconds: float, objectives: Objectives) -> dict[str, Any]:
    pids = bench.processes()
    before = {pid: cpu_s(pid) for pid in pids}
    outcome = await bench.offer(rate, seconds)
    spent = sum(cpu_s(pid) - before[pid] for pid in pids if alive(pid))
    line = row(name, rate, outcome, objectives, spent / outcome.wall_s)
    print_line(line)
    return line


async def find_capacity(bench: Bench, objectives: Objectives, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure rates that grow by a quarter until two in a row are too high. The last line repeats the capacity."""
    lines, best, failed = [], options.first_rate, 0
    rate = options.first_rate
    while failed < 2:
        line = await measured(bench, "search", rate, options.step_seconds, objectives)
        lines.append(line)
        if line["met_of_offered"] >= SHARE:
            best, failed = rate, 0
        else:
            failed += 1
        rate *= 1.25
    lines.append(await measured(bench, "capacity", best, options.seconds / 4, objectives))
    return lines


async def unloaded(options: argparse.Namespace) -> Objectives:
    with ServeProcess("--model", "tiny", *options.serve) as server:
        bench = Bench(server, options)
        await bench.offer(0, WARM_UP_S)
        outcome = await bench.offer(0, options.step_seconds)
    medians = [statistics.median(getattr(s, name) for s in outcome.served) for name in ("ttft_s", "tpot_s")]
    print(f"unloaded medians of {len(outcome.served)}: ttft {medians[0] * 1e3:.1f} ms, tpot {medians[1] * 1e3:.2f} ms")
    return Objectives(*(options.times * median for median in medians))


async def benchmark(options: argparse.Namespace) -> dict[str, Any]:
    objectives = await unloaded(options)
    flags = ("--ttft-objective", f"{objectives.ttft_s:.5f}", "--tpot-objective", f"{objectives.tpot_s:.5f}")
    with ServeProcess("--model", "tiny", *flags, *options.serve) as server:
        bench = Bench(server, options)
        await bench.offer(0, WARM_UP_S)
        lines = await find_capacity(bench, objectives, options)
        capacity = lines[-1]
        names = bench.processes()
        before = resident_mib(names)
        overload = asyncio.create_task(measured(bench, "overload", 10 * capacity["rate"], options.seconds, objectives))
        await asyncio.sleep(options.seconds / 4)  # by then each cache block has been used once
        early = resident_mib(names)
        over = await overload
        late = resident_mib(bench.processes())
    best = max(line["goodput"] for line in lines)
    return {
        "objectives_ms": {"ttft": round(objectives.ttft_s * 1e3, 2), "tpot": round(objectives.tpot_s * 1e3, 2)},
        "lines": [*lines, over],
        "goodput_share": round(over["goodput"] / capacity["goodput"], 3) if capacity["goodput"] else None,
        "goodput_share_of_best": round(over["goodput"] / best, 3) if best else None,
        "died": [name for pid, name in names.items() if pid not in late],
        "memory": [
            {
                "process": names[pid],
                "before_mib": mib,
                "quarter_mib": early.get(pid, 0.0),
                "end_mib": late.get(pid, 0.0),
            }
            for pid, mib in sorted(before.items(), key=lambda entry: -entry[1])
        ],
    }


def print_line(line: dict[str, Any]) -> None:
    ttft, tpot, refusal = (line[name].get("p90", float("nan")) for name in ("ttft_ms", "tpot_ms", "refusal_ms"))
    print(
        f"{line['phase']:9}{line['rate']:7.1f}/s  offered {line['offered']:6} refused {line['refused']:6} "
        f"ended {line['ended']:5} unended {line['unended']} errors {line['errors'] or 0}  "
        f"goodput {line['goodput']:6.2f}/s "
        f"({line['met_of_offered']:.0%} of offered, {line['met_of_ended']:.0%} of ended)  "
        f"p90 ttft {ttft:6.1f} tpot {tpot:6.2f} refusal {refusal:6.2f} ms  "
        f"cpu: cluster {line['cluster_cpu']:.2f} load {line['load_cpu']:.2f}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--step-seconds", type=float, default=15.0)
    parser.add_argument("--first-rate", type=float, default=8.0)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--times", type=float, default=5.0, help="objectives as multiples of the unloaded medians")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="options for `alignedserve serve`; last")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = asyncio.run(benchmark(options))
    print(f"objectives {result['objectives_ms']} ms; died: {result['died'] or 'none'}")
    for entry in result["memory"]:
        name, *mib = entry.values()
        print(f"  {name:40.40} MiB before, after a quarter, at the end: {mib}")
    print(
        f"goodput at ten times the capacity: {result['goodput_share']} of that at capacity, "
        f"{result['goodput_share_of_best']} of the best seen at any rate"
    )
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
