"""Compares greedy tokens of instances of several ranks, each with KV of its own, with `transformers`: those of one
instance, and those of two of unequal degrees, one of which computes the prompts.

Each rank has a GPU of its own if there are enough: they compute together over NCCL. Else they share them, and compute
together in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from alignedserve.engine.decoding import DecodeEngine
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.parallel.processes import RankProcesses
from alignedserve.engine.runner import ModelRunner
from alignedserve.model import ModelInfo
from alignedserve.ranks.degrees import Degrees
from alignedserve.testing.models import KINDS, make_model
from alignedserve.testing.reference import load_reference
from alignedserve.transfer.block_store import BlockStore, HostBlockStore
from alignedserve.transfer.links import connect
from alignedserve.transfer.parted import PartedStore
from alignedserve.transfer.ranged import RangedStore
from gpu_suite.cases.tokens import BLOCK_SIZE, SHAPE, SMALL_KINDS, report
from gpu_suite.models import GAIN
from gpu_suite.offline import Job, Offline, decode_engine
from gpu_suite.record import Context
from gpu_suite.reference import Agreement, agreement, greedy

ROW = "tokens-ranks"
WAYS = {
    "two ranks of each layer": Degrees(2),
    "two stages": Degrees(1, 2),
    "two stages of two ranks": Degrees(2, 2),
    "two ranks that share experts": Degrees(experts=2),
    "four ranks of each layer": Degrees(4),
}
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss")
HANDED_OVER = ((Degrees(2), Degrees(1, 2)), (Degrees(1, 2), Degrees(2)))
CHUNK_TOKENS = 48


@dataclass(frozen=True)
class Instance:
    store: BlockStore
    runner: ModelRunner
    engine: DecodeEngine


def run(context: Context) -> None:
    devices = devices_of(context)
    context.record.note("devices of ranks", devices=devices)
    kinds = SMALL_KINDS if context.small else KINDS
    for name, degrees in WAYS.items():
        total = Agreement(wrong=[])
        for kind in kinds if degrees.experts == 1 else MIXTURES:
            if context.time_left_s <= 0:
                context.record.note("no time for this model", kind=kind, ranks=name)
                continue
            with context.record.case(f"{kind}, {name}", row=ROW):
                _compare(context, kind, degrees, degrees, devices, total)
        if total.answers:
            report(context, ROW, name, total, torch.float32)
    total = Agreement(wrong=[])
    for prefill, decode in HANDED_OVER:
        with context.record.case(f"from {prefill} to {decode}", row=ROW):
            _compare(context, "llama", prefill, decode, devices, total)
    if total.answers:
        report(context, ROW, "prompts of an instance of another degree", total, torch.float32)


def devices_of(context: Context) -> list[str]:
    """Of at most four ranks."""
    count = min(4, torch.cuda.device_count())
    return [f"cuda:{number}" for number in range(count)] if context.on_gpu else ["cpu"]


def _compare(
    context: Context, kind: str, prefill: Degrees, decode: Degrees, devices: list[str], total: Agreement
) -> None:
    """Adds the answers of one instance; or, of unequal degrees, those of one instance to the prompts of another."""
    folder = context.work / f"{kind}-{_name(prefill)}-{_name(decode)}"
    make_model(kind, folder, seed=context.seed, std=GAIN / SHAPE["hidden_size"] ** 0.5, dtype=torch.float32, **SHAPE)
    info = inspect_model(kind, folder, "float32", devices[0])
    lengths, new_tokens = ([3, 21], 8) if context.small else ([1, 17, 150, 333], 32)
    prompts = [[context.draw.randrange(2, info.vocab_size) for _ in range(length)] for length in lengths]
    blocks = decode.experts * (sum(-(-(length + new_tokens) // BLOCK_SIZE) for length in lengths) + 1)
    jobs = [Job(prompt, new_tokens) for prompt in prompts]
    with ExitStack() as stack:
        own = stack.enter_context(instance(info, decode, devices[: decode.ranks], blocks, len(prompts)))
        offline = _offline(context, own, decode)
        if prefill == decode:
            offline.run(jobs)
        else:
            other = stack.enter_context(instance(info, prefill, devices[: prefill.ranks], blocks, len(prompts)))
            _hand_over(context, other, prefill, own, offline, jobs)
        engine = type(own.engine).__name__
    reference: Any = load_reference(info.path, torch.float32).to(devices[0])  # type: ignore[arg-type]
    theirs = [greedy(reference, prompt, new_tokens) for prompt in prompts]
    found = agreement(reference, prompts, [job.tokens for job in jobs], theirs)
    total.add(found)
    context.record.note(
        f"{kind}, {prefill} to {decode}",
        answers=found.answers,
        equal=found.equal_answers,
        wrong=found.wrong,
        engine=engine,
    )


def _hand_over(
    context: Context, other: Instance, degrees: Degrees, own: Instance, offline: Offline, jobs: list[Job]
) -> None:
    """The other instance computes the prompts. Their KV is copied through a store in host memory and, of every other
    one, from the parts of one instance to those of the other."""
    before = [Job(job.prompt, 1) for job in jobs]
    _offline(context, other, degrees).run(before)
    pool = HostBlockStore.private("pool", own.store.geometry, own.store.capacity_blocks)
    with ExitStack() as stack:
        there, back, directly = (
            stack.enter_context(closing(source, destination))
            for source, destination in ((other.store, pool), (pool, own.store), (other.store, own.store))
        )

        def fetch(job: Job) -> None:
            number = next(at for at, one in enumerate(jobs) if one is job)
            source = before[number].blocks
            if number % 2:
                copied(directly.copy(source, job.blocks[: len(source)]))
            else:
                copied(there.copy(source, job.blocks[: len(source)]))
                copied(back.copy(job.blocks[: len(source)], job.blocks[: len(source)]))

        for job, done in zip(jobs, before, strict=True):
            job.tokens += done.tokens
            job.launched = 1
        offline.run(jobs, fetch)


def copied(copy: Any) -> None:
    if not copy.wait(30.0):
        raise TimeoutError("a copy between instances did not end within 30 s")


@contextmanager
def closing(source: BlockStore, destination: BlockStore) -> Iterator[Any]:
    channel = connect(source, destination)
    try:
        yield channel
    finally:
        channel.close()


@contextmanager
def instance(info: ModelInfo, degrees: Degrees, devices: list[str], blocks: int, requests: int) -> Iterator[Instance]:
    ranks = RankProcesses(
        info, degrees, trust_remote_code=False, threads=1, backend="auto", own_stores=True, devices=devices
    )
    try:
        loaded = ranks.load()
        store, cache = ranks.store(f"ranks-{_name(degrees)}", info.geometry(BLOCK_SIZE), blocks)
        runner = ranks.runner(loaded, cache)
        engine = decode_engine(runner, requests, compiles=False)
        assert isinstance(store, PartedStore | RangedStore)
        for part in store.parts if isinstance(store, PartedStore) else store.ranges:
            part.blocks[:] = 255  # type: ignore[attr-defined]  # NaN: detects reads of unwritten memory
        for device in set(devices) - {"cpu"}:
            torch.cuda.synchronize(device)  # the other rank's work does not wait for it
        yield Instance(store, runner, engine)
    finally:
        ranks.close()


def _offline(context: Context, instance: Instance, degrees: Degrees) -> Offline:
    return Offline(
        instance.runner, instance.engine, chunk_tokens=CHUNK_TOKENS, seed=context.seed, ranks=degrees.experts
    )


def _name(degrees: Degrees) -> str:
    return f"{degrees.tensor}x{degrees.stages}x{degrees.experts}"
