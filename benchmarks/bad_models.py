"""The time in seconds until `alignedserve serve --model FOLDER` refuses a broken folder: the median of a few runs.

The folders come from `support.broken_models`. `good` is a folder that is not broken: the time until its cluster is
ready.

    python benchmarks/bad_models.py --runs 5 --json bad_models.json
    python benchmarks/bad_models.py --kinds good "truncated shard"
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import rigs  # noqa: F401

from alignedserve.cluster.cli.serve_process import free_port
from alignedserve.testing.models import make_model, make_tokenizer
from support.broken_models import BROKEN, SHARD

GOOD = "good"
LIMIT_S = 120.0


def make_folder(kind: str, parent: Path) -> Path:
    folder = make_model("llama", parent / kind.replace(" ", "-"), seed=1, max_shard_size=SHARD)
    make_tokenizer(folder)
    if kind != GOOD:
        BROKEN[kind](folder)
    return folder


def serve_once(folder: Path) -> tuple[float, float, int, str]:
    """Seconds until the command has ended or its cluster is ready; its CPU time, exit status and last output."""
    used_s = children_s()
    command = [
        sys.executable,
        "-m",
        "alignedserve.cluster.cli.main",
        "serve",
        "--model",
        str(folder),
        "--device",
        "cpu",
    ]
    ports = ["--port", str(free_port()), "--grpc-port", str(free_port())]
    begun = time.monotonic()
    words, seconds = "", 0.0
    with subprocess.Popen(
        [*command, *ports, "--set", "kv_pool.size_gib=0.25"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("alignedserve: error:"):
                    words = line.strip()
                elif line.startswith("serving "):
                    words, seconds = line.strip(), time.monotonic() - begun
                    time.sleep(1.0)  # for the rest of its output
                    process.send_signal(signal.SIGINT)
            status = process.wait(LIMIT_S)
        finally:
            process.send_signal(signal.SIGINT)  # nothing is left running, however the run ended
    return seconds or time.monotonic() - begun, children_s() - used_s, status, words


def children_s() -> float:
    """The CPU time of the child processes that have ended, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=[*BROKEN, GOOD], choices=[*BROKEN, GOOD], metavar="KIND")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bad-models-") as parent:
        for kind in options.kinds:
            folder = make_folder(kind, Path(parent))
            seen = [serve_once(folder) for _ in range(options.runs)]
            seconds, used_s = [each[0] for each in seen], [each[1] for each in seen]
            status, words = seen[-1][2:]
            rows.append({"kind": kind, "seconds": seconds, "cpu_s": used_s, "status": status, "words": words})
            each = ", ".join(f"{value:.2f}" for value in seconds)
            used = f"{statistics.median(used_s):.2f} of processor"
            median = statistics.median(seconds)
            print(f"{kind:28} {median:6.2f} s ({each}), {used}; status {status}: {words}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
