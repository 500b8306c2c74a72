"""How a device channel moves blocks: the kernel in Triton's interpreter, batches with a pretended runtime, bounces."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from alignedserve.errors import TransferError
from alignedserve.geometry import KvGeometry, StoreSlice
from alignedserve.transfer import block_kernel
from alignedserve.transfer import device as device_module
from alignedserve.transfer.batched import BatchedCopies
from alignedserve.transfer.block_store import HostBlockStore
from alignedserve.transfer.bounce import BOUNCE_BYTES, SLOTS, Bounce
from alignedserve.transfer.completion import Completion
from alignedserve.transfer.device import DeviceBlockStore, DeviceChannel
from alignedserve.transfer.pieces import Pieces, pieces_of
from alignedserve.transfer.runs import Cut, common_part, paired_cuts

GEOMETRY = KvGeometry("random", "bfloat16", layers=4, kv_heads=6, head_dim=8, block_size=16)
LAYER_BYTES = GEOMETRY.block_bytes // 4


def device_store(store_id: str, capacity: int, part: StoreSlice | None = None) -> DeviceBlockStore:
    part = part or StoreSlice.whole(GEOMETRY)
    tensor = torch.randn(capacity, *part.shape, 2, 16, 8).to(torch.bfloat16)
    return DeviceBlockStore(store_id, GEOMETRY, tensor, part=part)


def pieces(*triples: tuple[int, int, int]) -> Pieces:
    table = np.array(triples, dtype=np.int64).reshape(-1, 3)
    return Pieces(table[:, 0], table[:, 1], table[:, 2])


def test_adjacent_whole_blocks_are_one_piece_within_a_registration() -> None:
    whole = Cut(0, 1, 100, 100)
    ids = np.array([7, 8, 9, 10, 2]), np.array([0, 1, 2, 3, 9])
    found = pieces_of(ids, (whole, whole), (100, 100), (None, None))
    assert list(found.triples()) == [(700, 0, 400), (200, 900, 100)]
    found = pieces_of(ids, (whole, whole), (100, 100), (None, 3))
    assert list(found.triples()) == [(700, 0, 300), (1000, 300, 100), (200, 900, 100)]


def test_parts_of_blocks_are_a_piece_a_row() -> None:
    ids = np.array([7, 8]), np.array([3, 5])
    layer = Cut(20, 1, 40, 40)
    assert list(pieces_of(ids, (layer, layer), (100, 200)).triples()) == [(720, 620, 40), (820, 1020, 40)]
    heads = Cut(10, 2, 50, 20), Cut(0, 2, 20, 20)
    assert list(pieces_of(ids, heads, (100, 40)).triples()) == [
        (710, 120, 20),
        (760, 140, 20),
        (810, 200, 20),
        (860, 220, 20),
    ]


@pytest.mark.parametrize(
    ("held", "given", "part"),
    [
        (StoreSlice(0, 4, 0, 6), StoreSlice(0, 4, 0, 6), StoreSlice(0, 4, 0, 6)),
        (StoreSlice(0, 4, 0, 6), StoreSlice(0, 4, 0, 6), StoreSlice(1, 3, 0, 6)),
        (StoreSlice(1, 4, 0, 4), StoreSlice(0, 3, 2, 6), StoreSlice(1, 3, 2, 4)),
    ],
)
def test_the_kernel_moves_what_was_asked_for_and_nothing_else(
    held: StoreSlice, given: StoreSlice, part: StoreSlice
) -> None:
    source, destination = device_store("a", 9, held), device_store("b", 8, given)
    ids = np.array([8, 0, 3, 4, 6]), np.array([1, 7, 2, 6, 0])
    cuts = paired_cuts(source, destination, part)
    assert block_kernel.serves(cuts, (source.block_bytes, destination.block_bytes))
    expected = destination.blocks.clone()
    for begin, target, size in pieces_of(ids, cuts, (source.block_bytes, destination.block_bytes)).triples():
        expected.view(-1)[target : target + size] = source.blocks.view(-1)[begin : begin + size]
    block_kernel.copy_blocks(source.blocks, destination.blocks, ids, cuts, programs=3)
    assert torch.equal(destination.blocks, expected)


@pytest.mark.parametrize("head_dim", [8, 3], ids=["words", "bytes"])
def test_parts_of_blocks_go_between_devices_in_few_copies(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As between two GPUs: rows of 8 bytes, or of bytes where these do not divide them."""
    geometry = replace(GEOMETRY, head_dim=head_dim, block_size=1)

    def store(name: str, capacity: int, part: StoreSlice) -> DeviceBlockStore:
        tensor = torch.randint(0, 99, (capacity, *part.shape, 2, 1, head_dim), dtype=torch.int16)
        return DeviceBlockStore(name, geometry, tensor.view(torch.bfloat16), part=part)

    source, destination = store("a", 9, StoreSlice(0, 4, 0, 4)), store("b", 8, StoreSlice(1, 3, 2, 5))
    part = common_part(source, destination)
    ids, cuts = (np.array([8, 0, 3, 4, 6]), np.array([1, 7, 2, 6, 0])), paired_cuts(source, destination, part)
    expected = destination.blocks.clone()
    for begin, target, size in pieces_of(ids, cuts, (source.block_bytes, destination.block_bytes)).triples():
        expected.view(-1)[target : target + size] = source.blocks.view(-1)[begin : begin + size]
    monkeypatch.setattr(device_module, "STAGED_BYTES", 2 * cuts[0].total_bytes)
    portions: list[int] = []
    device_module.copy_staged((source.blocks, destination.blocks), ids, cuts, lambda: portions.append(1))
    assert torch.equal(destination.blocks, expected)
    assert len(portions) == 3


