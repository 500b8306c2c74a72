"""The speed of the engine on a CPU, compared with transformers' batching. One process, no cluster.

Output tokens per second, as ratios within one run: our engine (prefill in chunks, then batched decode) over the
better of `generate_batch` (continuous batching) and padded `generate`. The model is a random Llama (hidden 768,
intermediate 2048, 12 layers, 12 heads, 12 key heads, vocabulary 32,000); 32 prompts of lengths drawn from 32, 48,
64, 100, 128, 512; 32 new tokens each, greedy.

    python benchmarks/engine_cpu.py --dtype float32 bfloat16 --rounds 3 --json engine_cpu.json
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, LlamaConfig, PreTrainedModel

from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.model.loader import load_model
from alignedserve.engine.runner import ForwardItem, ModelRunner, allocate_cache
from alignedserve.engine.sampling.sampler import Sampler, SampleRow
from alignedserve.request import SamplingParams

LENGTHS = (32, 48, 64, 100, 128, 512)
BLOCK_SIZE = 16
VOCAB_SIZE = 32_000

Tokens = list[list[int]]


def make_checkpoint(folder: Path, dtype: torch.dtype) -> None:
    config = LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=2048,
        initializer_range=0.05,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config = GenerationConfig(pad_token_id=0)
    model.save_pretrained(folder)


def draw_prompts(count: int, seed: int) -> Tokens:
    draw = random.Random(seed)
    return [[draw.randrange(1, VOCAB_SIZE) for _ in range(draw.choice(LENGTHS))] for _ in range(count)]


class Engine:
    """Our engine, in the simplest loop that serves all prompts at once."""

    def __init__(self, folder: Path, dtype: str, prompts: Tokens, new_tokens: int, budget: int) -> None:
        info = inspect_model("bench", folder, dtype, "cpu")
        geometry = info.geometry(BLOCK_SIZE)
        self.blocks = [geometry.blocks_for(len(prompt) + new_tokens) for prompt in prompts]
        ids = list(range(sum(self.blocks)))
        random.Random(0).shuffle(ids)
        self.block_ids = [[ids.pop() for _ in range(count)] for count in self.blocks]
        self.runner = ModelRunner(load_model(info, "cpu"), allocate_cache(geometry, sum(self.blocks), "cpu"))
        self.prompts, self.new_tokens, self.budget = prompts, new_tokens, budget
        self.sampler, self.seconds = Sampler(), {"prefill": 0.0, "decode": 0.0}

    def __call__(self) -> Tokens:
        rows = [SampleRow(SamplingParams(temperature=0.0), prompt, []) for prompt in self.prompts]
        outputs: Tokens = [list(row.output_token_ids) for row in rows]
        started = time.perf_counter()
        for items, finished in self._chunks():
            sampled = self.sampler.sample(self.runner.forward(items), [rows[i] for i in finished])
            for index, token in zip(finished, sampled, strict=True):
                outputs[index].append(token.token_id)
        prefilled = time.perf_counter()
        for step in range(self.new_tokens - 1):
            items = [
                ForwardItem([output[-1]], len(prompt) + step, blocks)
                for output, prompt, blocks in zip(outputs, self.prompts, self.block_ids, strict=True)
            ]
            sampled = self.sampler.sample(self.runner.forward(items), rows)
            for output, token in zip(outputs, sampled, strict=True):
                output.append(token.token_id)
        self.seconds = {"prefill": prefilled - started, "decode": time.perf_counter() - prefilled}
        return outputs

    def _chunks(self) -> list[tuple[list[ForwardItem], list[int]]]:
        """Prefill passes of at most `budget` tokens, each with the indices of the prompts that end in it."""
        passes: list[tuple[list[ForwardItem], list[int]]] = [([], [])]
        room = self.budget
        for index, prompt in enumerate(self.prompts):
            done = 0
            while done < len(prompt):
                if room == 0:
                    passes.append(([], []))
                    room = self.budget
                count = min(room, len(prompt) - done)
                last = done + count == len(prompt)
                chunk = prompt[done : done + count]
                passes[-1][0].append(ForwardItem(chunk, done, self.block_ids[index], "last" if last else "none"))
                if last:
                    passes[-1][1].append(index)
                done, room = done + count, room - count
        return passes


def continuous(model: PreTrainedModel, prompts: Tokens, new_tokens: int) -> Callable[[], Tokens]:
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    blocks = ContinuousBatchingConfig(max_memory_percent=0.2, max_batch_tokens=512, num_blocks=400, page_size=32)

    def run() -> Tokens:
        found = model.generate_batch(inputs=prompts, generation_config=config, continuous_batching_config=blocks)
        return [list(found[key].generated_tokens) for key in sorted(found, key=lambda key: int(key.rsplit("_")[-1]))]

    return run


def padded(model: PreTrainedModel, prompts: Tokens, new_tokens: int) -> Callable[[], Tokens]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)

    def run() -> Tokens:
        output = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        rows: Tokens = output[:, longest:].tolist()
        return rows

    return run


def measure(systems: dict[str, Callable[[], Tokens]], rounds: int) -> dict[str, dict[str, Any]]:
    """Run the systems in turn, `rounds` times, so that other load on the machine affects all of them.

    Returns the seconds of each round, and its CPU time, which is more reliable on a busy machine.
    """
    results: dict[str, dict[str, Any]] = {name: {"seconds": [], "cpu_seconds": []} for name in systems}
    for _ in range(rounds):
        for name, run in systems.items():
            gc.collect()
            started, cpu_started = time.perf_counter(), time.process_time()
            output = run()
            results[name]["cpu_seconds"].append(time.process_time() - cpu_started)
            results[name]["seconds"].append(time.perf_counter() - started)
            results[name]["output"] = output
    return results


def benchmark(dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    prompts = draw_prompts(options.prompts, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), getattr(torch, dtype))
        engine = Engine(Path(folder), dtype, prompts, options.new_tokens, options.budget)
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    systems: dict[str, Callable[[], Tokens]] = {"engine": engine}
    if "generate_batch" in options.against:
        systems["generate_batch"] = continuous(plain, prompts, options.new_tokens)
    if "generate" in options.against:
        systems["generate"] = padded(plain, prompts, options.new_tokens)
    engine()
    results = measure(systems, options.rounds)
    total = options.prompts * options.new_tokens
    rates = {name: total / statistics.median(result["seconds"]) for name, result in results.items()}
    best = max((rate for name, rate in rates.items() if name != "engine"), default=float("nan"))
    cpu_s = {name: statistics.median(result["cpu_seconds"]) for name, result in results.items()}
    best_cpu = min((value for name, value in cpu_s.items() if name != "engine"), default=float("nan"))
    ours = results["engine"]["output"]
    return {
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": total,
        "tokens_per_s": {name: round(rate, 2) for name, rate in rates.items()},
        "seconds": {name: [round(s, 3) for s in result["seconds"]] for name, result in results.items()},
        "engine_phases_s": {name: round(value, 3) for name, value in engine.seconds.items()},
        "same_tokens": {
            name: sum(a == b for a, b in zip(ours, result["output"], strict=True)) for name, result in results.items()
        },
        "cpu_s": {name: round(value, 3) for name, value in cpu_s.items()},
        "ratio": round(rates["engine"] / best, 3),
        "cpu_time_ratio": round(best_cpu / cpu_s["engine"], 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--budget", type=int, default=512, help="prefill tokens of one forward pass")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--against", nargs="*", default=["generate_batch", "generate"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(options.threads)
    results = [benchmark(dtype, options) for dtype in options.dtype]
    for result in results:
        print(f"\n{result['dtype']}, {result['threads']} threads, {result['prompt_tokens']} prompt tokens")
        for name, rate in result["tokens_per_s"].items():
            same = f"same answers {result['same_tokens'][name]}/{options.prompts}"
            print(f"  {name:16}{rate:10.1f} tokens/s {result['cpu_s'][name]:8.1f} s of CPU   {same}")
        print(f"  over the better one: {result['ratio']} (in CPU time {result['cpu_time_ratio']})")
        print(f"  phases of the engine: {result['engine_phases_s']}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
