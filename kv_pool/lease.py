"""A writer's side of a standing lease: free blocks kept at hand, so that taking blocks needs no remote call.

A block is at hand, or taken (being filled), or no longer leased to this writer. While the link to the lender is down, a
copy under way may still write to taken blocks. So a block that was taken when the link broke is at hand again only when
it has been given back here and the lender has granted it again.
"""

from __future__ import annotations

from collections.abc import Iterable


class StandingLease:
    """Keeps about `standing_blocks` free blocks at hand. Pure: one thread, no I/O."""

    def __init__(self, standing_blocks: int, *, low_share: float = 0.5) -> None:
        """More blocks are requested once fewer than `low_share` of `standing_blocks` are at hand or requested."""
        self.standing_blocks = standing_blocks
        self._low_blocks = standing_blocks * low_share
        self._free: list[int] = []
        self._taken: dict[int, bool] = {}  # block -> whether the lender has granted it over the current link
        self._asked = 0

    @property
    def free_blocks(self) -> int:
        """The number of blocks at hand."""
        return len(self._free)

    @property
    def taken_blocks(self) -> int:
        return len(self._taken)

    def take(self, count: int) -> list[int] | None:
        """Take `count` blocks to fill; None if fewer are at hand."""
        if count > len(self._free):
            return None
        taken, self._free = self._free[:count], self._free[count:]
        self._taken.update(dict.fromkeys(taken, True))
        return taken

    def give(self, block_ids: Iterable[int]) -> None:
        """Put back taken blocks that nothing writes to any more and no request holds. Committed blocks are ignored."""
        for block in block_ids:
            if self._taken.pop(block, False):
                self._free.append(block)

    def committed(self, block_ids: Iterable[int]) -> None:
        """The taken blocks among these now belong to a request."""
        for block in block_ids:
            self._taken.pop(block, None)

    def ask(self, demand: int = 0) -> int:
        """How many blocks to request from the lender now. From then on they count as requested.

        `demand`: blocks that callers wait for, in addition to the standing blocks.
        """
        coming = len(self._free) + self._asked
        missing = self.standing_blocks + demand - coming
        if missing <= 0 or (not demand and coming >= self._low_blocks):
            return 0
        self._asked += missing
        return missing

    def granted(self, block_ids: Iterable[int]) -> None:
        """The lender has leased these blocks to this writer, or confirms an earlier lease."""
        for block in block_ids:
            self._asked = max(0, self._asked - 1)
            if block in self._taken:
                self._taken[block] = True
            else:
                self._free.append(block)

    def give_up(self) -> list[int]:
        """Remove and return all blocks at hand, to be given back to the lender because other writers wait."""
        freed, self._free = self._free, []
        return freed

    def broke(self) -> None:
        """The link to the lender broke. Blocks at hand are void until they are granted again."""
        self._free.clear()
        self._asked = 0
        for block in self._taken:
            self._taken[block] = False
