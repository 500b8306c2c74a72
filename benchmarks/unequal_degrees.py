"""Prefetch and hand-over between prefill and decode instances of unequal degrees, over those of equal ones.

A cluster for each pair of degrees gets the same prompts, one after the other, in each round. Times are medians of the
answers' timings; bytes are those of all channels.

    python benchmarks/unequal_degrees.py --rounds 3 --json degrees.json 2:2 1:2 2:1
    python benchmarks/unequal_degrees.py 1x2:1x2 1:1x2@2   # two stages; and two stages on two nodes

`--parts`: each rank has a part of its instance's stores, as on GPUs, so that a copy between unequal degrees cuts blocks
by heads or layers; else all ranks of an instance share a store of whole blocks, as on CPUs.

A role's degrees: TENSOR[xSTAGES[@NODES]]; on one machine its nodes are rank hosts beside each other. The first pair is
the one of equal degrees. Target: at most 1.3 times its time, and the same bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import statistics
import tempfile
from pathlib import Path

import torch
from engine_cpu import VOCAB_SIZE, make_checkpoint

from alignedserve.client import Client
from alignedserve.cluster.cli.serve_process import ServeProcess
from alignedserve.control.samples import value
from alignedserve.engine.parallel.processes import OWN_STORES_VARIABLE

BYTES = "alignedserve_transfer_bytes_total"


def ask(server: ServeProcess, prompts: list[list[int]], answer: int) -> tuple[list[float], list[float], float]:
    """Seconds of each prompt's prefetch and hand-over, and the bytes of a prompt in all copies."""
    before = value(server.metrics(), BYTES)
    prefetch_s, handover_s = [], []
    with Client(server.grpc_address, timeout_s=600.0) as client:
        for prompt in prompts:
            timings = client.generate(
                prompt_token_ids=prompt, max_tokens=answer, temperature=0, ignore_eos=True, include_timings=True
            ).timings
            assert timings is not None
            prefetch_s.append(timings.prefetch_s)
            handover_s.append(timings.handover_s)
    return prefetch_s, handover_s, (value(server.metrics(), BYTES) - before) / len(prompts)


def flags(role: str, degrees: str) -> list[str]:
    """Of `alignedserve serve`."""
    parts = re.fullmatch(r"(\d+)(?:x(\d+)(?:@(\d+))?)?", degrees)
    if parts is None:
        raise SystemExit(f"{degrees!r} is not TENSOR[xSTAGES[@NODES]]")
    given = zip(("tp", "pp", "nodes"), parts.groups(), strict=True)
    return [each for name, count in given if count for each in (f"--{role}-{name}", count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", metavar="PREFILL:DECODE", default=["2:2", "1:2", "2:1"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=12, help="in a round")
    parser.add_argument("--tokens", type=int, default=1500, help="of a prompt")
    parser.add_argument("--answer", type=int, default=8)
    parser.add_argument("--parts", action="store_true", help="a store for each rank")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    os.environ[OWN_STORES_VARIABLE] = str(int(given.parts))
    draw = random.Random(1)
    found: dict[str, dict[str, list[float]]] = {
        pair: {"prefetch_s": [], "handover_s": [], "bytes": []} for pair in given.pairs
    }
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        make_checkpoint(Path(folder), torch.float32)
        servers = {}
        for pair in given.pairs:
            prefill, _, decode = pair.partition(":")
            degrees = [*flags("prefill", prefill), *flags("decode", decode)]
            servers[pair] = stack.enter_context(ServeProcess("--model", folder, "--no-prefix-cache", *degrees))
        for number in range(-1, given.rounds):  # the first round warms up
            prompts = [[draw.randrange(1, VOCAB_SIZE) for _ in range(given.tokens)] for _ in range(given.prompts)]
            for pair, server in servers.items():
                prefetch_s, handover_s, size = ask(server, prompts, given.answer)
                if number >= 0:
                    found[pair]["prefetch_s"] += prefetch_s
                    found[pair]["handover_s"] += handover_s
                    found[pair]["bytes"].append(size)
    medians = {pair: {name: statistics.median(values) for name, values in one.items()} for pair, one in found.items()}
    equal = medians[given.pairs[0]]
    for pair, one in medians.items():
        whole, of_equal = (each["prefetch_s"] + each["handover_s"] for each in (one, equal))
        print(
            f"{pair}: prefetch {1e3 * one['prefetch_s']:.1f} ms, hand-over {1e3 * one['handover_s']:.1f} ms, "
            f"{one['bytes'] / 1e6:.1f} MB a prompt; {whole / of_equal:.2f} x the time of {given.pairs[0]}"
        )
    if given.json:
        given.json.write_text(json.dumps(medians, indent=2) + "\n")


if __name__ == "__main__":
    main()
