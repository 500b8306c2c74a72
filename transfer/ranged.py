"""One store in ranges of blocks: the memory of an instance whose ranks hold KV of requests of their own.

Each range is a store of whole blocks, mostly on the device of a rank. To everything else they are one store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from alignedserve.errors import TransferError
from alignedserve.transfer.block_store import BlockStore
from alignedserve.transfer.channel import Channel
from alignedserve.transfer.completion import Completion
from alignedserve.transfer.handles import StoreHandle
from alignedserve.transfer.parted import ComposedStore, Connect, JoinedChannel, PartedChannel, PartedStore
from alignedserve.transfer.runs import IdArray, check_ids

Pair = tuple[int, int]
"""The range that is read, and the one that is written."""


class RangedStore(ComposedStore):
    """Ranges of `each` blocks: range `r` has the blocks `r * each` to `(r + 1) * each - 1`."""

    def __init__(self, store_id: str, ranges: Sequence[BlockStore]) -> None:
        """Raises TransferError for ranges of unequal capacity, GeometryMismatchError for ranges of different models."""
        super().__init__(store_id, ranges)
        first, self.ranges, self.each = ranges[0], self._stores, ranges[0].capacity_blocks
        for store in ranges:
            first.geometry.require_same(store.geometry)
            if (store.capacity_blocks, store.slice) != (self.each, self.slice):
                raise TransferError(
                    f"store {store_id}: {store.store_id} has {store.capacity_blocks} blocks of {store.slice}, and "
                    f"{first.store_id} has {self.each} of {self.slice}: ranges are equal, of whole blocks",
                    store_id=store_id,
                )

    @property
    def capacity_blocks(self) -> int:
        return self.each * len(self.ranges)

    def read_block(self, block: int) -> memoryview:
        return self.ranges[block // self.each].read_block(block % self.each)

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        wanted = np.asarray(block_ids, np.int64)
        found = np.empty(len(wanted), np.uint64)
        for number in np.unique(wanted // self.each).tolist():
            where = wanted // self.each == number
            found[where] = self.ranges[number].checksums((wanted[where] % self.each).tolist())
        return [int(one) for one in found]


class RangedChannel(JoinedChannel):
    """A channel for each pair of ranges. Blocks of one range are not copied within it."""

    def __init__(self, source: BlockStore, destination: BlockStore, connect: Connect) -> None:
        """`connect` opens the channel of a pair. A store that has no ranges is one."""
        sources, destinations = _ranges(source), _ranges(destination)
        self._of = {
            (one, other): connect(sources[one], destinations[other])
            for one in range(len(sources))
            for other in range(len(destinations))
            if sources[one] is not destinations[other]
        }
        super().__init__(source, destination, list(self._of.values()))

    def copy(
        self,
        source_ids: Sequence[int],
        destination_ids: Sequence[int],
        *,
        layers: tuple[int, int] | None = None,
        settled: bool = False,
    ) -> Completion:
        if len(source_ids) != len(destination_ids):
            raise TransferError(f"{len(source_ids)} blocks cannot be copied to {len(destination_ids)}")
        sources = check_ids(source_ids, self._source, distinct=False)
        destinations = check_ids(destination_ids, self._destination, distinct=True)
        copies = [
            partial(self._between(pair).copy, own.tolist(), theirs.tolist(), layers=layers, settled=settled)
            for pair, own, theirs in self._routed(sources, destinations)
        ]
        return self.begin(copies, len(source_ids))

    def _routed(self, sources: IdArray, destinations: IdArray) -> list[tuple[Pair, IdArray, IdArray]]:
        """The ids by pair, as the two ranges number them. Mostly all are of one pair."""
        each, other = _each(self._source), _each(self._destination)
        reads, writes = sources // each, destinations // other
        found = []
        for read, written in sorted(set(zip(reads.tolist(), writes.tolist(), strict=True))):
            where = (reads == read) & (writes == written)
            found.append(((read, written), sources[where] - read * each, destinations[where] - written * other))
        return found

    def _between(self, pair: Pair) -> Channel:
        if pair not in self._of:
            raise TransferError(f"{self._source.store_id}: blocks are not copied within range {pair[0]}")
        return self._of[pair]


def _ranges(store: BlockStore) -> Sequence[BlockStore]:
    return store.ranges if isinstance(store, RangedStore) else (store,)


def _each(store: BlockStore) -> int:
    return store.each if isinstance(store, RangedStore) else store.capacity_blocks


def connected(source: BlockStore, destination: BlockStore, connect: Connect) -> Channel:
    """The channel between two stores. `connect` opens one between two that are in neither parts nor ranges."""
    of_parts = partial(connected, connect=connect)
    if isinstance(source, RangedStore) or isinstance(destination, RangedStore):
        return RangedChannel(source, destination, of_parts)
    if isinstance(source, PartedStore) or isinstance(destination, PartedStore):
        return PartedChannel(source, destination, of_parts)
    return connect(source, destination)


def opened(handle: StoreHandle, attach: Callable[[StoreHandle], BlockStore]) -> BlockStore:
    """The store of a handle. `attach` opens one that is in neither parts nor ranges."""
    if not handle.parts:
        return attach(handle)
    parts: list[BlockStore] = []
    try:
        for part in handle.parts:
            parts.append(opened(part, attach))  # noqa: PERF401  (those before one that fails are closed)
        in_ranges = handle.capacity_blocks > handle.parts[0].capacity_blocks
        return (RangedStore if in_ranges else PartedStore)(handle.store_id, parts)
    except BaseException:
        for store in parts:
            store.close()
        raise
