"""What structured output costs: output tokens per second without grammars, with some, and with all; times to compile.

The shipped model's decode iterations in one process, without a cluster, as a worker runs them: the engine computes and
chooses, the request takes its token. All requests are drawn at temperature 1 and begin again when their answer ends.
The settings take turns (A B C, C B A, …), each of `--iterations` iterations; a round's ratio compares its own turns.

    python benchmarks/grammar.py --rounds 10 --json grammar.json

Targets: at most 5 % fewer tokens with 4 of 32 requests under a grammar, at most 10 % with all.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from alignedserve.engine.decoding import DecodeItem
from alignedserve.engine.eager import EagerDecode
from alignedserve.engine.live import LiveRequest
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.model.loader import load_model
from alignedserve.engine.runner import ForwardItem, ModelRunner, allocate_cache
from alignedserve.engine.sampling.sampler import SampledToken
from alignedserve.grammar.compiled import Grammars, grammar_library
from alignedserve.request import GrammarKind, GrammarSpec, RequestKey, RequestSpec, SamplingParams
from alignedserve.text import Tokenizer

TINY = Path(__file__).parents[1] / "src/alignedserve/models/tiny"
BLOCK_SIZE = 16
AIMS = {"some": 0.95, "all": 0.90}
ENTRY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        "size": {"type": "integer", "minimum": 0, "maximum": 9999},
        "ratio": {"type": ["number", "null"]},
        "kind": {"anyOf": [{"const": "a"}, {"type": "boolean"}]},
    },
    "required": ["name", "tags", "size", "ratio", "kind"],
    "additionalProperties": False,
}
SPECS = [
    GrammarSpec(GrammarKind.JSON, json.dumps({"type": "array", "items": ENTRY, "minItems": 20})),
    GrammarSpec(GrammarKind.JSON, json.dumps({"type": "object"})),
    GrammarSpec(GrammarKind.REGEX, r"([A-Z][a-z]{2,8} [0-9]{1,4}(, )?){20,40}"),
    GrammarSpec(GrammarKind.GRAMMAR, 'root ::= t (op t)*\nt ::= [0-9]+ | "(" root ")"\nop ::= [-+*/]'),
]


class Speed(NamedTuple):
    """Tokens per second, and per second of processor time, which other processes disturb less."""

    wall: float
    cpu: float


class Rig:
    """Requests that decode over the shipped model."""

    def __init__(self, requests: int, prefix: int, library: str, *, overlap: bool) -> None:
        self.loaded = load_model(inspect_model("tiny", TINY, "float32", "cpu"), "cpu")
        info = self.loaded.info
        self.prefix, self.requests = prefix, requests
        self.room = info.max_positions // BLOCK_SIZE
        self.runner = ModelRunner(
            self.loaded, allocate_cache(info.geometry(BLOCK_SIZE), requests * self.room + 1, "cpu")
        )
        self.engine = EagerDecode(self.runner, overlaps=overlap)
        tokenizer = Tokenizer.from_folder(TINY)
        assert tokenizer is not None
        self.tokenizer = tokenizer
        self.grammars = Grammars(grammar_library(library, tokenizer, info.vocab_size))
        self.prompt = [7 + number % 1000 for number in range(prefix)]
        self.blocks = [list(range(1 + n * self.room, 1 + (n + 1) * self.room)) for n in range(requests)]
        for blocks in self.blocks:
            self.runner.forward([ForwardItem(self.prompt, 0, blocks, "none")])

    def request(self, number: int, bound: bool, seed: int) -> LiveRequest:
        sampling = SamplingParams(
            temperature=1.0, seed=seed, max_tokens=self.loaded.info.max_positions - self.prefix,
            eos_token_ids=self.loaded.info.eos_token_ids, grammar=SPECS[number % len(SPECS)] if bound else None,
        )  # fmt: skip
        spec = RequestSpec(RequestKey(f"{number}-{seed}"), self.prompt, sampling)
        return LiveRequest(spec, self.tokenizer, self.grammars)

    def run(self, bound: int, iterations: int, seed: int) -> Speed:
        """With that many requests under a grammar."""
        every = self.requests // bound if bound else 0
        under = [bool(every) and number % every == 0 for number in range(self.requests)]
        lives = [self.request(number, under[number], seed) for number in range(self.requests)]
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for turn in range(iterations):
            items = [
                DecodeItem(
                    live.row,
                    live.spec.output_token_ids[-1] if live.spec.output_token_ids else self.prompt[-1],
                    0,
                    self.prefix + len(live.spec.output_token_ids) - 1,
                    self.blocks[number],
                    len(live.spec.output_token_ids),
                )
                for number, live in enumerate(lives)
            ]
            for number, result in enumerate(self.engine.launch(items).tokens()):
                if not isinstance(result, SampledToken):
                    raise result
                if lives[number].push(result) is not None:
                    lives[number] = self.request(number, under[number], seed + turn + 1)
        tokens = self.requests * iterations
        return Speed(tokens / (time.perf_counter() - began_s), tokens / (time.process_time() - began_cpu_s))


def compile_times(library: str, rounds: int) -> dict[str, float]:
    """Milliseconds for each kind, the median; and for the tokenizer, once."""
    tokenizer = Tokenizer.from_folder(TINY)
    assert tokenizer is not None
    began_s = time.perf_counter()
    found = grammar_library(library, tokenizer, 2048)
    found.compile(GrammarSpec(GrammarKind.REGEX, "a"), (0,))
    times = {"tokenizer": (time.perf_counter() - began_s) * 1e3}
    for name, spec in zip(("schema", "any object", "regex", "grammar"), SPECS, strict=True):
        taken = []
        for _ in range(rounds):
            began_s = time.perf_counter()
            found.compile(spec, (0,)).matcher()
            taken.append((time.perf_counter() - began_s) * 1e3)
        times[name] = statistics.median(taken)
    return {name: round(value, 2) for name, value in times.items()}


def measure(library: str, options: argparse.Namespace) -> dict[str, Any]:
    rig = Rig(options.requests, options.prefix, library, overlap=options.overlap)
    settings = {"none": 0, "some": options.some, "all": options.requests}
    for bound in settings.values():
        rig.run(bound, 10, 1)  # compiled, and warm
    speeds: dict[str, list[Speed]] = {name: [] for name in settings}
    for number in range(options.rounds):
        names = list(settings) if number % 2 == 0 else list(settings)[::-1]
        for name in names:
            speeds[name].append(rig.run(settings[name], options.iterations, 1000 * number))
    ratios = {
        (name, clock): [getattr(one, clock) / getattr(free, clock) for one, free in zip(speeds[name], speeds["none"],
                                                                                         strict=True)]
        for name in AIMS for clock in Speed._fields
    }  # fmt: skip
    return {
        "tokens_per_s": {
            name: round(statistics.median(one.wall for one in found), 1) for name, found in speeds.items()
        },
        "ratio": {" ".join(name): round(statistics.median(found), 4) for name, found in ratios.items()},
        "ratio_quartiles": {
            " ".join(name): [round(value, 4) for value in statistics.quantiles(found, n=4)[::2]]
            for name, found in ratios.items()
        },
        "mask_ms_mean": round(rig.grammars.meter.mask_seconds.sum / rig.grammars.meter.mask_seconds.count * 1e3, 3),
        "compile_ms": compile_times(library, 9),
        "met": {name: statistics.median(ratios[name, "wall"]) >= aim for name, aim in AIMS.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", nargs="+", default=["llguidance", "xgrammar"])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--some", type=int, default=4, help="requests under a grammar in the setting between")
    parser.add_argument("--prefix", type=int, default=128, help="tokens before the answer")
    parser.add_argument("--iterations", type=int, default=40, help="of each turn")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--overlap", action="store_true", help="choose on the device, as decode.overlap does")
    parser.add_argument("--profile", action="store_true", help="print where the time goes with all under a grammar")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds must be at least 2: quartiles are of the rounds' ratios")
    torch.set_num_threads(options.threads)
    if options.profile:
        rig = Rig(options.requests, options.prefix, options.library[0], overlap=options.overlap)
        rig.run(options.requests, 10, 1)
        with cProfile.Profile() as profile:
            rig.run(options.requests, 4 * options.iterations, 2)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return 0
    result = {library: measure(library, options) for library in options.library}
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if all(all(found["met"].values()) for found in result.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
