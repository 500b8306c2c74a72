"""Seconds until a killed or stopped role has a ready successor, with and without fork server and spares.

Each role of a served cluster, one after another; the median of a few rounds. Also reports how long the start of the
cluster took, and the CPU time that each successor used until then, which approximates the seconds on an idle machine.

    python benchmarks/restart.py --rounds 3 --spares 0 1 --fork-server true false --json restart.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

from alignedserve.cluster.cli.serve_process import ServeProcess
from alignedserve.cluster.launch.processes import look_at
from alignedserve.cluster.supervisor.core import STEADY_S

POLL_S = 0.02
ROLES = ("decode-0", "prefill-0", "kv_pool-0", "scheduler-0", "node_agent-0")
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}


def measure(model: str, spares: int, forks: str, rounds: int) -> list[dict[str, Any]]:
    keys = (f"supervisor.fork_server={forks}", "kv_pool.size_gib=0.25")
    arguments = ["--model", model, "--device", "cpu", "--spares", str(spares)]
    rows = []
    with ServeProcess(*arguments, *(word for key in keys for word in ("--set", key))) as server:
        print(f"{spares} spares, fork server {forks}: served after {server.start_s:.1f} s", flush=True)
        for role_id in ROLES:
            for name, number in SIGNALS.items():
                seen = [one_loss(server, role_id, number, spares) for _ in range(rounds)]
                rows.append(
                    {
                        "role": role_id,
                        "signal": name,
                        "spares": spares,
                        "fork_server": forks,
                        "start_s": server.start_s,
                        "seconds": [wall for wall, _ in seen],
                        "cpu_s": [cpu for _, cpu in seen],
                    }
                )
                print(describe(rows[-1]), flush=True)
    return rows


def one_loss(server: ServeProcess, role_id: str, number: int, spares: int) -> tuple[float, float]:
    """Seconds from the signal until the successor is ready, and its processor time until then."""
    while not {f"spare-{index}" for index in range(spares)} <= ready(server).keys():
        time.sleep(POLL_S)
    time.sleep(STEADY_S)  # a process that ends soon after it is ready restarts more slowly each time
    before = ready(server)
    used_s = {pid: cpu_s(pid) for pid in before.values()}
    begun = time.monotonic()
    os.kill(before[role_id], number)
    while (successor := ready(server).get(role_id, before[role_id])) == before[role_id]:
        time.sleep(POLL_S)
    return time.monotonic() - begun, cpu_s(successor) - used_s.get(successor, 0.0)


def ready(server: ServeProcess) -> dict[str, int]:
    """The pids of processes that are ready, by id."""
    return {role["id"]: role["pid"] for role in server.roles() if role["state"] == "ready"}


def cpu_s(pid: int) -> float:
    sight = look_at(pid)
    return 0.0 if sight is None else sight.cpu_s


def describe(row: dict[str, Any]) -> str:
    each = ", ".join(f"{seconds:.2f}" for seconds in row["seconds"])
    used = f"{statistics.median(row['cpu_s']):.2f} of processor"
    return f"{row['role']:13} {row['signal']:8} {statistics.median(row['seconds']):6.2f} s ({each}), {used}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--spares", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--fork-server", nargs="+", choices=["true", "false"], default=["true", "false"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for spares, forks in itertools.product(options.spares, options.fork_server):
        rows += measure(options.model, spares, forks, options.rounds)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
