"""One store in several parts: the memory of an instance whose ranks have stores of their own.

Each part holds the KV heads of a rank's layers. To everything else it is one store of whole blocks, so that the pool's
layout and the other instances do not depend on degrees.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from alignedserve.errors import TransferError
from alignedserve.geometry import KvGeometry, StoreSlice
from alignedserve.transfer.block_store import BlockStore, ByteArray
from alignedserve.transfer.channel import Channel, ChannelCounters, PageLocked
from alignedserve.transfer.completion import Completion
from alignedserve.transfer.handles import StoreHandle
from alignedserve.transfer.runs import check_ids

Connect = Callable[[BlockStore, BlockStore], Channel]


class ComposedStore(BlockStore):
    """Several stores that are one of whole blocks to everything else. It owns them."""

    def __init__(self, store_id: str, stores: Sequence[BlockStore]) -> None:
        self._store_id, self._stores = store_id, tuple(stores)

    @property
    def store_id(self) -> str:
        return self._store_id

    @property
    def geometry(self) -> KvGeometry:
        return self._stores[0].geometry

    @property
    def slice(self) -> StoreSlice:
        return StoreSlice.whole(self.geometry)

    @property
    def device(self) -> str:
        """Of the first one."""
        return self._stores[0].device

    def handle(self) -> StoreHandle:
        parts = tuple(store.handle() for store in self._stores)
        first = parts[0]
        return StoreHandle(
            self._store_id,
            first.kind,
            self.geometry,
            self.slice,
            self.capacity_blocks,
            first.node_id,
            device=first.device,
            parts=parts,
        )

    def close(self) -> None:
        for store in self._stores:
            store.close()


class PartedStore(ComposedStore):
    """Parts of equal capacity; block `i` is the blocks `i` of all."""

    def __init__(self, store_id: str, parts: Sequence[BlockStore]) -> None:
        """`parts` together hold each head of each layer. Several may hold the same: they are equal at all times.

        Raises TransferError if something is missing or held twice in part, GeometryMismatchError for parts of
        different models.
        """
        super().__init__(store_id, parts)
        first, self.parts = parts[0], self._stores
        self.once = tuple({part.slice: part for part in reversed(parts)}.values())[::-1]
        """The first of equal parts: together they hold everything once."""
        for part in parts:
            first.geometry.require_same(part.geometry)
        slices = [part.slice for part in self.once]
        layers, heads = self.slice.shape
        apart = all(not one.intersect(other) for at, one in enumerate(slices) for other in slices[:at])
        whole = sum(held.shape[0] * held.shape[1] for held in slices) == layers * heads
        if not (apart and whole) or len({part.capacity_blocks for part in parts}) > 1:
            held = ", ".join(f"{part.store_id}: {part.capacity_blocks} blocks of {part.slice}" for part in parts)
            raise TransferError(f"store {store_id}: its parts do not make whole blocks ({held})", store_id=store_id)

    @property
    def capacity_blocks(self) -> int:
        return self.parts[0].capacity_blocks

    def read_block(self, block: int) -> memoryview:
        layers, heads = self.slice.shape
        whole: ByteArray = np.empty((layers, heads, self.block_bytes // (layers * heads)), np.uint8)
        for part in self.once:
            held, found = part.slice, np.frombuffer(part.read_block(block), np.uint8)
            place = slice(held.layer_begin, held.layer_end), slice(held.head_begin, held.head_end)
            whole[place] = found.reshape(*held.shape, -1)
        return whole.reshape(-1).data


class JoinedChannel(Channel):
    """A copy is one on each of several channels, and done when it is on all of them."""

    def __init__(self, source: BlockStore, destination: BlockStore, channels: Sequence[Channel]) -> None:
        self._source, self._destination, self._channels = source, destination, channels
        self._lock = threading.Lock()
        self._pending = self._copies = self._failed = self._blocks = 0

    @property
    def name(self) -> str:
        return " and ".join(sorted({channel.name for channel in self._channels}))

    @property
    def source(self) -> BlockStore:
        return self._source

    @property
    def destination(self) -> BlockStore:
        return self._destination

    def begin(self, copies: Sequence[Callable[[], Completion]], blocks: int) -> Completion:
        """Begin all `copies`, which together copy `blocks` blocks. Raises the TransferError of the first.

        If a later one cannot begin, those before it are cancelled, and the completion has its error.
        """
        label = f"{self._source.store_id} to {self._destination.store_id}"
        begun: list[Completion] = []
        error: TransferError | None = None
        for copy in copies:
            try:
                begun.append(copy())
            except TransferError as refused:
                if not begun:
                    raise
                error = refused
                break
        with self._lock:
            self._pending += 1
        joined = _Joined(label, begun, error, lambda ended: self._count(ended, blocks))
        joined.begin()
        return joined

    def _count(self, error: TransferError | None, blocks: int) -> None:
        with self._lock:
            self._pending -= 1
            self._failed += error is not None
            self._copies += error is None
            self._blocks += blocks if error is None else 0

    def counters(self) -> ChannelCounters:
        found = [channel.counters() for channel in self._channels]
        return ChannelCounters(
            self._copies,
            self._failed,
            self._blocks,
            bytes=sum(one.bytes for one in found),
            busy_s=max((one.busy_s for one in found), default=0.0),
        )

    @property
    def pending(self) -> int:
        return self._pending

    @property
    def waits_for_peer(self) -> bool:
        """Where every channel that copies does."""
        return all(channel.waits_for_peer for channel in self._channels if channel.pending)

    def page_locked(self) -> PageLocked | None:
        found = [progress for channel in self._channels if (progress := channel.page_locked()) is not None]
        return next((progress for progress in found if not progress.ended), found[0] if found else None)

    def trouble(self) -> TransferError | None:
        return next((trouble for channel in self._channels if (trouble := channel.trouble()) is not None), None)

    def close(self, timeout_s: float = 10.0) -> None:
        for channel in self._channels:
            channel.close(timeout_s)


class PartedChannel(JoinedChannel):
    """A channel for each pair of parts that have something in common."""

    def __init__(self, source: BlockStore, destination: BlockStore, connect: Connect) -> None:
        """`connect` opens the channel of a pair."""
        pairs = [
            (one, other, common)
            for one in (source.once if isinstance(source, PartedStore) else (source,))
            for other in (destination.parts if isinstance(destination, PartedStore) else (destination,))
            if (common := one.slice.intersect(other.slice)) is not None
        ]
        super().__init__(source, destination, [connect(one, other) for one, other, _ in pairs])
        self._layers = [(common.layer_begin, common.layer_end) for _, _, common in pairs]

    def copy(
        self,
        source_ids: Sequence[int],
        destination_ids: Sequence[int],
        *,
        layers: tuple[int, int] | None = None,
        settled: bool = False,
    ) -> Completion:
        check_ids(source_ids, self._source, distinct=False)
        check_ids(destination_ids, self._destination, distinct=True)
        copies = [
            partial(channel.copy, source_ids, destination_ids, layers=part, settled=settled)
            for channel, part in zip(self._channels, self._parts_of(layers), strict=True)
            if part is not None
        ]
        return self.begin(copies, len(source_ids))

    def _parts_of(self, layers: tuple[int, int] | None) -> list[tuple[int, int] | None]:
        """Which of these layers each channel copies; None: none of them. Raises TransferError for no layers."""
        if layers is None:
            return list(self._layers)
        begin, end = layers
        if not 0 <= begin < end <= self._source.geometry.layers:
            raise TransferError(f"layers {begin} to {end} are not in both stores")
        cut = [(max(begin, first), min(end, last)) for first, last in self._layers]
        return [(first, last) if first < last else None for first, last in cut]


class _Joined(Completion):
    """The end of several copies, with the first error."""

    def __init__(
        self,
        label: str,
        copies: Sequence[Completion],
        error: TransferError | None,
        count: Callable[[TransferError | None], None],
    ) -> None:
        """`error`: of a copy that could not begin; then the others are cancelled. `count` is called at the end, before
        anything that waits for it goes on.
        """
        super().__init__(label)
        self._copies, self._first_error, self._count = copies, error, count
        self._left = len(copies)
        self._counting = threading.Lock()

    def begin(self) -> None:
        """Wait for the copies from now on."""
        if self._first_error is not None:
            self.cancel()
        for copy in self._copies:
            copy.add_callback(self._one_ended)
        if not self._copies:
            self._count(None)
            self.finish(None)

    def cancel(self) -> None:
        super().cancel()
        for copy in self._copies:
            copy.cancel()

    def _one_ended(self, copy: Completion) -> None:
        with self._counting:
            self._left -= 1
            self._first_error = self._first_error or copy.error
            left = self._left
        if not left:
            self._count(self._first_error)
            self.finish(self._first_error)


def parts_by_id(stores: Iterable[BlockStore]) -> dict[str, BlockStore]:
    """The stores, or their parts, by id."""
    found = (part for store in stores for part in (store.parts if isinstance(store, PartedStore) else (store,)))
    return {part.store_id: part for part in found}