def test_the_kernel_refuses_what_does_not_lie_in_whole_units() -> None:
    whole = Cut(0, 1, 64, 64)
    assert block_kernel.serves((whole, whole), (64, 64))
    assert not block_kernel.serves((whole, Cut(8, 1, 64, 64)), (64, 128))
    assert not block_kernel.serves((whole, whole), (64, 72))


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from alignedserve.transfer.block_kernel import copy_rows as kernel
names = kernel.arg_names
pointers = {"source": "*i64", "destination": "*i64", "ids": "*i64"}
aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in pointers}
for ones in ({}, {"rows": 1}):  # arguments that are 1 are constants of their own
    constants = {"CHUNK": 4096, **ones}
    signature = dict.fromkeys(names, "i32") | pointers | dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 32}).asm["ptx"])
"""


def test_the_kernel_compiles_for_a_gpu_and_moves_16_bytes_a_thread() -> None:
    """In its own process: the interpreter changes Triton's language for the whole process."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    ptx = subprocess.run([sys.executable, "-c", COMPILE], env=environment, check=True, capture_output=True, text=True)
    for access in ("ld.global", "st.global"):
        wide = [line for line in ptx.stdout.splitlines() if access in line and ".v2.b64" in line]
        assert len(wide) == 2 * 4  # 64 KiB by 1024 threads


class Runtime:
    """Does at once what CUDA would do in stream order, and returns `code`; `extra`: additional results of CUDA 12."""

    cudaMemcpySrcAccessOrder = SimpleNamespace(cudaMemcpySrcAccessOrderStream=1)  # noqa: N815

    def __init__(self, code: int = 0, extra: tuple[int, ...] = ()) -> None:
        self.code, self.extra = code, extra
        self.calls: list[int] = []
        self.order: Any = None

    def cudaMemcpyAttributes(self) -> SimpleNamespace:
        return SimpleNamespace(srcAccessOrder=0)

    def cudaSetDevice(self, device: int) -> tuple[int]:
        return (0,)

    def cudaMemcpyBatchAsync(
        self,
        destinations: list[int],
        sources: list[int],
        sizes: list[int],
        count: int,
        attributes: list[Any],
        attribute_indices: list[int],
        attribute_count: int,
        stream: int,
    ) -> tuple[int, ...]:
        assert len(destinations) == len(sources) == len(sizes) == count
        assert (attribute_indices, attribute_count, len(attributes)) == ([0], 1, 1)
        self.calls.append(count)
        self.order = attributes[0].srcAccessOrder
        if not self.code:
            for target, begin, size in zip(destinations, sources, sizes, strict=True):
                ctypes.memmove(target, begin, size)
        return (self.code, *self.extra)


def test_a_batch_is_one_call_with_addresses_of_both_stores() -> None:
    source, destination = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    runtime = Runtime(extra=(2**64 - 1,))
    copies = BatchedCopies(runtime)
    assert copies.issue(pieces((10, 0, 5), (50, 90, 10)), source.data_ptr(), destination.data_ptr(), 0, 7)
    assert (runtime.calls, runtime.order) == ([2], 1)
    assert destination[:5].tolist() == [10, 11, 12, 13, 14]
    assert destination[90:].tolist() == list(range(50, 60))
    assert not destination[5:90].any()


