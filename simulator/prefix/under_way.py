"""Prompts under way at the instances of one shard: those that share more with one of them wait until it is cached.

As `prefill_worker/prefixes.py` does in the cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from alignedserve.request import RequestKey

LEAST_SHARED_TOKENS = 128
"""A shorter part is computed again, as in the cluster (8 blocks of 16 tokens)."""


class UnderWay:
    """Ids of blocks that will be cached when a prompt has been computed."""

    def __init__(self) -> None:
        self._coming: dict[int, RequestKey] = {}  # id -> the first prompt under way that has it
        self._prompts: dict[RequestKey, tuple[Sequence[int], list[Callable[[], None]]]] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._coming

    def __bool__(self) -> bool:
        return bool(self._prompts)

    def awaited(self, blocks: Sequence[int], held: int, block_tokens: int) -> RequestKey | None:
        """Which prompt to wait for with these blocks, the first `held` of which are here; None: none is worth it."""
        last = next((n for n in range(len(blocks) - 1, held - 1, -1) if blocks[n] in self._coming), None)
        if last is None or (last + 1 - held) * block_tokens < LEAST_SHARED_TOKENS:
            return None
        return self._coming[blocks[last]]

    def announce(self, key: RequestKey, blocks: Sequence[int]) -> None:
        """The prompt is under way, until `ended`."""
        self._prompts[key] = blocks, []
        for block in blocks:
            self._coming.setdefault(block, key)

    def wait(self, key: RequestKey, then: Callable[[], None]) -> None:
        """Call `then` when this prompt has ended."""
        self._prompts[key][1].append(then)

    def ended(self, key: RequestKey) -> None:
        """It was computed and is cached, or will never be. What waits for it goes on."""
        blocks, waiting = self._prompts.pop(key, ((), []))
        for block in blocks:
            if self._coming.get(block) == key:
                del self._coming[block]
        for then in waiting:
            then()
