"""Layer-wise offload: what is copied when, which process returns blocks, and from which prompt length on it pays."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from alignedserve.errors import TransferError
from alignedserve.geometry import KvGeometry
from alignedserve.kv_pool.writer import Committed
from alignedserve.prefill_worker import layerwise as layerwise_module
from alignedserve.prefill_worker.jobs import PrefilledJob
from alignedserve.prefill_worker.layerwise import Ahead, Layerwise
from alignedserve.prefill_worker.layerwise_choice import LONGEST_TOKENS, OffloadCosts
from alignedserve.prefill_worker.offload import Offloader
from alignedserve.request import RequestKey, RequestSpec, SamplingParams
from alignedserve.transfer.block_store import HostBlockStore
from alignedserve.transfer.completion import Completion
from alignedserve.transfer.copier import Copier, Route
from alignedserve.transfer.host_channel import HostChannel

GEOMETRY = KvGeometry("random", "float32", layers=4, kv_heads=2, head_dim=4, block_size=4)
KEY = RequestKey("r", 0)


@dataclass
class World:
    """A cache that passes write to, layer by layer, and a pool that receives the copies."""

    copier: Copier = field(default_factory=lambda: Copier(verify=True, timeout_s=10.0))
    asked: list[tuple[list[int], list[int], Any]] = field(default_factory=list)
    abandoned: list[Ahead] = field(default_factory=list)
    prepared: list[Ahead] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = HostBlockStore.private("cache", GEOMETRY, 20)
        self.pool = HostBlockStore.private("pool", GEOMETRY, 30)
        self.cache.blocks[:] = np.random.default_rng(0).integers(0, 256, self.cache.blocks.shape, dtype=np.uint8)
        self.channel = HostChannel(self.cache, self.pool)
        self.layerwise = Layerwise(8, GEOMETRY, self.prepared.append, self.begin, self.abandoned.append)

    def begin(
        self, key: RequestKey, sources: Sequence[int], targets: Sequence[int], layers: tuple[int, int] | None
    ) -> Completion:
        self.asked.append((list(sources), list(targets), layers))
        return self.copier.begin_part(self.channel, sources, targets, layers, key.request_id)

    def chunk(self, ahead: Ahead, blocks: list[int], start: int, end: int, *, last: bool = False) -> None:
        """A pass that computes these tokens; each layer's bytes are written just before it is announced."""
        copies = self.layerwise.watch([self.layerwise.filling(ahead, blocks, start, end, last=last)])
        layers = self.cache.blocks.reshape(20, 4, -1)
        for layer in range(4):
            for block in blocks[start // 4 : -(-end // 4)]:
                layers[block, layer] += 1
            copies.on_layer(layer)
        copies.end()


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layerwise_module, "GROUP_BYTES", 1)


def test_each_layer_of_the_blocks_that_a_chunk_fills_is_copied_when_it_is_written() -> None:
    world = World()
    ahead = world.layerwise.open(KEY, 18, 0, 0)
    assert ahead is not None
    assert (world.prepared, ahead.count, ahead.kept) == ([ahead], 5, 0)
    ahead.fresh, blocks = [9, 8, 20, 3, 11], [4, 5, 7, 6, 1]
    world.chunk(ahead, blocks, 0, 6)  # one block, and half of the second
    assert world.asked == [([4], [9], (layer, layer + 1)) for layer in range(4)]
    assert ahead.copied == 1
    world.asked.clear()
    world.chunk(ahead, blocks, 6, 12)
    world.chunk(ahead, blocks, 12, 18, last=True)  # the last block is not full, and complete
    assert [(sources, layers) for sources, _, layers in world.asked[:4]] == [([5, 7], (i, i + 1)) for i in range(4)]
    assert [sources for sources, _, _ in world.asked[4:]] == [[6, 1]] * 4
    assert ahead.copied == 5
    for part in ahead.parts:
        part.wait(10)
    assert np.array_equal(world.pool.blocks[ahead.fresh], world.cache.blocks[blocks])


