"""Device stores and channels with tensors on the CPU, and (marked gpu) on a GPU."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from alignedserve.errors import GeometryMismatchError, TransferError
from alignedserve.geometry import KvGeometry, StoreSlice
from alignedserve.transfer.block_store import HostBlockStore
from alignedserve.transfer.device import (
    DeviceBlockStore,
    DeviceChannel,
    attach_device_store,
    compile_copies,
    reached_devices,
)
from alignedserve.transfer.handles import HOST
from alignedserve.transfer.links import connect
from alignedserve.transfer.pieces import within_pieces
from alignedserve.transfer.runs import Run

GEOMETRY = KvGeometry("random", "bfloat16", layers=4, kv_heads=6, head_dim=8, block_size=16)
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def device_store(store_id: str, capacity: int, device: str = "cpu", part: StoreSlice | None = None) -> DeviceBlockStore:
    part = part or StoreSlice.whole(GEOMETRY)
    tensor = torch.randn(capacity, *part.shape, 2, 16, 8, device=device).to(torch.bfloat16)
    return DeviceBlockStore(store_id, GEOMETRY, tensor, part=part)


def host_store(store_id: str, capacity: int) -> HostBlockStore:
    store = HostBlockStore.private(store_id, GEOMETRY, capacity)
    torch.frombuffer(store.as_memory(), dtype=torch.uint8).random_()
    return store


def host_bytes(store: HostBlockStore) -> torch.Tensor:
    return torch.frombuffer(store.as_memory(), dtype=torch.uint8).view(store.capacity_blocks, -1)


def test_a_store_over_the_engines_tensor_shares_its_memory() -> None:
    tensor = torch.zeros(3, 4, 6, 2, 16, 8, dtype=torch.bfloat16)
    store = DeviceBlockStore("cache", GEOMETRY, tensor, node_id="n")
    store.blocks[1].fill_(1)
    assert bool((tensor[1].view(torch.uint8) == 1).all())
    assert not bool(tensor[0].any())
    assert store.blocks.shape == (3, GEOMETRY.block_bytes)
    assert (store.handle().kind, store.device) == (HOST, "cpu")


def test_a_block_is_read_alike_on_device_and_host() -> None:
    device, host = device_store("cache", 3), host_store("pool", 3)
    channel = DeviceChannel(device, host, "pcie")
    channel.copy([2], [1]).wait(10)
    assert device.read_block(2) == host.read_block(1)
    assert host.read_block(1).nbytes == GEOMETRY.block_bytes
    assert device.read_block(1) != host.read_block(1)
    channel.close()


def test_a_tensor_of_another_shape_or_order_is_refused() -> None:
    with pytest.raises(TransferError, match="in the geometry"):
        DeviceBlockStore("cache", GEOMETRY, torch.zeros(3, 4, 6, 2, 16, 9, dtype=torch.bfloat16))
    with pytest.raises(TransferError, match="contiguous"):
        DeviceBlockStore("cache", GEOMETRY, torch.zeros(4, 3, 6, 2, 16, 8, dtype=torch.bfloat16).transpose(0, 1))


def check_there_and_back(device: str) -> None:
    host, cache = host_store("pool", 50), device_store("cache", 40, device)
    before = cache.blocks.cpu()
    draw = random.Random(1)
    sources, destinations = draw.sample(range(50), 20), draw.sample(range(40), 20)
    pull, push = connect(host, cache), connect(cache, host)
    assert isinstance(pull, DeviceChannel)
    assert pull.copy(sources, destinations).wait(10)
    after = cache.blocks.cpu()
    assert torch.equal(after[destinations], host_bytes(host)[sources])
    others = [block for block in range(40) if block not in destinations]
    assert torch.equal(after[others], before[others])
    assert push.copy(range(5, 25), range(10, 30)).wait(10)
    assert torch.equal(host_bytes(host)[10:30], after[5:25])
    assert pull.counters().bytes == 20 * GEOMETRY.block_bytes
    pull.close()
    push.close()


def test_blocks_go_to_a_device_store_and_back() -> None:
    check_there_and_back("cpu")


def test_slices_and_layers_of_device_stores_are_cut_out() -> None:
    held, given = StoreSlice(1, 4, 0, 4), StoreSlice(0, 3, 2, 6)
    source, destination = device_store("a", 10, part=held), device_store("b", 10, part=given)
    here, there = (
        store.blocks.view(torch.bfloat16).view(10, *store.slice.shape, 2, 16, 8) for store in (source, destination)
    )
    expected = there.clone()
    expected[[7, 2, 3], 2:3, 0:2] = here[[1, 5, 6], 1:2, 2:4]
    channel = DeviceChannel(source, destination, "test")
    assert channel.copy([1, 5, 6], [7, 2, 3], layers=(2, 3)).wait(10)
    assert torch.equal(there, expected)
    expected[[7, 2, 3], 1:3, 0:2] = here[[1, 5, 6], 0:2, 2:4]
    assert channel.copy([1, 5, 6], [7, 2, 3]).wait(10)
    assert torch.equal(there, expected)
    channel.close()


def test_a_store_that_is_not_shared_is_not_attached() -> None:
    store = device_store("a", 2)
    with pytest.raises(TransferError, match="not shared device memory"):
        attach_device_store(store.handle(), geometry=GEOMETRY)
    with pytest.raises(GeometryMismatchError):
        attach_device_store(store.handle(), geometry=KvGeometry("x", "float32", 1, 1, 1, 1))


def test_no_copy_crosses_a_registered_piece() -> None:
    cut = list(within_pieces(Run(3, 18, 10), 4, 10))
    assert cut == [Run(3, 18, 1), Run(4, 19, 1), Run(5, 20, 3), Run(8, 23, 4), Run(12, 27, 1)]
    assert list(within_pieces(Run(3, 18, 10), None, None)) == [Run(3, 18, 10)]


def test_a_device_reaches_itself_and_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def can_access(device: torch.device, peer: torch.device) -> bool:
        if device == peer:
            raise AssertionError("the driver is not asked about one device")
        return (device.index, peer.index) == (1, 3)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", can_access)
    assert reached_devices("cuda:1") == ["cuda:1", "cuda:3"]
    assert reached_devices("cuda:0") == ["cuda:0"]
    assert reached_devices("cpu") == []


@gpu
@needs_gpu
def test_a_gpu_reaches_itself() -> None:
    assert "cuda:0" in reached_devices("cuda:0")


@gpu
@needs_gpu
def test_blocks_go_to_a_gpu_and_back() -> None:
    check_there_and_back("cuda:0")


@gpu
@needs_gpu
def test_what_copies_within_a_gpu_is_compiled_ahead_and_leaves_the_store_as_it_is() -> None:
    cache = device_store("cache", 4, "cuda:0")
    before = cache.blocks.clone()
    compile_copies(cache)
    assert torch.equal(cache.blocks, before)


@gpu
@needs_gpu
def test_a_copy_waits_for_what_computes_its_source() -> None:
    cache, host = device_store("cache", 64, "cuda:0"), host_store("pool", 64)
    channel = connect(cache, host)
    torch.cuda._sleep(200_000_000)
    cache.blocks.fill_(7)
    assert channel.copy(range(64), range(64)).wait(30)
    assert bool((host_bytes(host) == 7).all())
    channel.close()


@gpu
@needs_gpu
def test_a_copy_of_what_nothing_computes_waits_for_no_pass() -> None:
    buffer, host = device_store("buffer", 64, "cuda:0"), host_store("pool", 64)
    channel = connect(host, buffer, computed=False)
    channel.copy([0], [0]).wait(30)  # behind what made the store
    torch.cuda._sleep(2_000_000_000)
    assert channel.copy(range(64), range(64)).wait(30)
    assert not torch.cuda.current_stream().query()
    assert torch.equal(buffer.blocks.cpu(), host_bytes(host))
    channel.close()


@gpu
@needs_gpu
@pytest.mark.parametrize("locked", [False, True])
def test_layers_of_scattered_blocks_go_to_a_gpu_and_back(locked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, host = device_store("cache", 64, "cuda:0"), host_store("pool", 64)
    push = DeviceChannel(cache, host, "pcie")
    pull = DeviceChannel(host, cache, "pcie")
    assert push._pinned[1] is not None
    assert push._pinned[1].wait(30)
    assert push.trouble() is None
    if not locked:
        monkeypatch.setattr(type(push._pinned[1]), "locked_bytes", 0)  # all goes through the bounce
    targets = random.Random(2).sample(range(64), 40)
    expected = host_bytes(host).clone()
    layer = GEOMETRY.block_bytes // 4
    expected[targets, layer : 3 * layer] = cache.blocks.cpu()[:40, layer : 3 * layer]
    push.copy(range(40), targets, layers=(1, 3)).wait(30)
    assert torch.equal(host_bytes(host), expected)
    pull.copy(range(64), range(63, -1, -1)).wait(30)
    assert torch.equal(cache.blocks.cpu(), expected.flip(0))
    push.close()
    pull.close()


@gpu
@needs_gpu
@pytest.mark.parametrize("layers", [None, (1, 2)])
def test_scattered_blocks_move_within_a_gpu(layers: tuple[int, int] | None) -> None:
    source, destination = device_store("a", 300, "cuda:0"), device_store("b", 300, "cuda:0")
    draw = random.Random(3)
    ids = draw.sample(range(300), 200), draw.sample(range(300), 200)
    begin, end = (GEOMETRY.block_bytes // 4 * layer for layer in layers or (0, 4))
    expected = destination.blocks.clone()
    expected[ids[1], begin:end] = source.blocks[ids[0], begin:end]
    channel = DeviceChannel(source, destination, "cuda-ipc")
    channel.copy(*ids, layers=layers).wait(30)
    assert torch.equal(destination.blocks, expected)
    channel.close()


def share_and_die(path: str) -> None:
    import os
    import signal
    import time

    tensor = torch.full((4, 4, 6, 2, 16, 8), 3.0, device="cuda:0", dtype=torch.bfloat16)
    store = DeviceBlockStore("prefill-0/batch", GEOMETRY, tensor, shared=True)
    torch.cuda.synchronize()
    Path(path).with_suffix(".part").write_bytes(store.handle().to_proto().SerializeToString())
    Path(path).with_suffix(".part").rename(path)
    while not Path(path).with_suffix(".opened").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


@gpu
@needs_gpu
def test_the_death_of_a_peer_neither_hangs_nor_corrupts_a_copy(tmp_path: Path) -> None:
    """The driver keeps the memory as long as this process has it open."""
    import multiprocessing
    import time

    from alignedserve.proto import common_pb2
    from alignedserve.transfer.handles import StoreHandle

    path = tmp_path / "handle"
    child = multiprocessing.get_context("spawn").Process(target=share_and_die, args=(str(path),))
    child.start()
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    handle = StoreHandle.from_proto(common_pb2.StoreHandle.FromString(path.read_bytes()))
    store = attach_device_store(handle, geometry=GEOMETRY)
    cache = device_store("cache", 4, "cuda:0")
    channel = connect(store, cache)
    path.with_suffix(".opened").touch()
    child.join(60)
    assert child.exitcode == -9
    channel.copy(range(4), range(4)).wait(30)
    assert bool((cache.blocks.view(torch.bfloat16) == 3).all())
    channel.close()


def read_shared(path: str, handle_bytes: bytes) -> None:
    from alignedserve.proto import common_pb2
    from alignedserve.transfer.handles import StoreHandle

    message = common_pb2.StoreHandle.FromString(handle_bytes)
    store = attach_device_store(StoreHandle.from_proto(message), geometry=GEOMETRY)
    Path(path).write_bytes(bytes(store.blocks[2].cpu().numpy()))
    store.blocks[1].fill_(9)
    torch.cuda.synchronize()


@gpu
@needs_gpu
def test_another_process_opens_a_shared_device_store(tmp_path: Path) -> None:
    import multiprocessing

    tensor = torch.randn(4, 4, 6, 2, 16, 8, device="cuda:0").to(torch.bfloat16)
    store = DeviceBlockStore("prefill-0/batch", GEOMETRY, tensor, shared=True)
    path = tmp_path / "read"
    child = multiprocessing.get_context("spawn").Process(
        target=read_shared, args=(str(path), store.handle().to_proto().SerializeToString())
    )
    child.start()
    child.join(60)
    assert path.read_bytes() == bytes(store.blocks[2].cpu().numpy())
    assert bool((store.blocks[1] == 9).all())
