"""Host memory that the ranks of an instance take while they load a model, over the bytes of one copy of its weights.

Each degree loads in processes of its own. Sampled is the anonymous memory of all ranks together (pages of the
checkpoint's files that the kernel may drop do not count), less what a rank has before it loads.

    python benchmarks/rank_memory.py --json memory.json 1x1 2x1 4x1 1x2 2x2

A degree: TENSORxSTAGES. Target: the peak is of about one copy, whatever the degree.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.model.loader import load_model
from alignedserve.engine.parallel.processes import RankProcesses
from alignedserve.ranks.degrees import Degrees
from alignedserve.testing.models import make_model

SHAPE = {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 24,
         "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 32000, "max_position_embeddings": 4096}  # fmt: skip
SAMPLE_S = 0.01


def anonymous_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


class Peak:
    """Samples the sum of these processes until `end`."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.peak_bytes = 0
        self._pids, self._ended = pids, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            self.peak_bytes = max(self.peak_bytes, sum(map(anonymous_bytes, self._pids)))
            time.sleep(SAMPLE_S)

    def end(self) -> int:
        self._ended.set()
        self._thread.join()
        return self.peak_bytes


def load(folder: Path, degrees: Degrees) -> dict[str, float]:
    """In this process and, for several ranks, its children."""
    info = inspect_model("model", folder, "float32", "cpu")
    if degrees.ranks == 1:
        before = anonymous_bytes(pid := os.getpid())
        peak = Peak([pid])
        load_model(info, "cpu")
    else:
        ranks = RankProcesses(info, degrees, trust_remote_code=False, threads=1, backend="torch")
        before = anonymous_bytes(ranks.pids[0])
        peak = Peak(ranks.pids)
        ranks.load()
    peak_bytes = peak.end() - degrees.ranks * before
    return {"weights": info.weight_bytes, "peak": peak_bytes, "ratio": peak_bytes / info.weight_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("degrees", nargs="*", metavar="TENSORxSTAGES", default=["1x1", "2x1", "4x1", "1x2", "2x2"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of the checkpoint, for one degree
    given = parser.parse_args()
    if given.folder is not None:
        tensor, _, stages = given.degrees[0].partition("x")
        print(json.dumps(load(given.folder, Degrees(int(tensor), int(stages or 1)))), flush=True)
        os._exit(0)  # the ranks end with it
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model("llama", Path(folder) / "model", seed=1, **SHAPE)
        for degrees in given.degrees:
            command = [sys.executable, __file__, "--folder", str(Path(folder) / "model"), degrees]
            said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            found[degrees] = one = json.loads(said.splitlines()[-1])
            print(f"{degrees}: {one['peak'] / 1e9:.2f} GB, {one['ratio']:.2f} x the weights", flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
