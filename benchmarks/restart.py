"""Seconds until a killed or stopped role has a ready successor, with and without spares.

Each role of a cluster without Ray (`LocalCluster`), one after another; the median of a few rounds. Also reports the CPU
time that the successor used until then, which approximates the seconds on an idle machine.

    python benchmarks/restart.py --rounds 3 --spares 0 1 --json restart.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from alignedserve.cluster.launch.processes import look_at
from alignedserve.cluster.local import LocalCluster
from alignedserve.cluster.supervisor.core import STEADY_S
from alignedserve.config_sources import from_tree

ROLES = ("decode-0", "prefill-0", "kv_pool-0", "scheduler-0", "node_agent-0")
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}


async def measure(model: str, spares: int, rounds: int, output: Path) -> list[dict[str, Any]]:
    tree = {
        "model": {"path": model},
        "cluster": {"device": "cpu"},
        "kv_pool": {"size_gib": 0.25},
        "supervisor": {"spares": spares},
    }
    rows = []
    async with LocalCluster(from_tree(tree), output_dir=output) as cluster:
        await cluster.wait_ready()
        for role_id in ROLES:
            for name, number in SIGNALS.items():
                seen = [await one_loss(cluster, role_id, number, spares) for _ in range(rounds)]
                seconds, cpu_s = [wall for wall, _ in seen], [cpu for _, cpu in seen]
                rows.append({"role": role_id, "signal": name, "spares": spares, "seconds": seconds, "cpu_s": cpu_s})
                print(describe(rows[-1]), flush=True)
    return rows


async def one_loss(cluster: LocalCluster, role_id: str, number: int, spares: int) -> tuple[float, float]:
    """Seconds from the signal until the view has the successor as ready, and the successor's CPU time until then."""
    await cluster.wait_ready()
    await cluster.wait_spares(spares)
    await asyncio.sleep(STEADY_S)  # a process that ends soon after it is ready restarts more slowly each time
    old = cluster.peer(role_id).process.incarnation
    used_s = {pid: cpu_s(pid) for pid in cluster.pids.values()}
    begun = time.monotonic()
    cluster.kill(role_id, number)
    successor = await cluster.wait_restarted(role_id, old)
    return time.monotonic() - begun, cpu_s(successor.pid) - used_s.get(successor.pid, 0.0)


def cpu_s(pid: int) -> float:
    sight = look_at(pid)
    return 0.0 if sight is None else sight.cpu_s


def describe(row: dict[str, Any]) -> str:
    each = ", ".join(f"{seconds:.2f}" for seconds in row["seconds"])
    median = statistics.median(row["seconds"])
    used = f"{statistics.median(row['cpu_s']):.2f} of processor"
    return f"{row['role']:13} {row['signal']:8} {row['spares']} spares: {median:6.2f} s ({each}), {used}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--spares", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            row
            for spares in options.spares
            for row in asyncio.run(measure(options.model, spares, options.rounds, Path(folder)))
        ]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
