"""The channel between a store of this process and a store of the other process of the pair."""

from __future__ import annotations

from typing import Any

from alignedserve.errors import TransferError
from alignedserve.transfer.block_store import BlockStore
from alignedserve.transfer.channel import MAX_PENDING_COPIES, Copy, QueuedChannel, cancelled
from alignedserve.transfer.paired.blocks import packed_blocks
from alignedserve.transfer.paired.client import PairClient
from alignedserve.transfer.paired.remote import RemoteBlockStore
from alignedserve.transfer.paired.transport import Portion


class PairedChannel(QueuedChannel):
    """Asks the other process to take part in each copy, which then uses the pair's connection of that direction.

    A copy that is requested while the pair is not connected waits for the connection, as long as the client allows.
    """

    def __init__(
        self,
        source: BlockStore,
        destination: BlockStore,
        client: PairClient,
        *,
        max_pending: int = MAX_PENDING_COPIES,
    ) -> None:
        """One of the stores must be remote. Raises TransferError if not, and like `common_part`."""
        self._client = client
        self._push = isinstance(destination, RemoteBlockStore)
        if self._push == isinstance(source, RemoteBlockStore):
            raise TransferError(f"stores {source.store_id} and {destination.store_id} are not in two processes")
        self._blocks = packed_blocks(source if self._push else destination)
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
