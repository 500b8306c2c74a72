"""A writer's side of a standing lease: free blocks at hand, so that whoever needs some makes no call.

A block is at hand, or taken (being filled), or not this writer's any more. While the link to the lender is down, taken
blocks may still be written to by a copy under way; so a block that was taken then comes back to hand only when it has
both been given back here and been granted anew.
"""

from __future__ import annotations

from collections.abc import Iterable


class StandingLease:
    """Keeps about `standing_blocks` free blocks at hand. Pure: one thread, no I/O."""

    def __init__(self, standing_blocks: int, *, low_share: float = 0.5) -> None:
        """More are asked for once fewer than `low_share` of the standing blocks are at hand or on their way."""
        self.standing_blocks = standing_blocks
        self._low_blocks = standing_blocks * low_share
        self._free: list[int] = []
        self._taken: dict[int, bool] = {}  # whether the lender knows, over this link, that it is ours
        self._asked = 0

    @property
    def free_blocks(self) -> int:
        """At hand."""
        return len(self._free)

    @property
    def taken_blocks(self) -> int:
        return len(self._taken)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks to fill, or None where fewer are at hand."""
        if count > len(self._free):
            return None
        taken, self._free = self._free[:count], self._free[count:]
        self._taken.update(dict.fromkeys(taken, True))
        return taken

    def give(self, block_ids: Iterable[int]) -> None:
        """Nothing writes to these any more, and nobody holds them. Blocks that were committed are left alone."""
        for block in block_ids:
            if self._taken.pop(block, False):
                self._free.append(block)

    def committed(self, block_ids: Iterable[int]) -> None:
        """Taken ones among these belong to a request now."""
        for block in block_ids:
            self._taken.pop(block, None)

    def ask(self, demand: int = 0) -> int:
        """How many more to ask the lender for now; they count as on their way from here on.

        `demand`: blocks that somebody waits for beyond the standing ones.
        """
        coming = len(self._free) + self._asked
        missing = self.standing_blocks + demand - coming
        if missing <= 0 or (not demand and coming >= self._low_blocks):
            return 0
        self._asked += missing
        return missing

    def granted(self, block_ids: Iterable[int]) -> None:
        """The lender has leased these to us, or confirms that it had."""
        for block in block_ids:
            self._asked = max(0, self._asked - 1)
            if block in self._taken:
                self._taken[block] = True
            else:
                self._free.append(block)

    def give_up(self) -> list[int]:
        """Everything at hand, to be given back to the lender: others wait for blocks."""
        freed, self._free = self._free, []
        return freed

    def broke(self) -> None:
        """The link to the lender broke: what is at hand is void until it is granted again."""
        self._free.clear()
        self._asked = 0
        for block in self._taken:
            self._taken[block] = False
