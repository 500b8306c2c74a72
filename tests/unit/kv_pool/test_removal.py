"""Blocks are removed from a large index in parts, beside everything else that the process does."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from alignedserve.kv_pool import removal
from alignedserve.kv_pool.entries import Ids
from alignedserve.kv_pool.removal import remove_found


@pytest.mark.parametrize(
    ("entries", "steps"),
    [(9, ["remove 4 3 2 1 0"]), (10, ["remove 4 3", "turn", "remove 2 1", "turn", "remove 0", "turn"])],
)
async def test_the_loop_goes_on_between_parts_of_a_large_index(
    monkeypatch: pytest.MonkeyPatch, entries: int, steps: list[str]
) -> None:
    monkeypatch.setattr(removal, "FEW_ENTRIES", 9)
    monkeypatch.setattr(removal, "REMOVED_AT_ONCE", 2)
    done: list[str] = []
    threads: list[threading.Thread] = []

    def find() -> Ids:
        threads.append(threading.current_thread())
        return np.arange(5, dtype=np.int32)[::-1]

    def remove(block_ids: list[int]) -> None:
        done.append("remove " + " ".join(map(str, block_ids)))
        asyncio.get_running_loop().call_soon(done.append, "turn")

    found = await remove_found(entries, find, remove)
    assert found.tolist() == [4, 3, 2, 1, 0]
    assert done == steps
    assert (threads[0] is threading.main_thread()) == (entries == 9)
