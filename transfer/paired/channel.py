"""Channels to stores of the other process of a pair."""

from __future__ import annotations

from typing import Any

import numpy as np

from alignedserve.errors import TransferError
from alignedserve.transfer.block_store import BlockStore, HostBlockStore
from alignedserve.transfer.channel import MAX_PENDING_COPIES, Copy, QueuedChannel, cancelled
from alignedserve.transfer.handles import slice_block_bytes
from alignedserve.transfer.paired.blocks import HostBlocks, packed_blocks
from alignedserve.transfer.paired.remote import RemoteBlockStore
from alignedserve.transfer.paired.transport import Portion
from alignedserve.transfer.runs import common_part

RELAY_BYTES = 8 << 20


def paired_channel(source: BlockStore, destination: BlockStore) -> QueuedChannel:
    """The channel between two stores, one or both of which are remote. Raises TransferError like `common_part`."""
    if isinstance(source, RemoteBlockStore) and isinstance(destination, RemoteBlockStore):
        return RelayedChannel(source, destination)
    return PairedChannel(source, destination)


class PairedChannel(QueuedChannel):
    """Asks the other process to take part in each copy, which then uses the pair's connection of that direction.

    A copy that is requested while the pair is not connected waits for the connection, as long as the client allows.
    """

    def __init__(self, source: BlockStore, destination: BlockStore, *, max_pending: int = MAX_PENDING_COPIES) -> None:
        """One of the stores must be remote. Raises TransferError if not, and like `common_part`."""
        self._push = isinstance(destination, RemoteBlockStore)
        remote, own = (destination, source) if self._push else (source, destination)
        if not isinstance(remote, RemoteBlockStore) or isinstance(own, RemoteBlockStore):
            raise TransferError(f"stores {source.store_id} and {destination.store_id} are not in two processes")
        self._client = remote.client
        self._blocks = packed_blocks(own)
        super().__init__(source, destination, max_pending=max_pending)

    @property
    def name(self) -> str:
        return self._client.channel

    @property
    def waits_for_peer(self) -> bool:
        """True also while it waits for its turn: the channel whose turn it is reports its own state."""
        return not self._blocks.busy

    def _ready(self) -> Any:
        return self._blocks.now()

    def _begin(self, copy: Copy) -> None:
        if copy.completion.cancelled:
            raise cancelled(copy)
        local, remote = copy.destination_ids, copy.source_ids
        if self._push:
            local, remote = remote, local
        portion = Portion(self._blocks, copy.part, local, copy.ready)
        store = self.destination if self._push else self.source
        self._client.copy(store.store_id, remote, portion, push=self._push)

    def _end(self, copy: Copy, begun: None) -> None:
        """Does nothing: `_begin` has completed the copy."""


class RelayedChannel(QueuedChannel):
    """Between stores of two other processes, through memory of this one, piece by piece."""

    def __init__(self, source: RemoteBlockStore, destination: RemoteBlockStore) -> None:
        """Raises TransferError like `common_part`."""
        self._from, self._to = source, destination
        part = common_part(source, destination)
        self._room = max(1, RELAY_BYTES // slice_block_bytes(source.geometry, part))  # blocks
        self._blocks: HostBlocks | None = None  # made with the first copy
        super().__init__(source, destination)

    @property
    def name(self) -> str:
        return self._to.client.channel

    @property
    def waits_for_peer(self) -> bool:
        return True

    def _begin(self, copy: Copy) -> None:
        if self._blocks is None:
            label = f"{self._from.store_id} to {self._to.store_id}"
            self._blocks = HostBlocks(HostBlockStore.private(label, self._from.geometry, self._room, part=self._part))
        for begin in range(0, copy.source_ids.size, self._room):
            if copy.completion.cancelled:
                raise cancelled(copy)
            piece = slice(begin, begin + self._room)
            portion = Portion(self._blocks, copy.part, np.arange(copy.source_ids[piece].size))
            self._from.client.copy(self._from.store_id, copy.source_ids[piece], portion, push=False)
            self._to.client.copy(self._to.store_id, copy.destination_ids[piece], portion, push=True)

    def _end(self, copy: Copy, begun: None) -> None:
        """Does nothing: `_begin` has completed the copy."""
