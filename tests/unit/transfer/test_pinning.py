"""Page-locking in the background with a pretended driver, and the first touch of shared memory."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

import numpy as np
import pytest

from alignedserve.control.samples import samples
from alignedserve.errors import TransferError
from alignedserve.geometry import KvGeometry
from alignedserve.metrics import Page
from alignedserve.transfer.block_store import HostBlockStore
from alignedserve.transfer.channel import PageLocked, wait_page_locked
from alignedserve.transfer.first_touch import FirstTouch, gpu_memory_nodes, place
from alignedserve.transfer.host_channel import HostChannel
from alignedserve.transfer.metrics import locking, show_channels
from alignedserve.transfer.pinning import MAX_PIECE_BYTES, Pinning
from alignedserve.transfer.segment import Segment, create_descriptor

GEOMETRY = KvGeometry("random", "bfloat16", layers=4, kv_heads=6, head_dim=8, block_size=16)


class Driver:
    """Records registrations, refuses them from the `limit`th on, and blocks while `open` is not set."""

    def __init__(self, limit: int = 100) -> None:
        self.limit = limit
        self.open = threading.Event()
        self.open.set()
        self.asked = threading.Event()
        self.registered: dict[int, int] = {}

    def register(self, address: int, count: int) -> int:
        self.asked.set()
        self.open.wait(10)
        if len(self.registered) == self.limit:
            return 2
        self.registered[address] = count
        return 0

    def unregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def host_store(capacity: int) -> HostBlockStore:
    return HostBlockStore.private("pool", GEOMETRY, capacity)


def test_host_memory_is_registered_once_in_pieces_and_given_up_by_the_last_user() -> None:
    driver = Driver()
    pinning = Pinning(driver.register, driver.unregister, piece_bytes=5 * GEOMETRY.block_bytes)
    store = host_store(10)
    pieces = pinning.piece_blocks(store)
    assert pieces * store.block_bytes % 4096 == 0
    pinned = pinning.pin(store)
    assert pinning.pin(store) is pinned
    assert pinned.wait(10)
    assert sorted(driver.registered) == [pinned.address + at * store.block_bytes for at in range(0, 10, pieces)]
    assert sum(driver.registered.values()) == store.as_memory().nbytes == pinned.locked_bytes
    pinning.unpin(pinned)
    assert driver.registered
    pinning.unpin(pinned)
    assert not driver.registered


def test_pinning_returns_at_once_and_locks_the_lowest_blocks_first() -> None:
    driver = Driver()
    driver.open.clear()
    touched: list[tuple[int, int]] = []

    def touch(address: int, count: int) -> None:
        touched.append((address, count))

    pinning = Pinning(driver.register, driver.unregister, touch=touch, piece_bytes=GEOMETRY.block_bytes)
    pinned = pinning.pin(host_store(4))
    assert driver.asked.wait(10)
    assert (pinned.locked_bytes, pinned.progress.total_bytes) == (0, 4 * GEOMETRY.block_bytes)
    assert touched == [(pinned.address, GEOMETRY.block_bytes)]
    driver.open.set()
    assert pinned.wait(10)
    assert list(driver.registered) == [pinned.address + at * GEOMETRY.block_bytes for at in range(4)]
    assert touched == list(driver.registered.items())


def test_what_is_given_up_while_it_is_being_registered_is_not_registered_any_further() -> None:
    driver = Driver()
    driver.open.clear()
    pinning = Pinning(driver.register, driver.unregister, piece_bytes=GEOMETRY.block_bytes)
    pinned = pinning.pin(host_store(100))
    assert driver.asked.wait(10)
    closing = threading.Thread(target=pinning.unpin, args=(pinned,))
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()  # a piece that is under way is waited for
    driver.open.set()
    closing.join(10)
    assert not driver.registered
    assert pinned.locked_bytes == 0
    assert pinned.error is None


def test_a_failed_registration_says_so_and_keeps_what_is_locked_until_the_last_user_lets_go() -> None:
    driver = Driver(limit=1)
    pinning = Pinning(driver.register, driver.unregister, piece_bytes=GEOMETRY.block_bytes)
    pinned = pinning.pin(host_store(10))
    assert pinned.wait(10)
    assert "could not lock" in str(pinned.error)
    assert "cluster.allow_slow_channel" in str(pinned.error)
    assert pinned.locked_bytes == sum(driver.registered.values()) == GEOMETRY.block_bytes
    pinning.unpin(pinned)
    assert not driver.registered


def test_no_piece_is_over_64_gib() -> None:
    pinning = Pinning(lambda address, count: 0, lambda address: 0, piece_bytes=1 << 40)
    store = host_store(1)
    assert 0 <= MAX_PIECE_BYTES - pinning.piece_blocks(store) * store.block_bytes < store.block_bytes


class Locking(HostChannel):
    """A channel that reports how far its destination is page-locked."""

    def __init__(self, locked: int) -> None:
        self._locked, self.ended = locked, False
        super().__init__(host_store(2), host_store(2))

    def page_locked(self) -> PageLocked:
        return PageLocked("pool", self._locked, 4 << 30, self.ended)


def test_progress_is_in_metrics_once_a_store_and_in_words_until_it_ends() -> None:
    channels = [Locking(1 << 30), Locking(1 << 30)]
    page = Page(instance="prefill-0")
    show_channels(page, channels)
    for name, size in ("locked", 1 << 30), ("lockable", 4 << 30):
        (found,) = samples(page.text(), f"alignedserve_page_{name}_bytes")
        assert (found.labels, found.value) == ({"store": "pool", "instance": "prefill-0"}, size)
    assert locking(channels) == "; pool: 1.00 GiB of 4.00 GiB locked"
    assert locking([Locking(4 << 30)]) == ""
    for channel in channels:
        channel.close()


def test_waiting_for_the_locking_ends_with_it_or_with_its_time() -> None:
    channel = Locking(1 << 30)
    with pytest.raises(TransferError, match=r"not page-locked within 0\.05 s"):
        wait_page_locked(channel, 0.05)
    channel.ended = True
    wait_page_locked(channel, 0.05)
    channel.close()


def test_touching_makes_every_page_resident_and_changes_no_byte() -> None:
    segment = Segment("pool", create_descriptor("pool", 64 * mmap.PAGESIZE))
    memory = np.frombuffer(segment.memory(), np.uint8)
    memory[5 * mmap.PAGESIZE : 6 * mmap.PAGESIZE] = 7
    before = segment.resident_bytes
    assert before < segment.size_bytes
    FirstTouch(nodes=[], threads=3)(memory.ctypes.data, memory.nbytes)
    assert segment.resident_bytes == segment.size_bytes
    assert (int(memory.sum()), int(memory[5 * mmap.PAGESIZE])) == (7 * mmap.PAGESIZE, 7)


def gpu(sysfs: Path, address: str, node: int, *, vendor: str = "0x10de", kind: str = "0x030200") -> None:
    folder = sysfs / "bus/pci/devices" / address
    folder.mkdir(parents=True)
    for name, text in (("vendor", vendor), ("class", kind), ("numa_node", str(node))):
        (folder / name).write_text(f"{text}\n")


def test_the_gpus_nodes_are_read_where_there_are_several(tmp_path: Path) -> None:
    for node in range(4):
        (tmp_path / f"devices/system/node/node{node}").mkdir(parents=True)
    gpu(tmp_path, "0000:17:00.0", 3)
    gpu(tmp_path, "0000:18:00.0", 1)
    gpu(tmp_path, "0000:18:00.1", 2, kind="0x040300")  # a GPU's audio
    gpu(tmp_path, "0000:19:00.0", 0, vendor="0x8086")
    gpu(tmp_path, "0000:1a:00.0", -1)
    assert gpu_memory_nodes(tmp_path) == [1, 3]
    for node in (1, 2, 3):
        (tmp_path / f"devices/system/node/node{node}").rmdir()
    assert gpu_memory_nodes(tmp_path) == []


def test_memory_is_placed_or_the_kernel_says_why_not(caplog: pytest.LogCaptureFixture) -> None:
    area = mmap.mmap(-1, 8 * mmap.PAGESIZE)
    address = np.frombuffer(area, np.uint8).ctypes.data
    assert place(address, 8 * mmap.PAGESIZE, [0]) or "mbind" in caplog.text
    assert not place(address, 8 * mmap.PAGESIZE, [1000])
    assert "NUMA nodes [1000]" in caplog.text
