"""Conversations with a prefix cache and without: time to first token of later turns, output tokens/s, hits.

Two clusters behind their default fronts take turns with fresh conversations of equal lengths. Each conversation begins
with the round's system prompt, and each turn sends all that was said before and `--message` new tokens.

    python benchmarks/sessions.py --model tiny --json sessions.json
    python benchmarks/sessions.py --model 134m --conversations 16 --at-once 4

Targets, with over without: first tokens of later turns 0.2, output tokens/s 1.3, P99 between tokens 1.05; and 95 % of
the hits that a cache of endless size has. `--unique` sends as many prompts that share nothing (targets: within 1 %).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from engine_cpu import make_checkpoint

from alignedserve.client import AsyncClient
from alignedserve.cluster.cli.serve_process import ServeProcess
from alignedserve.control.samples import value

BLOCK_SIZE = 16
VOCABULARY = 2000
HITS = "alignedserve_prefix_cache_hit_tokens_total"


@dataclass(slots=True)
class Round:
    """What one cluster did with one round of conversations."""

    first_s: list[float] = field(default_factory=list)  # time to first token of each conversation's first turn
    later_s: list[float] = field(default_factory=list)  # of all other turns
    gaps_s: list[float] = field(default_factory=list)  # between tokens
    tokens: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0  # of the cluster's roles
    hit_tokens: float = 0.0
    ideal_tokens: int = 0


def full_blocks(tokens: int) -> int:
    return tokens // BLOCK_SIZE * BLOCK_SIZE


def ideal(options: argparse.Namespace) -> int:
    """Tokens that a cache of endless size finds, if a conversation's turns follow one another. The last token of a
    prompt is always computed, and the last one of an answer has no KV."""
    if options.unique:
        return 0
    found = full_blocks(options.system) * (options.conversations - 1)
    for turn in range(1, options.turns):
        found += full_blocks(prompt_tokens(options, turn - 1) + options.answer - 1) * options.conversations
    return found


def prompt_tokens(options: argparse.Namespace, turn: int) -> int:
    return options.system + (turn + 1) * options.message + turn * options.answer


class Conversations:
    """One round against one cluster."""

    def __init__(self, options: argparse.Namespace, seed: int) -> None:
        self._options = options
        self._draw = random.Random(seed)
        self._system = self._tokens(options.system)
        self._places = asyncio.Semaphore(options.at_once if not options.rate else options.conversations)
        self.result = Round(ideal_tokens=ideal(options))

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(3, VOCABULARY) for _ in range(count)]

    async def run(self, server: ServeProcess) -> Round:
        before, used_s = value(server.metrics(), HITS), cpu_seconds(server)
        said = [[self._tokens(self._options.message) for _ in range(self._options.turns)]
                for _ in range(self._options.conversations)]  # fmt: skip
        starts_s = [0.0] * len(said)
        if self._options.rate:
            starts_s = list(itertools.accumulate(self._draw.expovariate(self._options.rate) for _ in said))
        prefixes = [self._tokens(self._options.system) if self._options.unique else self._system for _ in said]
        began_s = time.perf_counter()
        async with AsyncClient(server.grpc_address, timeout_s=3600.0) as client:
            await asyncio.gather(*(self._one(client, *all_of) for all_of in zip(starts_s, prefixes, said, strict=True)))
        self.result.seconds = time.perf_counter() - began_s
        self.result.cpu_s = cpu_seconds(server) - used_s
        self.result.hit_tokens = value(server.metrics(), HITS) - before
        return self.result

    async def _one(self, client: AsyncClient, start_s: float, prefix: list[int], messages: list[list[int]]) -> None:
        await asyncio.sleep(start_s)
        async with self._places:
            prompt = list(prefix)
            for turn, message in enumerate(messages):
                await asyncio.sleep(self._options.pause if turn else 0.0)
                prompt += message
                if self._options.unique:
                    prompt = self._tokens(len(prompt))
                prompt += await self._turn(client, prompt, self.result.later_s if turn else self.result.first_s)

    async def _turn(self, client: AsyncClient, prompt: list[int], first_s: list[float]) -> list[int]:
        answer: list[int] = []
        last_s = began_s = time.perf_counter()
        stream = client.stream(prompt_token_ids=prompt, max_tokens=self._options.answer, temperature=0, ignore_eos=True)
        async for chunk in stream:
            now_s = time.perf_counter()
            if chunk.token_ids:
                (self.result.gaps_s if answer else first_s).append(now_s - (last_s if answer else began_s))
                last_s = now_s
                answer += chunk.token_ids
        self.result.tokens += len(answer)
        return answer


def cpu_seconds(server: ServeProcess) -> float:
    times = [psutil.Process(role["pid"]).cpu_times() for role in server.roles()]
    return sum(one.user + one.system for one in times)


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[-1]


def ratios(with_cache: Round, without: Round) -> dict[str, float]:
    found = {
        "later_ttft": statistics.mean(with_cache.later_s) / statistics.mean(without.later_s),
        "first_ttft": statistics.mean(with_cache.first_s) / statistics.mean(without.first_s),
        "tokens_per_s": with_cache.tokens / with_cache.seconds / (without.tokens / without.seconds),
        "gap_p99": p99(with_cache.gaps_s) / p99(without.gaps_s),
        "cpu": with_cache.cpu_s / without.cpu_s,
    }
    if with_cache.ideal_tokens:
        found["hits"] = with_cache.hit_tokens / with_cache.ideal_tokens
    return found


def shown(one: Round) -> dict[str, float]:
    return {
        "later_ttft_s": round(statistics.mean(one.later_s), 4),
        "first_ttft_s": round(statistics.mean(one.first_s), 4),
        "tokens_per_s": round(one.tokens / one.seconds, 1),
        "gap_p99_s": round(p99(one.gaps_s), 4),
        "cpu_s": round(one.cpu_s, 2),
    }


def measure(options: argparse.Namespace, model: str) -> dict[str, Any]:
    common = ("--model", model, "--set", f"kv_pool.size_gib={options.pool_gib}", *options.serve)
    switches = {"with": (), "without": ("--no-prefix-cache",)}
    found: list[dict[str, Any]] = []
    for start in range(options.starts):
        with contextlib.ExitStack() as stack:
            servers = {
                name: stack.enter_context(ServeProcess(*common, *switches[name]))
                for name in sorted(switches, reverse=start % 2 == 1)
            }
            for number in range(-options.warm, options.rounds):
                rounds: dict[str, Round] = {}
                seed = options.seed + start * (options.warm + options.rounds) + options.warm + number
                for name in sorted(servers, reverse=(start + number) % 2 == 1):
                    rounds[name] = asyncio.run(Conversations(options, seed).run(servers[name]))
                if number < 0:
                    continue
                compared = ratios(rounds["with"], rounds["without"])
                found.append({name: shown(one) for name, one in rounds.items()})
                found[-1]["ratios"] = {key: round(one, 4) for key, one in compared.items()}
                print(json.dumps(found[-1]), flush=True)
    names = found[0]["ratios"]
    return {
        "rounds": found,
        "median": {name: statistics.median(one["ratios"][name] for one in found) for name in names},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="tiny, 134m (drawn here), or a folder")
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=32, help="conversations under way, without --rate")
    parser.add_argument("--rate", type=float, default=0.0, help="conversations that begin in a second")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between an answer and the next turn")
    parser.add_argument("--system", type=int, default=1000, help="tokens of the shared system prompt")
    parser.add_argument("--message", type=int, default=40, help="new tokens of each turn")
    parser.add_argument("--answer", type=int, default=32, help="tokens generated in each turn")
    parser.add_argument("--rounds", type=int, default=1, help="of both clusters, in each start")
    parser.add_argument("--warm", type=int, default=0, help="rounds before these, in which the pool fills")
    parser.add_argument("--starts", type=int, default=1, help="of both clusters: one may be slower for all of its life")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pool-gib", type=float, default=2.0)
    parser.add_argument("--unique", action="store_true", help="no two prompts share anything")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="options for `alignedserve serve`; last")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.model == "134m":
            make_checkpoint(Path(folder), torch.float32)
        result = measure(options, folder if options.model == "134m" else options.model)
    print(json.dumps(result["median"]))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
