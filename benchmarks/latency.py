"""(b) TTFT over HTTP less the time of the prefill; (c) last prefill chunk to first decode iteration, less copies.

One request is in flight at a time. This process times the engine's prefill of the same prompts, in turn with the
cluster.

    python benchmarks/latency.py --requests 60 --prompt-tokens 128 --json latency.json
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from alignedserve.cluster.cli.serve_process import ServeProcess
from alignedserve.control.samples import value
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.model.loader import load_model
from alignedserve.engine.runner import ForwardItem, ModelRunner, allocate_cache
from alignedserve.engine.sampling.sampler import Sampler, SampleRow
from alignedserve.model import resolve_model
from alignedserve.request import SamplingParams

BLOCK_SIZE = 16


class BareEngine:
    """Only the prefill and the first token, in this process."""

    def __init__(self, model: str, longest: int) -> None:
        info = inspect_model("bench", resolve_model(model), "auto", "cpu")
        geometry = info.geometry(BLOCK_SIZE)
        self.vocab_size = info.vocab_size
        self.blocks = list(range(geometry.blocks_for(longest)))
        self.runner = ModelRunner(load_model(info, "cpu"), allocate_cache(geometry, len(self.blocks), "cpu"))
        self.sampler = Sampler()

    def prefill_s(self, prompt: list[int]) -> float:
        begun = time.perf_counter()
        logits = self.runner.forward([ForwardItem(prompt, 0, self.blocks[: -(-len(prompt) // BLOCK_SIZE)])])
        self.sampler.sample(logits, [SampleRow(SamplingParams(temperature=0.0), prompt, [])])
        return time.perf_counter() - begun


def stream_once(server: ServeProcess, model: str, prompt: list[int], new_tokens: int) -> tuple[float, dict[str, Any]]:
    """Seconds to the first chunk with a token, and the timings of the last chunk."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "include_timings": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.connect()
    payload = json.dumps(body).encode()
    begun = time.perf_counter()
    connection.request("POST", "/v1/completions", payload, {"Content-Type": "application/json"})
    response = connection.getresponse()
    first, timings = 0.0, {}
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if not first and chunk["choices"] and chunk["choices"][0].get("token_ids"):
            first = time.perf_counter() - begun
        timings = chunk.get("timings") or timings
    connection.close()
    return first, timings


def copy_seconds(server: ServeProcess) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as response:
        return value(response.read().decode(), "alignedserve_transfer_busy_seconds_total")


def quartiles_ms(seconds: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(seconds, n=4)
    return {"p25": round(low * 1e3, 2), "median": round(middle * 1e3, 2), "p75": round(high * 1e3, 2)}


def benchmark(options: argparse.Namespace) -> dict[str, Any]:
    engine = BareEngine(options.model, options.prompt_tokens)
    draw = random.Random(options.seed)
    beyond_prefill, bare, to_decode = [], [], []
    arguments = ("--model", options.model, "--served-model-name", "bench", *options.serve)
    with ServeProcess(*arguments) as server:
        for index in range(options.requests + options.warm_up):
            prompt = [draw.randrange(10, engine.vocab_size) for _ in range(options.prompt_tokens)]
            prefill_s = statistics.median(engine.prefill_s(prompt) for _ in range(3))
            copied_s = copy_seconds(server)
            ttft_s, timings = stream_once(server, "bench", prompt, options.new_tokens)
            copied_s = copy_seconds(server) - copied_s
            if index >= options.warm_up:
                bare.append(prefill_s)
                beyond_prefill.append(ttft_s - prefill_s)
                to_decode.append(timings["pool_s"] + timings["prefetch_s"] + timings["handover_s"] - copied_s)
    return {
        "model": options.model,
        "prompt_tokens": options.prompt_tokens,
        "requests": options.requests,
        "bare_prefill_ms": quartiles_ms(bare),
        "ttft_beyond_prefill_ms": quartiles_ms(beyond_prefill),
        "prefill_to_decode_beyond_copies_ms": quartiles_ms(to_decode),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="options for `alignedserve serve`; last")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = benchmark(options)
    for name, figure in result.items():
        print(f"{name:38}{figure}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