def test_several_layers_go_together_where_one_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layerwise_module, "MIN_COPIES", 2)
    monkeypatch.setattr(layerwise_module, "GROUP_BYTES", 3 * 2 * GEOMETRY.block_bytes // 4)
    world = World()
    ahead = Ahead(KEY, 0, 2, fresh=[1, 2])
    world.chunk(ahead, [3, 4], 0, 8, last=True)
    assert [layers for _, _, layers in world.asked] == [(0, 2), (2, 4)]


def test_a_lease_that_comes_late_is_caught_up_with() -> None:
    world = World()
    ahead = Ahead(KEY, 0, 4)
    world.chunk(ahead, [4, 5, 7, 6], 0, 6)
    assert (world.asked, ahead.copied) == ([], 0)
    ahead.fresh = [9, 8, 20, 3]
    world.chunk(ahead, [4, 5, 7, 6], 6, 16, last=True)
    assert world.asked[0] == ([4], [9], None)  # filled before
    assert world.asked[1:] == [([5, 7, 6], [8, 20, 3], (layer, layer + 1)) for layer in range(4)]
    for part in ahead.parts:
        part.wait(10)
    assert np.array_equal(world.pool.blocks[ahead.fresh], world.cache.blocks[[4, 5, 7, 6]])


def test_blocks_that_the_pool_has_from_an_earlier_epoch_are_not_written_again() -> None:
    world = World()
    ahead = world.layerwise.open(KEY, 18, 6, 1)
    assert ahead is not None
    assert (ahead.kept, ahead.count, ahead.copied) == (1, 4, 1)
    ahead.fresh = [9, 8, 20, 3]
    world.chunk(ahead, [4, 5, 7, 6, 1], 6, 18, last=True)
    assert world.asked[0] == ([5, 7, 6, 1], [9, 8, 20, 3], (0, 1))


def test_short_prompts_and_layers_in_another_order_are_left_to_whole_blocks() -> None:
    world = World()
    assert world.layerwise.open(KEY, 9, 2, 0) is None
    assert not world.prepared
    ahead = Ahead(KEY, 0, 2, fresh=[1, 2])
    copies = world.layerwise.watch([world.layerwise.filling(ahead, [3, 4], 0, 8, last=True)])
    for layer in (0, 2, 1, 3):
        copies.on_layer(layer)
    copies.end()
    assert (len(world.asked), ahead.copied) == (1, 0)


async def test_parts_count_together_and_a_wrong_byte_or_a_failed_part_has_all_copied_again() -> None:
    for fault in ("none", "byte", "error"):
        world = World()
        sums = world.cache.checksums([4, 5])
        parts = [
            world.copier.begin_part(world.channel, [4, 5], [7, 8], layers, "r") for layers in ((0, 1), (1, 3), (3, 4))
        ]
        for part in parts:
            await part
        if fault == "byte":
            world.pool.blocks[8, 3] ^= 1
        if fault == "error":
            parts.append(world.copier.begin_part(world.channel, [4], [99], None, "r"))
        route = Route(world.channel, [4, 5], sums)
        await world.copier.join(parts, [route, route], [7, 8], "r")
        assert np.array_equal(world.pool.blocks[[7, 8]], world.cache.blocks[[4, 5]])
        assert world.copier.failures == (fault != "none")
        assert world.copier.stuck() is None


class Pool:
    """A writer's lease of a few blocks."""

    weights = ""

    def __init__(self, blocks: int) -> None:
        self.free = list(range(blocks))
        self.more = asyncio.Event()
        self.committed: list[int] = []

    async def commit(self, key: RequestKey, tokens: int, blocks: Sequence[int], *more: Any) -> Committed:
        self.committed = list(blocks)
        return Committed(self.committed, [])

    async def take(self, count: int) -> list[int]:
        while len(self.free) < count:
            self.more.clear()
            await self.more.wait()
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def give(self, blocks: Sequence[int]) -> None:
        self.free += blocks
        self.more.set()


async def test_what_was_taken_for_a_prompt_that_is_given_up_comes_back_when_its_copies_have_ended() -> None:
    world, pool = World(), Pool(4)
    lease: Any = pool
    offloader = Offloader("prefill-0", lease, world.copier, world.channel, "pool", 4)
    ahead, waiting = Ahead(KEY, 0, 3), Ahead(KEY, 0, 3)
    offloader.prepare(ahead)
    offloader.prepare(waiting)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (ahead.fresh, waiting.fresh, pool.free) == ([0, 1, 2], None, [3])
    held = Completion()
    ahead.parts = [held]
    offloader.abandon(ahead)
    offloader.abandon(waiting)
    await asyncio.sleep(0.01)
    assert pool.free == [3]  # a copy is still writing
    assert not offloader.idle
    held.finish(TransferError("cancelled"))
    await asyncio.sleep(0.01)
    assert sorted(pool.free) == [0, 1, 2, 3]
    assert offloader.idle


@pytest.mark.parametrize(("before_pass", "copied_ahead"), [(0, 5), (1, 5), (2, 0)])
async def test_all_blocks_go_ahead_if_their_lease_comes_before_the_last_pass(
    before_pass: int, copied_ahead: int
) -> None:
    world, pool, blocks = World(), Pool(8), [4, 5, 7, 6, 1]
    lease: Any = pool
    offloader = Offloader("prefill-0", lease, world.copier, world.channel, "pool", 4)
    ahead = world.layerwise.open(KEY, 18, 0, 0)
    assert ahead is not None
    passes = [(0, 8, False), (8, 18, True)]
    for number in range(3):
        if number == before_pass:
            offloader.prepare(ahead)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        if number < len(passes):
            begin, end, last = passes[number]
            world.chunk(ahead, blocks[: -(-end // 4)], begin, end, last=last)
    spec = RequestSpec(KEY, list(range(18)), SamplingParams())
    (prefilled,), gone = await offloader.offload(PrefilledJob(KEY, [spec], list(range(18)), blocks, ahead=ahead))
    assert (prefilled.blocks, gone) == (5, [])
    assert (offloader.blocks, offloader.blocks_ahead) == (5, copied_ahead)
    assert pool.committed == [0, 1, 2, 3, 4]
    assert np.array_equal(world.pool.blocks[pool.committed], world.cache.blocks[blocks])


MIB = 1 << 20


def test_the_length_from_which_it_pays_follows_from_what_was_measured() -> None:
    """Made-up figures of a 7B model: half a MiB of KV a token, 50 GB/s to the host."""
    costs = OffloadCosts(token_s=60e-6, bytes_per_s=50e9, copy_s=20e-6, call_s=30e-6)
    found = costs.threshold_tokens(MIB // 2, 32, 2048, 16)
    assert 100 < found < 600
    assert costs.gain_s(found, MIB // 2, 32, 2048) >= 1e-3
    assert costs.gain_s(found // 2, MIB // 2, 32, 2048) < 1e-3
    # Nearly all of a long prompt's copy is hidden behind its passes.
    assert costs.gain_s(8192, MIB // 2, 32, 2048) > 0.9 * 8192 * MIB / 2 / 50e9
    slow_calls = OffloadCosts(token_s=60e-6, bytes_per_s=50e9, copy_s=20e-6, call_s=1.0)
    assert slow_calls.threshold_tokens(MIB // 2, 32, 2048, 16) == 0
    tiny = OffloadCosts(token_s=1e-6, bytes_per_s=1e15, copy_s=1e-5, call_s=1e-5)
    assert tiny.gain_s(LONGEST_TOKENS, 16, 2, 512) < 0


def test_what_passes_and_copies_take_is_measured(tmp_path: Any) -> None:
    from alignedserve.engine.model.inspect import inspect_model
    from alignedserve.engine.model.loader import load_model
    from alignedserve.engine.runner import ModelRunner, allocate_cache
    from alignedserve.prefill_worker.layerwise_choice import measure
    from alignedserve.testing.models import make_model
    from alignedserve.transfer.links import connect

    folder = make_model("llama", tmp_path, seed=3)
    info = inspect_model("tiny", folder, "float32", "cpu")
    geometry = info.geometry(4)
    store = HostBlockStore.private("cache", geometry, 8)
    cache = allocate_cache(geometry, 8, "cpu", store.as_memory())
    costs = measure(ModelRunner(load_model(info, "cpu"), cache), store, connect, 64)
    assert all(value > 0 for value in (costs.token_s, costs.bytes_per_s, costs.copy_s, costs.call_s))
    assert costs.token_s < 1
    assert costs.call_s < 0.1
