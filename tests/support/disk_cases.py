"""Prompts in a shard with a disk tier, and what is found of them there and on disk."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from alignedserve.geometry import KvGeometry
from alignedserve.kv_pool.prefix_chain import root_digest
from alignedserve.metrics import Page
from alignedserve.request import RequestKey
from support.disk_tier import HeldThreads, TierRig, pattern, shard_memory
from support.kv_pool import PREFILL, leased
from support.prefix_pool import GEOMETRY

PAGES = KvGeometry("random", "float32", 2, 2, 32, 4)  # blocks of one page
ROOT = root_digest("model")
CAPACITY = 16
A, B = list(range(100, 120)), list(range(200, 220))  # five blocks each

NUMBERS = itertools.count()

Make = Callable[..., TierRig]


@contextmanager
def tiers(folder: Path) -> Iterator[Make]:
    """Makes tiers over fresh memory, with their files in `folder`; all are ended afterwards, and were consistent."""
    rigs: list[TierRig] = []

    def new(slots: int = 32, **options: object) -> TierRig:
        rig = TierRig(*shard_memory(CAPACITY, options.pop("geometry", GEOMETRY)), folder, slots, **options)  # type: ignore[arg-type]
        rigs.append(rig)
        return rig

    yield new
    HeldThreads.held = False
    for rig in rigs:
        if not rig.calls.dead:
            if (book := rig.tier.check()) is not None:
                assert book.problem == ""
            rig.pool.check_integrity()
            rig.kill()


def opened(rig: TierRig) -> TierRig:
    rig.start()
    return rig


def cache(rig: TierRig, tokens: Sequence[int], checksums: Sequence[int] = ()) -> None:
    """A request with these tokens was computed, and has ended."""
    blocks = leased(rig.pool, PREFILL, len(tokens) // 4)
    for place, block in enumerate(blocks, 1):
        rig.store.read_block(block)[:] = pattern(ROOT, tokens[: place * 4], rig.store.block_bytes)
    key = RequestKey(f"r{next(NUMBERS)}")
    rig.pool.commit(PREFILL, key, len(tokens), blocks, checksums=checksums, token_ids=tokens, root=ROOT)
    rig.pool.release([key])
    rig.pool.give_back(PREFILL, rig.pool._blocks.leased_to(PREFILL))


def forget(rig: TierRig) -> None:
    """All of the shard's blocks were needed for something else."""
    rig.pool.give_back(PREFILL, leased(rig.pool, PREFILL, CAPACITY))


def promote(rig: TierRig, tokens: Sequence[int]) -> int:
    """Blocks of these tokens in the shard after what is on disk was read. They are what was written."""
    rig.run(rig.opened.promotion.promote(ROOT, [*tokens, 0], 1000))
    return found(rig, tokens)


def found(rig: TierRig, tokens: Sequence[int]) -> int:
    blocks = rig.index.match(rig.index.chain(ROOT, tokens), 99)
    for place, block in enumerate(blocks, 1):
        assert bytes(rig.store.read_block(block)) == pattern(ROOT, tokens[: place * 4], rig.store.block_bytes)
    return len(blocks)


def on_disk(rig: TierRig, tokens: Sequence[int]) -> int:
    return len(rig.opened.disk.index.match(rig.index.chain(ROOT, tokens), 99))


def metric(rig: TierRig, name: str, **labels: str) -> float:
    page = Page()
    rig.tier.show(page)
    families = {
        sample.name: sample
        for family in page.collect()
        for sample in family.samples
        if labels.items() <= sample.labels.items()
    }
    return families[f"alignedserve_{name}"].value
