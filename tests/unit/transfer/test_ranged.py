"""Stores in ranges of blocks: to others one store; each block is copied to and from the range that has it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.errors import TransferError
from alignedserve.geometry import KvGeometry, StoreSlice
from alignedserve.transfer.block_store import BlockStore, HostBlockStore
from alignedserve.transfer.copier import Copier, Route
from alignedserve.transfer.handles import StoreHandle
from alignedserve.transfer.links import connect
from alignedserve.transfer.parted import PartedStore
from alignedserve.transfer.ranged import RangedStore, opened

GEOMETRY = KvGeometry("random", "float16", layers=2, kv_heads=2, head_dim=4, block_size=4)
EACH = 5


def filled(store_id: str, seed: int, part: StoreSlice | None = None, blocks: int = EACH) -> HostBlockStore:
    store = HostBlockStore.private(store_id, GEOMETRY, blocks, part=part)
    store.blocks[:] = np.random.default_rng(seed).integers(0, 256, store.blocks.shape, np.uint8)
    return store


def ranged(store_id: str, count: int = 3, seed: int = 1) -> RangedStore:
    return RangedStore(store_id, [filled(f"{store_id}/{at}", seed + at) for at in range(count)])


def halves(store_id: str, seed: int = 40) -> PartedStore:
    heads = [StoreSlice(0, 2, head, head + 1) for head in range(2)]
    return PartedStore(store_id, [filled(f"{store_id}/{at}", seed + at, part) for at, part in enumerate(heads)])


def contents(store: BlockStore) -> list[bytes]:
    return [bytes(store.read_block(block)) for block in range(store.capacity_blocks)]


def test_blocks_are_numbered_range_after_range() -> None:
    store = ranged("cache")
    assert (store.capacity_blocks, store.device, store.slice) == (15, "cpu", StoreSlice.whole(GEOMETRY))
    for block in range(15):
        assert store.read_block(block) == store.ranges[block // EACH].read_block(block % EACH)
    whole = [store.ranges[block // EACH].checksums([block % EACH])[0] for block in (14, 0, 6, 5)]
    assert store.checksums([14, 0, 6, 5]) == whole
    assert store.checksums([]) == []


KINDS = {
    "whole": lambda: filled("whole", 9, blocks=12),
    "ranges": lambda: ranged("r", 2, 20),
    "parts": lambda: halves("p"),
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(draw=st.data())
def test_a_copy_is_that_of_each_block(kind: str, draw: st.DataObject) -> None:
    other, cache = KINDS[kind](), ranged("cache")
    counts = st.integers(0, min(other.capacity_blocks, cache.capacity_blocks))
    count = draw.draw(counts)
    ids = [draw.draw(st.permutations(range(store.capacity_blocks)))[:count] for store in (other, cache)]
    for source, destination, sources, destinations in ((other, cache, *ids), (cache, other, *ids[::-1])):
        expected = contents(destination)
        for one, at in zip(sources, destinations, strict=True):
            expected[at] = bytes(source.read_block(one))
        channel = connect(source, destination)
        assert channel.copy(sources, destinations).wait(10)
        assert contents(destination) == expected
        counters = channel.counters()
        assert (counters.copies, counters.blocks, channel.pending) == (1, count, 0)
        channel.close()
        destination_ids = draw.draw(st.permutations(range(destination.capacity_blocks)))
        filler = filled("filler", 77, blocks=destination.capacity_blocks)
        again = connect(filler, destination)
        assert again.copy(range(destination.capacity_blocks), destination_ids).wait(10)
        again.close()


def test_blocks_move_from_one_range_to_another_and_not_within_one() -> None:
    cache, copier = ranged("cache"), Copier(verify=True, timeout_s=10)
    channel, wanted = connect(cache, cache), cache.checksums([0, 1])
    assert copier.copy([Route(channel, [0, 1], wanted)], [12, 11], "request").wait(10)
    assert cache.checksums([12, 11]) == wanted
    with pytest.raises(TransferError, match="not copied within range 1"):
        channel.copy([5], [6])
    with pytest.raises(TransferError, match=r"cache has blocks 0 to 14, not \[15\]"):
        channel.copy([5], [15])
    with pytest.raises(TransferError, match="1 blocks cannot be copied to 2"):
        channel.copy([5], [1, 2])
    copier.close()
    channel.close()


def test_layers_are_copied_alone() -> None:
    pool, cache = filled("pool", 3), ranged("cache")
    before, channel = bytes(cache.read_block(7)), connect(pool, cache)
    assert channel.copy([2], [7], layers=(1, 2)).wait(10)
    half = GEOMETRY.block_bytes // 2
    now = bytes(cache.read_block(7))
    assert (now[:half], now[half:]) == (before[:half], bytes(pool.read_block(2))[half:])
    channel.close()


def test_unequal_ranges_are_refused() -> None:
    with pytest.raises(TransferError, match="ranges are equal, of whole blocks"):
        RangedStore("cache", [filled("one", 1), filled("other", 2, blocks=EACH + 1)])
    with pytest.raises(TransferError, match="ranges are equal, of whole blocks"):
        RangedStore("cache", [filled("one", 1), filled("other", 2, StoreSlice(0, 1, 0, 2))])


def test_a_handle_tells_ranges_from_parts() -> None:
    attached: list[str] = []

    def attach(handle: StoreHandle) -> BlockStore:
        attached.append(handle.store_id)
        return HostBlockStore.private(handle.store_id, handle.geometry, handle.capacity_blocks, part=handle.slice)

    for store, kind in ((ranged("cache"), RangedStore), (halves("parts"), PartedStore)):
        handle = StoreHandle.from_proto(store.handle().to_proto())
        again = opened(handle, attach)
        assert type(again) is kind
        assert again.capacity_blocks == store.capacity_blocks
    assert attached == ["cache/0", "cache/1", "cache/2", "parts/0", "parts/1"]
