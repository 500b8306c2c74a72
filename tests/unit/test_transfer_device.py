"""Device stores with tensors on the CPU, pinning with a pretended driver, and (marked gpu) the real thing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from alignedserve.errors import GeometryMismatchError, TransferError  # noqa: E402
from alignedserve.geometry import KvGeometry, StoreSlice  # noqa: E402
from alignedserve.transfer.block_store import HostBlockStore  # noqa: E402
from alignedserve.transfer.device import (  # noqa: E402
    DeviceBlockStore,
    DeviceChannel,
    _within_pieces,
    attach_device_store,
    reached_devices,
)
from alignedserve.transfer.handles import HOST  # noqa: E402
from alignedserve.transfer.links import connect  # noqa: E402
from alignedserve.transfer.pinning import Pinning  # noqa: E402
from alignedserve.transfer.runs import Run  # noqa: E402

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


class Driver:
    """Remembers what is registered; refuses from the `limit`th registration on."""

    def __init__(self, limit: int = 100) -> None:
        self.limit = limit
        self.registered: dict[int, int] = {}

    def register(self, address: int, count: int) -> int:
        if len(self.registered) == self.limit:
            return 2
        self.registered[address] = count
        return 0

    def unregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def test_host_memory_is_registered_once_in_pieces_and_given_up_by_the_last_user() -> None:
    driver = Driver()
    pinning = Pinning(driver.register, driver.unregister, max_piece_bytes=5 * GEOMETRY.block_bytes)
    store = host_store("pool", 10)
    pieces = pinning.piece_blocks(store)
    assert pieces * store.block_bytes % 4096 == 0
    address = pinning.pin(store)
    assert pinning.pin(store) == address
    assert sorted(driver.registered) == [address + at * store.block_bytes for at in range(0, 10, pieces)]
    assert sum(driver.registered.values()) == store.as_memory().nbytes
    pinning.unpin(address)
    assert driver.registered
    pinning.unpin(address)
    assert not driver.registered


def test_a_failed_registration_gives_back_its_first_pieces() -> None:
    driver = Driver(limit=1)
    pinning = Pinning(driver.register, driver.unregister, max_piece_bytes=GEOMETRY.block_bytes)
    with pytest.raises(TransferError, match="could not lock"):
        pinning.pin(host_store("pool", 10))
    assert not driver.registered


def test_no_copy_crosses_a_registered_piece() -> None:
    cut = list(_within_pieces(Run(3, 18, 10), 4, 10))
    assert cut == [Run(3, 18, 1), Run(4, 19, 1), Run(5, 20, 3), Run(8, 23, 4), Run(12, 27, 1)]
    assert list(_within_pieces(Run(3, 18, 10), None, None)) == [Run(3, 18, 10)]


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
def test_a_copy_waits_for_what_computes_its_source() -> None:
    cache, host = device_store("cache", 64, "cuda:0"), host_store("pool", 64)
    channel = connect(cache, host)
    torch.cuda._sleep(200_000_000)
    cache.blocks.fill_(7)
    assert channel.copy(range(64), range(64)).wait(30)
    assert bool((host_bytes(host) == 7).all())
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
