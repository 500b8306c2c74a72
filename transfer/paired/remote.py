"""A store in the other process of a pair, as seen by this one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from alignedserve.transfer.block_store import HandleBlockStore, HostBlockStore
from alignedserve.transfer.handles import StoreHandle

if TYPE_CHECKING:
    from alignedserve.transfer.paired.client import PairClient


class RemoteBlockStore(HandleBlockStore):
    """Has no memory here: a `PairedChannel` copies from and to it. The other process computes its checksums."""

    def __init__(self, handle: StoreHandle, client: PairClient) -> None:
        """`client`: of the pair of the two processes."""
        super().__init__(handle)
        self.client = client

    def read_block(self, block: int) -> memoryview:
        """One block's bytes, copied from the other process. Blocks. Raises TransferError."""
        from alignedserve.transfer.paired.blocks import packed_blocks  # imports torch
        from alignedserve.transfer.paired.transport import Portion

        room = HostBlockStore.private(self.store_id, self.geometry, 1, part=self.slice)
        there, here = np.array([block]), np.array([0])
        self.client.copy(self.store_id, there, Portion(packed_blocks(room), self.slice, here), push=False)
        return room.read_block(0)

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        """Blocks, and raises TransferError if there is no answer."""
        return self.client.checksums(self.store_id, block_ids)

    def close(self) -> None:
        """Nothing is held here."""