def test_a_driver_that_has_no_batches_is_asked_once_and_an_error_is_raised() -> None:
    runtime = Runtime(code=36)
    copies = BatchedCopies(runtime)
    assert not copies.issue(pieces((0, 0, 1)), 0, 0, 0, 7)
    assert not copies.issue(pieces((0, 0, 1)), 0, 0, 0, 7)
    assert runtime.calls == [1]
    with pytest.raises(TransferError, match="refused a copy"):
        BatchedCopies(Runtime(code=1)).issue(pieces((0, 0, 1)), 0, 0, 0, 7)


def test_the_bindings_have_what_batches_need() -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime", reason="comes with the extra `gpu`")
    assert callable(runtime.cudaMemcpyBatchAsync)
    assert BatchedCopies(runtime).supported


def test_the_bounce_moves_pieces_larger_than_its_slots() -> None:
    size = BOUNCE_BYTES // SLOTS
    source = torch.randint(0, 256, (3 * size,), dtype=torch.uint8)
    destination = torch.zeros(3 * size, dtype=torch.uint8)
    asked = []
    bounce = Bounce(pin_memory=False)
    bounce.copy(source, destination, pieces((5, 9, 2 * size + 3), (0, 0, 4)), None, lambda: asked.append(1))
    assert torch.equal(destination[9 : 9 + 2 * size + 3], source[5 : 5 + 2 * size + 3])
    assert torch.equal(destination[:4], source[:4])
    assert not destination[4:9].any()
    assert len(asked) == 4


class HalfLocked:
    """A registration that has reached the middle of the store."""

    piece_blocks, error = 4, TransferError("could not lock")

    def __init__(self, store: HostBlockStore) -> None:
        self.locked_bytes = store.as_memory().nbytes // 2


@pytest.mark.parametrize("layers", [None, (1, 3)])
def test_what_is_not_locked_yet_goes_through_the_bounce(
    monkeypatch: pytest.MonkeyPatch, layers: tuple[int, int] | None
) -> None:
    cache = device_store("cache", 16)
    host = HostBlockStore.private("pool", GEOMETRY, 16)
    channel = DeviceChannel(cache, host, "pcie")
    bounce, bounced = Bounce(pin_memory=False), []

    class Spy:
        def copy(self, source: Any, destination: Any, unlocked: Pieces, stream: Any, wanted: Any) -> None:
            bounced.extend(unlocked.triples())
            bounce.copy(source, destination, unlocked, stream, wanted)

    monkeypatch.setattr(device_module, "_bounce", Spy)
    half: Any = HalfLocked(host)
    channel._pinned = [None, half]
    targets = [6, 7, 8, 9, 15, 0]
    channel.copy([0, 1, 2, 3, 4, 5], targets, layers=layers).wait(10)
    begin, end = (LAYER_BYTES * layer for layer in layers or (0, 4))
    written = torch.from_numpy(host.blocks)
    assert torch.equal(written[targets][:, begin:end], cache.blocks[:6][:, begin:end])
    assert int(written.any(dim=1).sum()) == 6
    assert sum(size for _, _, size in bounced) == 3 * (end - begin)
    assert min(target for _, target, _ in bounced) >= half.locked_bytes
    assert channel.trouble() is half.error
    channel._pinned = [None, None]
    channel.close()


def test_a_channel_that_may_be_slow_is_no_trouble() -> None:
    host = HostBlockStore.private("pool", GEOMETRY, 4)
    channel = DeviceChannel(device_store("cache", 4), host, "pcie", allow_pageable=True)
    half: Any = HalfLocked(host)
    channel._pinned = [None, half]
    assert channel.trouble() is None
    channel._pinned = [None, None]
    assert channel.page_locked() is None
    channel.close()


def test_a_cancelled_copy_ends_between_pieces() -> None:
    channel = DeviceChannel(device_store("a", 4), device_store("b", 4), "test")
    ended = Completion()
    ended.cancel()
    copy: Any = SimpleNamespace(completion=ended)
    with pytest.raises(TransferError, match="cancelled"):
        channel._copy_pieces(copy, pieces((0, 0, 8)))
    channel.close()


def test_memory_in_an_expandable_segment_is_not_shared() -> None:
    from alignedserve.transfer.cuda_ipc import _require_plain

    tensor = torch.zeros(64, dtype=torch.uint8)
    there: dict[str, Any] = {"address": tensor.data_ptr() - 32, "total_size": 1024, "is_expandable": True}
    with pytest.raises(TransferError, match="expandable_segments"):
        _require_plain(tensor, [there])
    _require_plain(tensor, [there | {"is_expandable": False}, there | {"address": tensor.data_ptr() + 64}])
