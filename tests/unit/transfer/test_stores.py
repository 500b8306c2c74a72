"""Block stores and the copies between them: in one process, between processes, and between different slices."""

from __future__ import annotations

import multiprocessing
import random
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from alignedserve.errors import GeometryMismatchError, TransferError
from alignedserve.geometry import KvGeometry, StoreSlice
from alignedserve.transfer.block_store import HostBlockStore, attach_store, segment_bytes
from alignedserve.transfer.handles import CUDA, HOST, StoreHandle
from alignedserve.transfer.host_channel import HostChannel
from alignedserve.transfer.links import choose_channel, connect
from alignedserve.transfer.runs import Run, merge_runs, split_runs
from alignedserve.transfer.segments import SegmentClient, SegmentServer
from alignedserve.transfer.topology import Place, link_rank

GEOMETRY = KvGeometry("random", "bfloat16", layers=4, kv_heads=6, head_dim=8, block_size=16)
WHOLE = StoreSlice.whole(GEOMETRY)
spawn = multiprocessing.get_context("spawn")


@pytest.fixture
def client(tmp_path: Path) -> Iterator[SegmentClient]:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    server = SegmentServer(folder / "agent.sock", "secret")
    server.start()
    yield SegmentClient(server.socket_path, "secret")
    server.close()


def random_store(store_id: str, capacity: int, part: StoreSlice = WHOLE, seed: int = 0) -> HostBlockStore:
    store = HostBlockStore.private(store_id, GEOMETRY, capacity, part=part)
    store.blocks[:] = np.random.default_rng(seed).integers(0, 256, store.blocks.shape, np.uint8)
    return store


def as_tokens(store: HostBlockStore) -> np.ndarray:
    """`[block, layer, head, k|v, token, dim]`, of the store's own slice."""
    return store.blocks.view(np.uint16).reshape(store.capacity_blocks, *store.slice.shape, 2, 16, 8)


