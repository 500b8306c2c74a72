"""(d) Seconds from `alignedserve serve` to healthy, and the memory and CPU time of each idle process.

python benchmarks/footprint.py --starts 3 --rest-s 10 --json footprint.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from alignedserve.cluster.cli.serve_process import ServeProcess

TICKS = os.sysconf("SC_CLK_TCK")


def children(root: int) -> dict[int, int]:
    """All live descendants of `root` and itself: pid to parent pid."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = {root: parents.get(root, 0)}
    grown = True
    while grown:
        more = {pid: parent for pid, parent in parents.items() if parent in found and pid not in found}
        grown = bool(more)
        found |= more
    return found


def name_of(pid: int) -> str:
    return (
        (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:60].strip()
    )


def memory_mib(pid: int) -> tuple[float, float]:
    """RSS and PSS of a process in MiB."""
    rss = pss = 0
    for line in (Path("/proc") / str(pid) / "smaps_rollup").read_text().splitlines():
        key, _, rest = line.partition(":")
        if key == "Rss":
            rss = int(rest.split()[0])
        elif key == "Pss":
            pss = int(rest.split()[0])
    return rss / 1024, pss / 1024


def cpu_s(pid: int) -> float:
    fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def at_rest(server: ServeProcess, rest_s: float) -> list[dict[str, Any]]:
    server.post("/v1/completions", {"model": "tiny", "prompt": "Return a list of", "max_tokens": 32})
    roles = {role["pid"]: role["id"] for role in server.roles()}
    pids = {*children(server.process.pid), *roles}
    time.sleep(2.0)
    before = {pid: cpu_s(pid) for pid in pids}
    time.sleep(rest_s)
    rows = []
    for pid in pids:
        rss, pss = memory_mib(pid)
        share = (cpu_s(pid) - before[pid]) / rest_s
        name = roles.get(pid) or name_of(pid)
        rows.append({"process": name, "rss_mib": round(rss), "pss_mib": round(pss), "cpu": round(share, 4)})
    return sorted(rows, key=lambda row: -row["rss_mib"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--rest-s", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    starts, rows = [], []
    for index in range(options.starts):
        with ServeProcess("--model", "tiny") as server:
            starts.append(round(server.start_s, 2))
            if index == options.starts - 1:
                rows = at_rest(server, options.rest_s)
    print(f"seconds to healthy: {starts}, median {statistics.median(starts)}")
    for row in rows:
        memory = f"{row['rss_mib']:6} MiB RSS{row['pss_mib']:6} MiB PSS"
        print(f"{row['process']:62}{memory}{row['cpu'] * 100:7.2f} % of a core")
    if options.json:
        options.json.write_text(json.dumps({"starts_s": starts, "processes": rows}, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
