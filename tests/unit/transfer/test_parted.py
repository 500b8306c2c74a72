"""Stores in parts: to others whole blocks, whatever the parts are; a copy is one to or from all of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from alignedserve.errors import GeometryMismatchError, TransferError
from alignedserve.geometry import KvGeometry, StoreSlice
from alignedserve.proto import common_pb2 as pb
from alignedserve.transfer import links
from alignedserve.transfer.block_store import BlockStore, HostBlockStore
from alignedserve.transfer.channel import Channel
from alignedserve.transfer.copier import Copier, Route
from alignedserve.transfer.handles import StoreHandle
from alignedserve.transfer.host_channel import HostChannel
from alignedserve.transfer.links import connect
from alignedserve.transfer.paired.client import PairClient
from alignedserve.transfer.paired.remote import RemoteBlockStore
from alignedserve.transfer.paired.server import PairServer
from alignedserve.transfer.paired.transport import ASKING_RANK, SERVING_RANK, Wiring
from alignedserve.transfer.parted import PartedChannel, PartedStore, opened, parts_by_id
from alignedserve.transfer.topology import GLOO

GEOMETRY = KvGeometry("random", "bfloat16", layers=4, kv_heads=6, head_dim=8, block_size=16)
BLOCKS = 9
HALVES = [StoreSlice(0, 4, 0, 3), StoreSlice(0, 4, 3, 6)]
STAGES = [StoreSlice(0, 1, 0, 6), StoreSlice(1, 4, 0, 6)]
BOTH = [StoreSlice(layer, layer + 2, head, head + 3) for layer in (0, 2) for head in (0, 3)]
SIXTHS_TWICE = [StoreSlice(0, 4, head, head + 1) for head in range(6) for _ in range(2)]
CUTS = [HALVES, STAGES, BOTH, SIXTHS_TWICE]


def filled(store_id: str, part: StoreSlice | None = None, seed: int = 0) -> HostBlockStore:
    store = HostBlockStore.private(store_id, GEOMETRY, BLOCKS, part=part)
    store.blocks[:] = np.random.default_rng(seed).integers(0, 256, store.blocks.shape, np.uint8)
    return store


def parted(store_id: str, slices: Sequence[StoreSlice], seed: int = 1) -> PartedStore:
    return PartedStore(store_id, [filled(f"{store_id}/{at}", part, seed + at) for at, part in enumerate(slices)])


def contents(store: BlockStore) -> list[bytes]:
    return [bytes(store.read_block(block)) for block in range(BLOCKS)]


@pytest.mark.parametrize("written", CUTS, ids=len)
@pytest.mark.parametrize("read", CUTS, ids=len)
def test_blocks_are_the_same_whoever_wrote_them(written: list[StoreSlice], read: list[StoreSlice]) -> None:
    """From a whole store to parts, to other parts, and to a whole store."""
    pool, again = filled("pool"), filled("again", seed=99)
    one, other = parted("one", written), parted("other", read, seed=50)
    ids, order = [0, 3, 4, 5, 8], [7, 1, 2, 3, 0]
    steps = [(pool, one, ids, order), (one, other, order, ids), (other, again, ids, order)]
    for source, destination, sources, destinations in steps:
        channel = connect(source, destination)
        assert channel.copy(sources, destinations).wait(10)
        assert channel.counters().copies == 1
        assert channel.counters().blocks == len(ids)
        assert channel.pending == 0
        channel.close()
    for block, target in zip(ids, order, strict=True):
        assert bytes(again.read_block(target)) == bytes(pool.read_block(block)) == bytes(other.read_block(block))
    assert other.checksums(ids) == pool.checksums(ids)
    assert again.read_block(8) == filled("again", seed=99).read_block(8)


def test_only_the_layers_that_are_asked_for_are_copied() -> None:
    pool, cache = filled("pool"), parted("cache", BOTH)
    before, channel = contents(cache), connect(pool, cache)
    assert channel.copy([2], [5], layers=(1, 3)).wait(10)
    layer_bytes = GEOMETRY.block_bytes // GEOMETRY.layers
    now, source = bytes(cache.read_block(5)), bytes(pool.read_block(2))
    middle = slice(layer_bytes, 3 * layer_bytes)
    assert now[middle] == source[middle]
    assert now[:layer_bytes] == before[5][:layer_bytes]
    assert now[3 * layer_bytes :] == before[5][3 * layer_bytes :]
    assert channel.copy([2], [5], layers=(0, 1)).wait(10)  # not all parts have any of it
    for layers in ((2, 2), (3, 5), (-1, 2)):
        with pytest.raises(TransferError, match="are not in both stores"):
            channel.copy([2], [5], layers=layers)
    channel.close()


def test_a_copy_is_checked_and_verified_as_a_whole() -> None:
    pool, cache = filled("pool"), parted("cache", HALVES)
    copier, channel = Copier(verify=True, timeout_s=10), connect(pool, cache)
    routes = [Route(channel, [1, 2], pool.checksums([1, 2]))]
    assert copier.copy(routes, [4, 3], "request").wait(10)
    wrong = copier.copy([Route(channel, [1, 2], pool.checksums([2, 1]))], [4, 3], "request")
    with pytest.raises(TransferError, match="differ from what was written"):
        wrong.wait(10)
    with pytest.raises(TransferError, match=r"cache has blocks 0 to 8, not \[9\]"):
        channel.copy([0], [9])
    with pytest.raises(TransferError, match="written twice"):
        channel.copy([0, 1], [3, 3])
    copier.close()
    channel.close()
    with pytest.raises(TransferError, match="closed"):
        channel.copy([0], [1])


class Held(HostChannel):
    """Copies nothing before it may."""

    def __init__(self, source: HostBlockStore, destination: HostBlockStore, may: threading.Event) -> None:
        self._may = may
        super().__init__(source, destination)

    def _begin(self, copy: object) -> None:
        self._may.wait(10)
        super()._begin(copy)  # type: ignore[arg-type]


def test_a_copy_ends_when_the_last_part_has_and_is_cancelled_in_all() -> None:
    pool, cache, may = filled("pool"), parted("cache", HALVES), threading.Event()
    before = contents(cache)

    def slow_to_the_second(source: BlockStore, destination: BlockStore) -> Channel:
        assert isinstance(source, HostBlockStore)
        assert isinstance(destination, HostBlockStore)
        slow = destination is cache.parts[1]
        return Held(source, destination, may) if slow else HostChannel(source, destination)

    channel = PartedChannel(pool, cache, slow_to_the_second)
    first, second = channel.copy([0], [0]), channel.copy([1], [1])
    assert not first.wait(0.1)
    assert channel.pending == 2
    second.cancel()
    may.set()
    assert first.wait(10)
    with pytest.raises(TransferError, match="cancelled"):
        second.wait(10)
    assert (channel.counters().copies, channel.counters().failed, channel.pending) == (1, 1, 0)
    assert contents(cache)[0] == bytes(pool.read_block(0))
    half = filled("half", HALVES[1], seed=2)
    assert contents(cache)[1] != before[1]  # the first half was copied at once
    assert bytes(cache.parts[1].read_block(1)) == bytes(half.read_block(1))
    channel.close()


def test_a_part_that_takes_no_copy_fails_the_whole() -> None:
    pool, cache = filled("pool"), parted("cache", HALVES)
    made: list[Channel] = []

    def noted(source: BlockStore, destination: BlockStore) -> Channel:
        made.append(links.connect(source, destination))
        return made[-1]

    channel = PartedChannel(pool, cache, noted)
    made[1].close()
    with pytest.raises(TransferError, match="is closed"):
        channel.copy([0], [0]).wait(10)
    assert (channel.counters().failed, channel.pending) == (1, 0)
    made[0].close()
    with pytest.raises(TransferError, match="is closed"):
        channel.copy([0], [0])
    channel.close()


@pytest.mark.parametrize(
    "slices", [HALVES[:1], [*HALVES, StoreSlice(0, 4, 2, 4)], [HALVES[0], StoreSlice(0, 3, 3, 6)]], ids=range(3)
)
def test_parts_that_do_not_make_whole_blocks_are_refused(slices: list[StoreSlice]) -> None:
    with pytest.raises(TransferError, match="cache: its parts do not make whole blocks"):
        parted("cache", slices)


def test_parts_of_other_sizes_or_models_are_refused() -> None:
    first = filled("first", HALVES[0])
    shorter = HostBlockStore.private("second", GEOMETRY, BLOCKS - 1, part=HALVES[1])
    with pytest.raises(TransferError, match="do not make whole blocks"):
        PartedStore("cache", [first, shorter])
    other = KvGeometry("other", "bfloat16", layers=4, kv_heads=6, head_dim=8, block_size=16)
    with pytest.raises(GeometryMismatchError, match="other bfloat16"):
        PartedStore("cache", [first, HostBlockStore.private("second", other, BLOCKS, part=HALVES[1])])


def test_a_handle_has_the_handles_of_all_parts() -> None:
    cache = parted("cache", BOTH)
    handle = StoreHandle.from_proto(cache.handle().to_proto())
    assert handle == cache.handle()
    by_id = {part.store_id: part for part in cache.parts}
    again = opened(handle, lambda part: by_id[part.store_id])
    assert isinstance(again, PartedStore)
    assert contents(again) == contents(cache)
    closed: list[str] = []

    def failing(part: StoreHandle) -> BlockStore:
        if part.store_id == "cache/2":
            raise TransferError("no")
        store = filled(part.store_id, part.slice)
        store.close = lambda: closed.append(part.store_id)  # type: ignore[method-assign]
        return store

    with pytest.raises(TransferError, match="no"):
        opened(handle, failing)
    assert closed == ["cache/0", "cache/1"]


class InProcessPair:
    """Both ends of a pair in this process: a client, and a server of stores."""

    def __init__(self, stores: Sequence[BlockStore]) -> None:
        wiring = Wiring(GLOO, ASKING_RANK, "127.0.0.1", "cpu", 1 << 16, 5.0)
        self.client = PairClient(pb.ProcessKey(role="decode", id="decode-0"), wiring, GEOMETRY, "peer", away_s=10.0)
        own = replace(wiring, rank=SERVING_RANK)
        served = parts_by_id(stores)
        self._server = PairServer(self.client.hello().hello, served, own, self.client.on_event, lambda: None)
        self.client.begin(self._server.on_command, lambda: None)
        self._server.start(pb.ProcessKey(role="prefill", id="prefill-0"))

    def close(self) -> None:
        self.client.close()
        self._server.close()


@pytest.mark.parametrize("theirs", [HALVES, STAGES, BOTH], ids=len)
def test_parts_in_another_process_are_reached_one_by_one(theirs: list[StoreSlice]) -> None:
    """By their handle, as a decode instance reaches candidate buffers in parts on another node."""
    buffer, cache = parted("buffer", theirs), parted("cache", STAGES, seed=40)
    pair = InProcessPair([buffer])
    remote = opened(buffer.handle(), lambda part: RemoteBlockStore(part, pair.client))
    into, back = connect(remote, cache), connect(cache, remote)
    try:
        ids, order = [0, 3, 8], [5, 6, 2]
        assert into.copy(ids, order).wait(10)
        wanted = [bytes(buffer.read_block(block)) for block in ids]
        assert [bytes(cache.read_block(block)) for block in order] == wanted
        assert remote.checksums(ids) == buffer.checksums(ids) == cache.checksums(order)
        assert back.copy(order, [1, 2, 4]).wait(10)
        assert [bytes(buffer.read_block(block)) for block in (1, 2, 4)] == wanted
    finally:
        pair.close()
        into.close()
        back.close()