def test_a_block_of_a_slice_has_only_the_bytes_of_its_layers_and_heads() -> None:
    half = HostBlockStore.private("half", GEOMETRY, 3, part=StoreSlice(0, 2, 0, 3))
    assert half.block_bytes == GEOMETRY.block_bytes // 4
    assert half.blocks.shape == (3, GEOMETRY.block_bytes // 4)
    assert half.as_memory().nbytes == 3 * half.block_bytes
    half.blocks[2, -1] = 9
    assert half.as_memory()[-1] == 9


def test_a_store_keeps_room_in_front_of_its_blocks_and_starts_them_on_a_page(client: SegmentClient) -> None:
    store = HostBlockStore.create(client, "kv_pool-0", GEOMETRY, 5, node_id="n", front_bytes=5000)
    handle = store.handle()
    assert handle.offset_bytes == 8192
    assert store.front().nbytes == 8192
    assert client.segments()[0].size_bytes == segment_bytes(handle) == 8192 + 5 * GEOMETRY.block_bytes
    store.front()[-1], store.blocks[0, 0] = 1, 2
    assert store.segment is not None
    assert bytes(store.segment.memory()[8191:8193]) == b"\x01\x02"


def test_a_handle_survives_its_form_on_the_wire() -> None:
    handle = StoreHandle("s", CUDA, GEOMETRY, StoreSlice(1, 3, 2, 4), 7, "n", "/s", "seg", 4096, "cuda:1", b"\x00\xff")
    assert StoreHandle.from_proto(handle.to_proto()) == handle


def test_attaching_a_store_of_another_model_is_refused_naming_both(client: SegmentClient) -> None:
    store = HostBlockStore.create(client, "a", GEOMETRY, 2)
    other = KvGeometry("other", "float32", 2, 2, 64, 16)
    with pytest.raises(GeometryMismatchError, match=r"other float32.* and random bfloat16"):
        attach_store(store.handle(), client, geometry=other)
    with pytest.raises(GeometryMismatchError):
        HostChannel(store, HostBlockStore.private("b", other, 2))


def test_private_memory_and_short_segments_are_not_attached(client: SegmentClient) -> None:
    with pytest.raises(TransferError, match="has no segment"):
        attach_store(random_store("private", 2).handle(), client, geometry=GEOMETRY)
    client.create("short", GEOMETRY.block_bytes)
    handle = StoreHandle("short", HOST, GEOMETRY, WHOLE, 2, segment="short")
    with pytest.raises(TransferError, match="do not fit"):
        attach_store(handle, client, geometry=GEOMETRY)


def test_adjacent_blocks_are_merged_to_runs() -> None:
    source = np.array([3, 4, 5, 9, 10, 2, 1, 0])
    destination = np.array([7, 8, 9, 10, 11, 0, 1, 2])
    assert merge_runs(source, destination) == [Run(3, 7, 3), Run(9, 10, 2), Run(2, 0, 1), Run(1, 1, 1), Run(0, 2, 1)]
    runs, (rest_source, rest_destination) = split_runs(source, destination, 3)
    assert runs == [Run(3, 7, 3)]
    assert rest_source.tolist() == [9, 10, 2, 1, 0]
    assert rest_destination.tolist() == [10, 11, 0, 1, 2]
    assert merge_runs(source[:0], source[:0]) == []


@pytest.mark.parametrize("adjacent", [True, False])
def test_copied_blocks_arrive_and_no_others_change(adjacent: bool) -> None:
    source, destination = random_store("a", 200, seed=1), random_store("b", 300, seed=2)
    before = destination.blocks.copy()
    draw = random.Random(3)
    sources = list(range(20, 120)) if adjacent else draw.sample(range(200), 100)
    destinations = list(range(180, 280)) if adjacent else draw.sample(range(300), 100)
    channel = connect(source, destination)
    completion = channel.copy(sources, destinations)
    assert completion.wait(10)
    assert (destination.blocks[destinations] == source.blocks[sources]).all()
    untouched = np.setdiff1d(np.arange(300), destinations)
    assert (destination.blocks[untouched] == before[untouched]).all()
    counters = channel.counters()
    assert (counters.copies, counters.blocks, counters.bytes) == (1, 100, 100 * GEOMETRY.block_bytes)
    assert counters.busy_s > 0
    channel.close()


@pytest.mark.parametrize(
    ("held", "given"),
    [
        (WHOLE, StoreSlice(0, 4, 0, 3)),
        (StoreSlice(0, 4, 3, 6), WHOLE),
        (StoreSlice(0, 2, 0, 6), StoreSlice(0, 4, 2, 4)),
        (StoreSlice(1, 4, 0, 4), StoreSlice(0, 3, 2, 6)),
        (WHOLE, StoreSlice(2, 3, 0, 6)),
        (StoreSlice(0, 4, 0, 2), StoreSlice(0, 4, 0, 2)),
    ],
)
@pytest.mark.parametrize("one_layer", [False, True])
def test_stores_of_different_slices_exchange_their_intersection(
    held: StoreSlice, given: StoreSlice, one_layer: bool
) -> None:
    source, destination = random_store("a", 40, held, seed=1), random_store("b", 40, given, seed=2)
    expected = as_tokens(destination).copy()
    part = held.intersect(given)
    assert part is not None
    layers = (part.layer_end - 1, part.layer_end) if one_layer else None
    part = StoreSlice(*layers, part.head_begin, part.head_end) if layers else part
    sources = [*random.Random(3).sample(range(40), 8), 30, 31, 32, 33]
    destinations = [*random.Random(4).sample(range(20), 8), 20, 21, 22, 23]
    for layer in range(part.layer_begin, part.layer_end):
        for head in range(part.head_begin, part.head_end):
            there = (destinations, layer - given.layer_begin, head - given.head_begin)
            here = (sources, layer - held.layer_begin, head - held.head_begin)
            expected[there] = as_tokens(source)[here]
    channel = HostChannel(source, destination)
    channel.copy(sources, destinations, layers=layers).wait(10)
    assert (as_tokens(destination) == expected).all()
    assert channel.counters().bytes == len(sources) * 2 * 16 * 8 * 2 * part.shape[0] * part.shape[1]
    channel.close()


def test_stores_without_a_common_layer_and_head_refuse_each_other() -> None:
    with pytest.raises(TransferError, match="no layer and head in common"):
        HostChannel(random_store("a", 1, StoreSlice(0, 2, 0, 6)), random_store("b", 1, StoreSlice(2, 4, 0, 6)))


def test_wrong_ids_and_layers_are_refused_before_anything_moves() -> None:
    channel = HostChannel(random_store("a", 4), random_store("b", 4, StoreSlice(0, 2, 0, 6)))
    for sources, destinations, message in (
        ([4], [0], "has blocks 0 to 3, not"),
        ([0], [-1], "has blocks 0 to 3, not"),
        ([0, 1], [0], "cannot be copied to"),
        ([0, 1], [2, 2], "written twice"),
    ):
        with pytest.raises(TransferError, match=message):
            channel.copy(sources, destinations)
    with pytest.raises(TransferError, match="not in both stores"):
        channel.copy([0], [0], layers=(1, 3))
    assert channel.copy([], []).succeeded()
    channel.close()
    with pytest.raises(TransferError, match="closed"):
        channel.copy([0], [0])


def copy_in_another_process(source: StoreHandle, destination: StoreHandle, pipe: Connection) -> None:
    client = SegmentClient(source.agent_socket, "secret")
    channel = connect(
        attach_store(source, client, geometry=GEOMETRY), attach_store(destination, client, geometry=GEOMETRY)
    )
    pipe.send(channel.copy([0, 1, 2], [5, 6, 4]).wait(10))


def test_a_third_process_copies_between_stores_of_two_others(client: SegmentClient) -> None:
    source = HostBlockStore.create(client, "kv_pool-0", GEOMETRY, 8, front_bytes=100)
    destination = HostBlockStore.create(client, "prefill-0/batch", GEOMETRY, 8)
    source.blocks[:3] = np.random.default_rng(1).integers(0, 256, (3, GEOMETRY.block_bytes), np.uint8)
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=copy_in_another_process, args=(source.handle(), destination.handle(), theirs))
    child.start()
    assert ours.poll(20)
    assert ours.recv() is True
    child.join(10)
    assert (destination.blocks[[5, 6, 4]] == source.blocks[:3]).all()
    assert not destination.blocks[[0, 1, 2, 3, 7]].any()


