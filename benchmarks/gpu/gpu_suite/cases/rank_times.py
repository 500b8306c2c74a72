"""Measures iterations and prompts of instances of several ranks against those of one rank, and copies of KV between
instances of unequal degrees against copies between equal ones.

Each rank has a GPU of its own if there are enough (`devices`). Else they share them: that shows the cost of the ranks
alone, and copies stay within a GPU. A pipeline drains after each iteration here, and prompts go one at a time, so that
stages gain less than in a decode instance.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from alignedserve.engine.decoding import DecodeEngine
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.model.loader import load_model
from alignedserve.engine.runner import ModelRunner, allocate_cache
from alignedserve.model import ModelInfo
from alignedserve.ranks.degrees import Degrees
from alignedserve.transfer.block_store import BlockStore
from gpu_suite.cases import ranks
from gpu_suite.cases.tokens import BLOCK_SIZE
from gpu_suite.offline import Job, Offline, decode_engine, new_runner
from gpu_suite.rates import release
from gpu_suite.record import Context
from gpu_suite.serving import medium_model

TIMES, COPIES = "rank-times", "rank-copies"
WAYS = {
    "two ranks of each layer": Degrees(2),
    "four ranks of each layer": Degrees(4),
    "two stages": Degrees(1, 2),
    "two stages of two ranks": Degrees(2, 2),
}
EQUAL = (Degrees(2), Degrees(2))
UNEQUAL = ((Degrees(2), Degrees(4)), (Degrees(4), Degrees(2)), (Degrees(2), Degrees(1, 2)), (Degrees(2), Degrees(2, 2)))
SMALL_PAIRS = ((Degrees(2), Degrees(1, 2)),)


def run(context: Context) -> None:
    devices = ranks.devices_of(context)
    context.record.note("devices of ranks", devices=devices)
    info = inspect_model("medium", medium_model(context), "bfloat16", devices[0])
    requests, prompt, answer = (2, 24, 4) if context.small else (32, 1024, 128)
    blocks = requests * -(-(prompt + answer + 1) // BLOCK_SIZE) + 1
    alone: dict[str, float] = {}
    with context.record.case("one rank", row=TIMES), _one(info, devices[0], blocks, requests) as parts:
        alone = _times(context, *parts, requests, prompt, answer)
        del parts
    for name, degrees in WAYS.items():
        if not alone or info.kv_heads < degrees.tensor or context.time_left_s <= 0:
            context.record.note("not measured", ranks=name)
            continue
        release()
        with (
            context.record.case(name, row=TIMES),
            ranks.instance(info, degrees, devices[: degrees.ranks], blocks, requests) as own,
        ):
            found = _times(context, own.runner, own.engine, requests, prompt, answer)
            for what, seconds in found.items():
                context.record.figure(
                    f"{name}, {what} over one rank's",
                    seconds / alone[what],
                    "of the time",
                    row=TIMES,
                    seconds=seconds,
                    of_one_s=alone[what],
                    engine=type(own.engine).__name__,
                )
    with context.record.case("copies between instances", row=COPIES):
        _compare_copies(context, info, devices, 8 if context.small else 1024)


@contextmanager
def _one(info: ModelInfo, device: str, blocks: int, requests: int) -> Iterator[tuple[ModelRunner, DecodeEngine]]:
    runner = new_runner(load_model(info, device), allocate_cache(info.geometry(BLOCK_SIZE), blocks, device))
    yield runner, decode_engine(runner, requests, compiles=False)


def _times(
    context: Context, runner: ModelRunner, engine: DecodeEngine, requests: int, prompt: int, answer: int
) -> dict[str, float]:
    """Seconds of an iteration, and of a prompt; the better of two runs after one that warms up."""
    offline, best = Offline(runner, engine, seed=context.seed), {}
    for turn in range(3):
        prompts = [[context.draw.randrange(2, 500) for _ in range(prompt)] for _ in range(requests)]
        spent = []
        for tokens in (1, 1 + answer):
            begun_s = time.perf_counter()
            offline.run([Job(list(each), tokens) for each in prompts])
            spent.append(time.perf_counter() - begun_s)
        if turn:
            own = {"a prompt": spent[0] / requests, "an iteration": (spent[1] - spent[0]) / answer}
            best = {what: min(seconds, best.get(what, seconds)) for what, seconds in own.items()}
    return best


def _compare_copies(context: Context, info: ModelInfo, devices: list[str], blocks: int) -> None:
    equal_s = _copy_s(info, *EQUAL, devices, blocks)
    context.record.note("2 ranks to 2", blocks=blocks, seconds=equal_s)
    for prefill, decode in SMALL_PAIRS if context.small else UNEQUAL:
        unequal_s = _copy_s(info, prefill, decode, devices, blocks)
        context.record.figure(
            f"{prefill} to {decode}, over 2 ranks to 2",
            unequal_s / equal_s,
            "of the time",
            row=COPIES,
            seconds=unequal_s,
        )


def _copy_s(info: ModelInfo, prefill: Degrees, decode: Degrees, devices: list[str], blocks: int) -> float:
    """Of the same blocks, from the parts of one instance to those of another; median of five."""
    with ExitStack() as stack:
        source, destination = (
            _store(stack, info, degrees, devices[: degrees.ranks], blocks) for degrees in (prefill, decode)
        )
        channel = stack.enter_context(ranks.closing(source, destination))
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).tolist()
        seconds = []
        for _ in range(6):
            begun_s = time.perf_counter()
            ranks.copied(channel.copy(list(range(blocks)), order))
            seconds.append(time.perf_counter() - begun_s)
    return statistics.median(seconds[1:])


def _store(stack: ExitStack, info: ModelInfo, degrees: Degrees, devices: list[str], blocks: int) -> BlockStore:
    return stack.enter_context(ranks.instance(info, degrees, devices, blocks, 1)).store
