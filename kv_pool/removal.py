"""Removes many blocks from a prefix index beside everything else that the shard's process does.

To find what continues a prefix all entries are read, which takes seconds in an index of millions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from alignedserve.kv_pool.entries import Ids

FEW_ENTRIES = 100_000  # so many are read in 30 ms
REMOVED_AT_ONCE = 20_000


async def remove_found(entries: int, find: Callable[[], Ids], remove: Callable[[list[int]], object]) -> Ids:
    """Remove what `find` returns from an index of so many entries, in its order. Returns it.

    The caller sees to it that nothing else changes the index. Beyond `FEW_ENTRIES`, `find` runs in a thread and blocks
    are removed in parts, between which the event loop goes on. Else it is one step.
    """
    if entries <= FEW_ENTRIES:
        found = find()
        remove(found.tolist())
        return found
    found = await asyncio.to_thread(find)
    for begin in range(0, len(found), REMOVED_AT_ONCE):
        remove(found[begin : begin + REMOVED_AT_ONCE].tolist())
        await asyncio.sleep(0)
    return found
