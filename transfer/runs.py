"""The contents of a copy: runs of adjacent blocks, and the cut that both stores hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from alignedserve.errors import TransferError
from alignedserve.geometry import KvGeometry, StoreSlice
from alignedserve.transfer.block_store import BlockStore
from alignedserve.transfer.handles import slice_block_bytes

IdArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Run:
    """`count` blocks that are adjacent in both stores: one large copy."""

    source: int
    destination: int
    count: int


def merge_runs(source_ids: IdArray, destination_ids: IdArray) -> list[Run]:
    """The fewest runs that move block `source_ids[i]` to block `destination_ids[i]`, in order."""
    return split_runs(source_ids, destination_ids, 1)[0]


def split_runs(
    source_ids: IdArray, destination_ids: IdArray, shortest: int
) -> tuple[list[Run], tuple[IdArray, IdArray]]:
    """The merged runs of at least `shortest` blocks; and the ids, on both sides, of all blocks in shorter ones."""
    if not source_ids.size:
        return [], (source_ids, destination_ids)
    first = np.ones(source_ids.size, dtype=bool)
    first[1:] = (np.diff(source_ids) != 1) | (np.diff(destination_ids) != 1)
    starts = np.flatnonzero(first)
    counts = np.diff(starts, append=source_ids.size)
    long = counts >= shortest
    begins = starts[long]
    runs = [
        Run(source, destination, count)
        for source, destination, count in zip(
            source_ids[begins].tolist(), destination_ids[begins].tolist(), counts[long].tolist(), strict=True
        )
    ]
    rest = ~np.repeat(long, counts)
    return runs, (source_ids[rest], destination_ids[rest])


def check_ids(ids: Sequence[int], store: BlockStore, *, distinct: bool) -> IdArray:
    """`ids` as an array. Raises TransferError if an id is not a block of `store`, or (`distinct`) is repeated."""
    array = np.asarray(ids, dtype=np.int64)
    if array.ndim != 1:
        raise TransferError(f"store {store.store_id}: block ids must be a flat sequence", store_id=store.store_id)
    outside = (array < 0) | (array >= store.capacity_blocks)
    if outside.any():
        wrong = array[outside][:5].tolist()
        raise TransferError(
            f"store {store.store_id} has blocks 0 to {store.capacity_blocks - 1}, not {wrong}", store_id=store.store_id
        )
    if distinct and np.unique(array).size != array.size:
        raise TransferError(f"store {store.store_id}: a block is written twice by one copy", store_id=store.store_id)
    return array


@dataclass(frozen=True, slots=True)
class Cut:
    """The place of a part in every block of one store.

    In bytes of a block: `rows` rows of `width_bytes`, every `stride_bytes`, the first at `begin_bytes`.
    """

    begin_bytes: int
    rows: int
    stride_bytes: int
    width_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.rows * self.width_bytes

    def flat(self) -> Cut:
        """The same cut as one row, if the rows are adjacent. Raises ValueError if not."""
        if self.rows > 1 and self.width_bytes != self.stride_bytes:
            raise ValueError("the rows of this cut are not adjacent")
        return Cut(self.begin_bytes, 1, self.total_bytes, self.total_bytes)


def common_part(source: BlockStore, destination: BlockStore) -> StoreSlice:
    """The layers and heads that both stores hold.

    Raises GeometryMismatchError, naming both, if they hold different models' blocks; TransferError if they have nothing
    in common.
    """
    source.geometry.require_same(destination.geometry)
    part = source.slice.intersect(destination.slice)
    if part is None:
        raise TransferError(
            f"stores {source.store_id} ({source.slice}) and {destination.store_id} ({destination.slice}) have no layer "
            "and head in common",
            source=source.store_id,
            destination=destination.store_id,
        )
    return part


def paired_cuts(source: BlockStore, destination: BlockStore, part: StoreSlice) -> tuple[Cut, Cut]:
    """The place of `part` in a block of either store; both cuts have the same rows, one if it is contiguous in both."""
    geometry = source.geometry
    cuts = [_cut(geometry, store.slice, part) for store in (source, destination)]
    if all(cut.rows == 1 or cut.width_bytes == cut.stride_bytes for cut in cuts):
        cuts = [cut.flat() for cut in cuts]
    return cuts[0], cuts[1]


def part_cut(store: BlockStore, part: StoreSlice) -> Cut:
    """The place of `part` in a block of `store`; one row if it is contiguous there."""
    cut = _cut(store.geometry, store.slice, part)
    return cut.flat() if cut.rows == 1 or cut.width_bytes == cut.stride_bytes else cut


def _cut(geometry: KvGeometry, held: StoreSlice, part: StoreSlice) -> Cut:
    head_bytes = slice_block_bytes(geometry, StoreSlice(0, 1, 0, 1))
    layer_bytes = held.shape[1] * head_bytes
    begin = (part.layer_begin - held.layer_begin) * layer_bytes + (part.head_begin - held.head_begin) * head_bytes
    return Cut(begin, part.shape[0], layer_bytes, part.shape[1] * head_bytes)
