"""Compares greedy tokens of instances of two ranks, each with KV of its own, with `transformers`.

Each rank has a GPU of its own if there are two: they compute together over NCCL. Else they share one, and compute
together in host memory.
"""

from __future__ import annotations

from typing import Any

import torch

from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.parallel.processes import RankProcesses
from alignedserve.ranks.degrees import Degrees
from alignedserve.testing.models import KINDS, make_model
from alignedserve.testing.reference import load_reference
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
    "two ranks that share experts": Degrees(experts=2),
}
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss")


def run(context: Context) -> None:
    devices = [f"cuda:{number}" for number in range(min(2, torch.cuda.device_count()))] if context.on_gpu else ["cpu"]
    context.record.note("devices of two ranks", devices=devices)
    kinds = SMALL_KINDS if context.small else KINDS
    for name, degrees in WAYS.items():
        total = Agreement(wrong=[])
        for kind in kinds if degrees.experts == 1 else MIXTURES:
            if context.time_left_s <= 0:
                context.record.note("no time for this model", kind=kind, ranks=name)
                continue
            with context.record.case(f"{kind}, {name}", row=ROW):
                _compare(context, kind, degrees, devices, total)
        if total.answers:
            report(context, ROW, name, total, torch.float32)


def _compare(context: Context, kind: str, degrees: Degrees, devices: list[str], total: Agreement) -> None:
    folder = context.work / f"{kind}-{degrees.tensor}x{degrees.stages}x{degrees.experts}"
    make_model(kind, folder, seed=context.seed, std=GAIN / SHAPE["hidden_size"] ** 0.5, dtype=torch.float32, **SHAPE)
    info = inspect_model(kind, folder, "float32", devices[0])
    lengths, new_tokens = ([3, 21], 8) if context.small else ([1, 17, 150, 333], 32)
    prompts = [[context.draw.randrange(2, info.vocab_size) for _ in range(length)] for length in lengths]
    blocks = sum(-(-(length + new_tokens) // BLOCK_SIZE) for length in lengths) + 1
    blocks *= degrees.experts
    ranks = RankProcesses(
        info, degrees, trust_remote_code=False, threads=1, backend="auto", own_stores=True, devices=devices
    )
    try:
        loaded = ranks.load()
        store, cache = ranks.store("ranks", info.geometry(BLOCK_SIZE), blocks)
        runner = ranks.runner(loaded, cache)
        engine = decode_engine(runner, len(prompts), compiles=False)
        assert isinstance(store, PartedStore | RangedStore)
        for part in store.parts if isinstance(store, PartedStore) else store.ranges:
            part.blocks[:] = 255  # type: ignore[attr-defined]  # NaN: detects reads of unwritten memory
        for device in set(devices) - {"cpu"}:
            torch.cuda.synchronize(device)  # the other rank's work does not wait for it
        jobs = [Job(prompt, new_tokens) for prompt in prompts]
        Offline(runner, engine, chunk_tokens=48, seed=context.seed, ranks=degrees.experts).run(jobs)
    finally:
        ranks.close()
    reference: Any = load_reference(info.path, torch.float32).to(devices[0])  # type: ignore[arg-type]
    theirs = [greedy(reference, prompt, new_tokens) for prompt in prompts]
    found = agreement(reference, prompts, [job.tokens for job in jobs], theirs)
    total.add(found)
    context.record.note(
        f"{kind}, {degrees}",
        answers=found.answers,
        equal=found.equal_answers,
        wrong=found.wrong,
        engine=type(engine).__name__,
    )
