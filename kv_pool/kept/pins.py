"""Pins: prefixes that a shard holds for good, each under a name.

A pin is a holding with a reserved request id. Its payload says what it is, so the shard's table is also the list of
the pins that are wanted: it outlives every process, and gateways copy it to shards that lack a pin.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from alignedserve.control.prefixes import prefix_tokens
from alignedserve.errors import InvalidRequestError, PinsFullError
from alignedserve.kv_pool.counts import Grant
from alignedserve.kv_pool.pool import KvPool
from alignedserve.kv_pool.prefix_chain import TOKEN_BYTES
from alignedserve.kv_pool.records import MAX_NAME_BYTES, Holding
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.request import PIN

MOST_PINS = 1024


@dataclass(slots=True)
class _Use:
    hits: int = 0
    last_s: float | None = None


class Pins:
    """The pins of one shard. `fraction`: most of its blocks that they may hold. `clock`: seconds, monotonic."""

    def __init__(self, pool: KvPool, fraction: float, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._most_blocks = int(pool.counts().capacity * fraction)
        self._clock = clock
        self._held: dict[str, Holding] = {}
        self._specs: dict[str, kp.PinnedPrefix] = {}
        self._uses: dict[str, _Use] = {}
        self._ends: dict[int, list[str]] = {}  # last block -> names
        self.blocks: set[int] = set()
        for holding in pool.inventory():
            if not holding.key.request_id.startswith(PIN):
                continue
            if not pool.is_found(holding.key.request_id):  # the cache is, or was, off: it would hold blocks for nothing
                pool.let_go(holding.key.request_id)
            elif (read := pool.read(holding.key)) is not None:
                name = holding.key.request_id.removeprefix(PIN)
                self._held[name], self._specs[name] = holding, kp.PinnedPrefix.FromString(read[1])
        self._count()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def weights(self) -> set[str]:
        """Those that computed the pins."""
        return {spec.prefix.weights for spec in self._specs.values()}

    def keep(self, pin: kp.PinnedPrefix, root: bytes) -> tuple[Holding | None, list[Grant]]:
        """Hold a prefix under its name, in place of what it held. None: not all of its blocks are cached.

        Raises InvalidRequestError for a name that is too long, PinsFullError if pins would have too many blocks, and
        like `KvPool.keep`.
        """
        if not pin.name or len(pin.name.encode()) > MAX_NAME_BYTES // 2:
            raise InvalidRequestError(f"the name of a pin has 1 to {MAX_NAME_BYTES // 2} bytes")
        before = self._specs.get(pin.name)
        if before is not None and before.prefix == pin.prefix and before.everywhere >= pin.everywhere:
            return self._held[pin.name], []
        tokens = prefix_tokens(pin.prefix)
        found = self._pool.indexed(root, tokens)
        missing = len(tokens) // self._pool.block_size - len(found)
        others = self.blocks if before is None else _blocks_of(self._held, but=pin.name)
        wanted = len(others) + sum(block not in others for block in found) + missing
        if wanted > self._most_blocks or len(self._held.keys() - {pin.name}) >= MOST_PINS:
            raise PinsFullError(
                f"{self._pool.store_id}: with {pin.name[:64]!r} pins would hold {wanted} of its blocks, "
                f"{self._most_blocks} are allowed (kv_pool.pinned_fraction): drop others (`alignedserve cache drop`)"
            )
        if missing or not found:
            return None, []
        holding, grants = self._pool.keep(PIN + pin.name, found, pin.SerializeToString())
        self._held[pin.name], self._specs[pin.name] = holding, kp.PinnedPrefix.FromString(pin.SerializeToString())
        if before is not None:
            self._count()
        else:
            self.blocks.update(holding.block_ids)
            self._ends.setdefault(holding.block_ids[-1], []).append(pin.name)
        return holding, grants

    def let_go(self, names: Collection[str]) -> tuple[list[str], list[Grant]]:
        """End these pins; returns those that there were."""
        ended = [name for name in names if name in self._held]
        grants: list[Grant] = []
        for name in ended:
            grants += self._pool.let_go(PIN + name)
            del self._held[name], self._specs[name]
            self._uses.pop(name, None)
        self._count()
        return ended, grants

    def let_go_of(self, prefix: kp.CachedPrefix) -> tuple[list[str], list[Grant]]:
        """End the pins of a salt that begin with these tokens; returns those that there were.

        A pin has full blocks only: it may lack the last tokens, which fill none.
        """
        begin = prefix.token_ids
        block_bytes = self._pool.block_size * TOKEN_BYTES
        least = len(begin) // block_bytes * block_bytes
        names = []
        for name, spec in self._specs.items():
            own = spec.prefix.token_ids
            if spec.prefix.salt == prefix.salt and len(own) >= least and own.startswith(begin[: len(own)]):
                names.append(name)
        return self.let_go(names)

    def used(self, block_ids: Sequence[int]) -> None:
        """A prompt begins with these blocks."""
        if not self._ends:
            return
        now_s = self._clock()
        for block in block_ids:
            for name in self._ends.get(block, ()):
                use = self._uses.setdefault(name, _Use())
                use.hits, use.last_s = use.hits + 1, now_s

    def listed(self, weights: str, *, prefixes: bool) -> list[kp.CachedPin]:
        """All pins; those of other weights than these are stale. `prefixes`: with their tokens."""
        now_s, found = self._clock(), []
        for name, holding in self._held.items():
            use, spec = self._uses.get(name, _Use()), kp.PinnedPrefix()
            spec.CopyFrom(self._specs[name])
            stale = spec.prefix.weights != weights
            spec.prefix.weights = ""  # a copy of it is of the newest
            if not prefixes:
                spec.prefix.token_ids = b""
            idle_s = -1.0 if use.last_s is None else now_s - use.last_s
            found.append(
                kp.CachedPin(
                    pin=spec,
                    tokens=holding.kv_tokens,
                    blocks=len(holding.block_ids),
                    hits=use.hits,
                    idle_s=idle_s,
                    stale=stale,
                )
            )
        return found

    def _count(self) -> None:
        self.blocks = _blocks_of(self._held)
        self._ends = {}
        for name, held in self._held.items():
            self._ends.setdefault(held.block_ids[-1], []).append(name)


def _blocks_of(held: Mapping[str, Holding], but: str = "") -> set[int]:
    return set[int]().union(*(holding.block_ids for name, holding in held.items() if name != but))