def test_a_store_closed_during_a_copy_does_not_crash_it() -> None:
    source, destination = random_store("a", 8000), HostBlockStore.private("b", GEOMETRY, 8000)
    channel = HostChannel(source, destination)
    completion = channel.copy(range(8000), range(8000))
    source.close()
    destination.close()
    assert completion.wait(10)
    channel.close()


def handle(store_id: str, kind: str, node_id: str = "n", device: str = "cpu") -> StoreHandle:
    return StoreHandle(store_id, kind, GEOMETRY, WHOLE, 1, node_id, device=device)


def test_the_channel_follows_from_where_the_stores_are() -> None:
    host, first, second = handle("h", HOST), handle("c", CUDA, device="cuda:0"), handle("d", CUDA, device="cuda:1")
    assert choose_channel(host, handle("i", HOST)).name == "shared-memory"
    assert choose_channel(host, first).name == choose_channel(first, host).name == "pcie"
    assert choose_channel(first, first).name == "cuda-ipc"
    assert choose_channel(first, second, peer_access=lambda a, b: True).name == "cuda-ipc"


def test_links_are_ranked_by_how_often_a_copy_crosses_the_bus_and_between_nodes_by_what_can_copy() -> None:
    host, first, second = Place("n"), Place("n", "cuda:0"), Place("n", "cuda:1")

    def rank(ours: Place, theirs: Place, reach: bool = True) -> int:
        assert link_rank(ours, theirs, lambda a, b: reach) == link_rank(theirs, ours, lambda a, b: reach)
        return link_rank(ours, theirs, lambda a, b: reach)

    assert rank(host, host) == rank(first, first, reach=False) == rank(first, second) == 0
    assert 0 < rank(host, first) < rank(first, second, reach=False) < rank(first, Place("m", "cuda:1"))
    assert rank(first, Place("m", "cuda:0")) < rank(host, Place("m")) == rank(first, Place("m"))


def test_a_slow_channel_needs_permission() -> None:
    pair = handle("c", CUDA, device="cuda:0"), handle("d", CUDA, device="cuda:1")
    with pytest.raises(TransferError, match="allow_slow_channel"):
        choose_channel(*pair, peer_access=lambda a, b: False)
    choice = choose_channel(*pair, allow_slow=True, peer_access=lambda a, b: False)
    assert choice.slow
    assert choice.name == "cuda-staged"


def test_stores_on_different_nodes_are_refused_by_name() -> None:
    with pytest.raises(TransferError, match=r"stores a and b are on different nodes \(n, m\)"):
        choose_channel(handle("a", HOST), handle("b", HOST, "m"), allow_slow=True)


def test_a_copy_thread_ends_with_its_channel() -> None:
    channel = HostChannel(random_store("ending", 1), random_store("b", 1))
    assert any(thread.name == "copy-ending-b" for thread in threading.enumerate())
    channel.close()
    channel.close()
    assert not any(thread.name == "copy-ending-b" for thread in threading.enumerate())
