"""What it is worth to keep a block in the prefix cache: `kv_pool.cache_policy`."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable

from alignedserve.errors import ConfigError


class CachePolicy(ABC):
    """Values of cached blocks, on any scale. All blocks of a store have the same bytes, so a value is one per block."""

    @abstractmethod
    def value(self, uses: int, chain_blocks: int, chance: float) -> float:
        """The value, above 0, of a block of a chain of `chain_blocks` blocks, which `uses` requests have used so far.

        `chance`: how likely the chain is to be used again, as a multiple of what `uses` tells; 1 if nothing is known.
        """


class LruPolicy(CachePolicy):
    """All blocks have the same value, so the one that was used least recently goes first."""

    def value(self, uses: int, chain_blocks: int, chance: float) -> float:
        return 1.0


class ValuePolicy(CachePolicy):
    """Predicted seconds to compute the chain again, for each block, times uses.

    As GreedyDual-Size-Frequency (Cherkasova 1998), whose sizes are equal here.
    """

    def __init__(self, prefill_s: Callable[[int], float], block_size: int) -> None:
        """`prefill_s`: the predicted time in seconds to compute a prompt of so many tokens."""

        def per_block(chain_blocks: int) -> float:
            return prefill_s(chain_blocks * block_size) / chain_blocks

        self._seconds_per_block = functools.lru_cache(maxsize=4096)(per_block)

    def value(self, uses: int, chain_blocks: int, chance: float) -> float:
        return uses * self._seconds_per_block(chain_blocks) * chance


def cache_policy(name: str, prefill_s: Callable[[int], float], block_size: int) -> CachePolicy:
    """The policy of this name (`value` or `lru`). Raises ConfigError for another name."""
    if name == "value":
        return ValuePolicy(prefill_s, block_size)
    if name == "lru":
        return LruPolicy()
    raise ConfigError(f"kv_pool.cache_policy: {name!r} is not a policy of the prefix cache; choose value or lru")
