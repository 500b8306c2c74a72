"""Bandwidth of channels between two processes of this machine: scattered blocks of half a MiB, by turns.

    python benchmarks/channels.py --rounds 5 gloo nixl UCX_TLS=tcp:nixl

`NAME=VALUE:CHANNEL` sets a variable in both processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

_ONE = """
import sys
from alignedserve.transfer.paired.measure import measure_channel
found = measure_channel(sys.argv[1], sys.argv[2], sys.argv[2])
print(found.to_ours, found.from_ours)
"""


def measured(spec: str, device: str) -> tuple[float, float]:
    """Bytes a second to the asking process, and from it."""
    variable, _, channel = spec.rpartition(":")
    own = dict([variable.split("=", 1)]) if variable else {}
    command = [sys.executable, "-c", _ONE, channel, device]
    out = subprocess.run(command, env={**os.environ, **own}, check=True, stdout=subprocess.PIPE, text=True).stdout
    to_ours, from_ours = out.splitlines()[-1].split()
    return float(to_ours), float(from_ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("channels", nargs="*", metavar="[NAME=VALUE:]CHANNEL", default=["gloo"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="of both processes")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {spec: [] for spec in given.channels}
    for _ in range(given.rounds):
        for spec, rounds in found.items():
            rounds.append(measured(spec, given.device))
    medians = {
        spec: [statistics.median(way) / 1e9 for way in zip(*rounds, strict=True)] for spec, rounds in found.items()
    }
    for spec, (to_ours, from_ours) in medians.items():
        print(f"{spec:<24} {to_ours:6.2f} GB/s to the asking process, {from_ours:6.2f} GB/s from it")
    if given.json:
        given.json.write_text(json.dumps({"GB/s, to and from the asking process": medians}, indent=2) + "\n")


if __name__ == "__main__":
    main()
