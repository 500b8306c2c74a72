"""(a) Output tokens per second of the whole cluster, compared with transformers' batching in one process.

One prefill and one decode instance behind HTTP, on the same cores as the other systems. They take turns in one run.
Model, prompts and the other systems are those of `engine_cpu.py`.

    python benchmarks/cluster_throughput.py --dtype float32 bfloat16 --rounds 3 --json cluster_throughput.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch
from engine_cpu import Tokens, continuous, draw_prompts, make_checkpoint, measure, padded
from transformers import AutoModelForCausalLM

from alignedserve.cluster.cli.serve_process import ServeProcess


class Cluster:
    """Sends all prompts at once over HTTP, and waits for all answers."""

    def __init__(self, server: ServeProcess, prompts: Tokens, new_tokens: int) -> None:
        self._url = server.url
        self._prompts = prompts
        self._new_tokens = new_tokens
        self._timings: list[dict[str, Any]] = []

    def __call__(self) -> Tokens:
        return asyncio.run(self._all())

    async def _all(self) -> Tokens:
        limits = httpx.Limits(max_connections=len(self._prompts))
        async with httpx.AsyncClient(base_url=self._url, timeout=600.0, limits=limits) as client:
            answers = await asyncio.gather(*(self._one(client, prompt) for prompt in self._prompts))
        self._timings = [answer["timings"] for answer in answers]
        return [answer["choices"][0]["token_ids"] for answer in answers]

    async def _one(self, client: httpx.AsyncClient, prompt: list[int]) -> dict[str, Any]:
        body = {
            "model": "bench",
            "prompt": prompt,
            "max_tokens": self._new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "include_timings": True,
        }
        response = await client.post("/v1/completions", json=body)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer

    def mean_timings(self) -> dict[str, float]:
        """The mean time of the last round's requests in each stage, in seconds."""
        stages = [name for name in self._timings[0] if name.endswith("_s")]
        return {name: round(statistics.mean(t[name] for t in self._timings), 3) for name in stages}


def benchmark(dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    prompts = draw_prompts(options.prompts, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), getattr(torch, dtype))
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        arguments = ("--model", folder, "--served-model-name", "bench", "--dtype", dtype, *options.serve)
        with ServeProcess(*arguments) as server:
            cluster = Cluster(server, prompts, options.new_tokens)
            systems: dict[str, Callable[[], Tokens]] = {"cluster": cluster}
            if "generate_batch" in options.against:
                systems["generate_batch"] = continuous(plain, prompts, options.new_tokens)
            if "generate" in options.against:
                systems["generate"] = padded(plain, prompts, options.new_tokens)
            cluster()
            results = measure(systems, options.rounds)
            timings = cluster.mean_timings()
    total = options.prompts * options.new_tokens
    rates = {name: total / statistics.median(result["seconds"]) for name, result in results.items()}
    best = max((rate for name, rate in rates.items() if name != "cluster"), default=float("nan"))
    ours = results["cluster"]["output"]
    return {
        "dtype": dtype,
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": total,
        "tokens_per_s": {name: round(rate, 2) for name, rate in rates.items()},
        "seconds": {name: [round(s, 3) for s in result["seconds"]] for name, result in results.items()},
        "same_answers": {
            name: sum(a == b for a, b in zip(ours, result["output"], strict=True)) for name, result in results.items()
        },
        "mean_timings": timings,
        "ratio": round(rates["cluster"] / best, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--against", nargs="*", default=["generate_batch", "generate"])
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="options for `alignedserve serve`; last")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    results = [benchmark(dtype, options) for dtype in options.dtype]
    for result in results:
        print(f"\n{result['dtype']}, {result['prompt_tokens']} prompt tokens, {result['output_tokens']} output tokens")
        for name, rate in result["tokens_per_s"].items():
            print(f"  {name:16}{rate:10.1f} tokens/s   same answers {result['same_answers'][name]}/{options.prompts}")
        print(f"  ratio over the better one: {result['ratio']}   mean timings: {result['mean_timings']}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
