"""A store in the other process of a pair, as seen by this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from alignedserve.errors import TransferError
from alignedserve.transfer.block_store import HandleBlockStore
from alignedserve.transfer.handles import StoreHandle


class RemoteBlockStore(HandleBlockStore):
    """Has no memory here: a `PairedChannel` copies from and to it. The other process computes its checksums."""

    def __init__(self, handle: StoreHandle, ask_checksums: Callable[[str, Sequence[int]], list[int]]) -> None:
        """`ask_checksums(store_id, block_ids)` blocks, and raises TransferError if there is no answer."""
        super().__init__(handle)
        self._ask_checksums = ask_checksums

    def read_block(self, block: int) -> memoryview:
        """Raises TransferError: its bytes are in another process."""
        raise TransferError(f"store {self.store_id} is in another process: its blocks can only be copied")

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        return self._ask_checksums(self.store_id, block_ids)

    def close(self) -> None:
        """Nothing is held here."""
