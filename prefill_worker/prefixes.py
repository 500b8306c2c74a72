"""Prefix cache: which part of a prompt this node's shard already holds, so that only the rest is computed.

Matched blocks are pinned for the request that leads the job: they are its `Base`, as adopted KV is. Prompts that share
more with a prompt under way here than with the cache wait until its blocks are committed, so that a prefix that comes
with several prompts at once is computed once. If it ends without them, the next of those that wait computes the prefix.
A prompt waits only for prompts that are computed before it: of no higher rank of priorities, and no later.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from alignedserve.control.prefixes import cached_prefix
from alignedserve.errors import AlignedServeError
from alignedserve.kv_pool.prefix_chain import DIGEST_BYTES, TOKEN_BYTES, Chain, root_digest
from alignedserve.kv_pool.writer import PoolWriter
from alignedserve.metrics import Page
from alignedserve.prefill_worker.jobs import Base
from alignedserve.prefill_worker.loans import Loans
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.request import RequestKey

logger = logging.getLogger(__name__)

LEAST_SHARED_BLOCKS, LEAST_SHARED_TOKENS = 8, 128
"""A prompt waits for another one only if that computes so many blocks for it, or at least one and so many tokens: a
shorter part is computed again in less time than its copy to the pool takes."""


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A prompt whose KV will be cached. `digests`: of each prefix of full blocks. `number`: in order of arrival.

    `ended`: done when it is no longer under way.
    """

    prefix: kp.CachedPrefix
    rank: int
    digests: list[bytes]
    ended: asyncio.Future[None]
    number: int = 0

    def goes_before(self, other: _UnderWay) -> bool:
        """Whether it is computed first. An order of all prompts, so that none wait for each other."""
        return (self.rank, self.number) < (other.rank, other.number)


class Prefixes:
    """For one event loop. Any failure of the shard costs a match, and never a request."""

    def __init__(self, pool: PoolWriter, pool_id: str, block_size: int, loans: Loans) -> None:
        self._pool = pool
        self._loans = loans
        self._pool_id = pool_id
        self.block_size = block_size
        self._least_blocks = max(1, min(LEAST_SHARED_BLOCKS, LEAST_SHARED_TOKENS // block_size))
        self._pinned: set[RequestKey] = set()
        self._coming: dict[bytes, _UnderWay] = {}  # digest -> the prompt that has the prefix computed first
        self._under_way: dict[RequestKey, _UnderWay] = {}
        self._numbers = itertools.count()
        self.queried_tokens = 0
        self.hit_tokens = {"host": 0, "disk": 0, "other node": 0}  # by where their KV was
        self.waited = 0

    def show_metrics(self, page: Page) -> None:
        meaning = "tokens of prompts that were looked up in the prefix cache"
        page.counter("prefix_cache_queried_tokens_total", meaning, self.queried_tokens)
        meaning = "tokens of prompts whose KV came from the prefix cache, by where it was"
        for tier, tokens in self.hit_tokens.items():
            page.counter("prefix_cache_hit_tokens_total", meaning, tokens, tier=tier)
        meaning = "prompts that waited for another prompt to compute what both begin with"
        page.counter("prefix_cache_waited_prompts_total", meaning, self.waited)

    async def find(
        self, lead: RequestKey, tokens: Sequence[int], salt: bytes, copy_from: str = "", rank: int = 0
    ) -> Base | None:
        """Pin what the shard has of the prompt; None if it has nothing. `ended` must follow, whatever happens.

        `copy_from`: a shard of another node that may have more. `rank`: of its priority, the least first.
        """
        digests = self._digests(tokens[:-1], salt)  # the last token is always computed
        self.queried_tokens += len(tokens)
        prefix = cached_prefix(tokens, salt, self._pool.weights)
        mine = _UnderWay(prefix, rank, digests, asyncio.get_running_loop().create_future())
        self._forget(lead)
        self._under_way[lead] = mine
        base, from_disk = await self._pin(lead, prefix) if digests else (None, 0)
        mine.number = next(self._numbers)
        waits = 0
        while not mine.ended.done():
            other = self._awaited(mine, base)
            self._announce(mine)
            if other is None:
                break
            waits += 1
            if base is not None:  # nothing is held while something else is waited for
                self._pool.unpin(lead, base.tokens)
            await asyncio.wait([other.ended, mine.ended], return_when=asyncio.FIRST_COMPLETED)
            if not mine.ended.done():
                base, more = await self._pin(lead, prefix)
                from_disk += more
        self.waited += waits > 0
        lent = None
        if copy_from and not mine.ended.done():
            if base is not None:  # nothing is held while something else is waited for
                self._pool.unpin(lead, base.tokens)
            lent = await self._borrow(copy_from, lead, prefix, base)
            if base is not None and lent is None and not mine.ended.done():
                base, more = await self._pin(lead, prefix)
                from_disk += more
        if mine.ended.done():  # it was cancelled meanwhile, perhaps before a shard had pinned anything
            self._pinned.add(lead)
            self._loans.give_back(lead)
            return None
        if lent is not None:  # it has all of `base`, and this shard may need the room for the prompt
            return lent
        return None if base is None else replace(base, disk_tokens=min(from_disk, base.tokens))

    def reused(self, base: Base) -> None:
        """A prompt has been computed from `base`, which `find` has returned."""
        if base.here:
            self.hit_tokens["disk"] += base.disk_tokens
            self.hit_tokens["host"] += base.tokens - base.disk_tokens
        else:
            self.hit_tokens["other node"] += base.tokens

    def _awaited(self, mine: _UnderWay, base: Base | None) -> _UnderWay | None:
        """A prompt that goes before and computes enough more of this one than `base`, which is cached."""
        held = base.tokens // self.block_size if base is not None else 0
        for place in range(len(mine.digests) - 1, held + self._least_blocks - 2, -1):
            other = self._coming.get(mine.digests[place])
            if other is not None and other.goes_before(mine):
                return other
        return None

    async def _borrow(self, pool_id: str, lead: RequestKey, prefix: kp.CachedPrefix, own: Base | None) -> Base | None:
        """What the shard has of the prompt, if it is enough more than what this node's has."""
        lent = await self._loans.borrow(pool_id, lead, prefix)
        least = self._least_blocks * self.block_size + (own.tokens if own is not None else 0)
        if lent is not None and lent.tokens >= least:
            return lent
        self._loans.give_back(lead)
        return None

    async def _pin(self, lead: RequestKey, prefix: kp.CachedPrefix) -> tuple[Base | None, int]:
        """What the shard has of the prompt, and how many tokens of it came from disk just now."""
        self._pinned.add(lead)
        try:
            held = await self._pool.pin(lead, prefix)
        except AlignedServeError as error:
            logger.warning("the prefix cache could not be asked: %s", error, extra={"request_id": lead.request_id})
            return None, 0
        if not held.block_ids:
            return None, 0
        blocks, checksums = list(held.block_ids), list(held.checksums)
        base = Base(held.kv_tokens, blocks, checksums, self._pool_id, here=True, cached=True)
        return base, held.disk_tokens

    def let_go(self, pin: RequestKey, base: Base) -> None:
        """The prompt does without `base`, which `find` has returned, and is still under way."""
        if base.here:
            self._pool.unpin(pin, base.tokens)
        else:
            self._loans.give_back(pin)

    def spoiled(self, lead: RequestKey, base: Base, index: int) -> None:
        """Block number `index` of what `base` has differs from what was written (kv_pool.verify).

        The shard must not find it any more. Else the block that is computed again would give way to it.
        """
        mine = self._under_way.get(lead)
        if mine is not None:
            shared = base.tokens // self.block_size - len(base.block_ids)  # blocks that were here already
            end = (shared + index + 1) * self.block_size * TOKEN_BYTES
            spoiled = kp.CachedPrefix()
            spoiled.CopyFrom(mine.prefix)
            spoiled.token_ids = mine.prefix.token_ids[:end]
            self._loans.forget(base.pool_id, spoiled)

    def ended(self, leads: Iterable[RequestKey], *, committed: bool = False) -> None:
        """These prompts are no longer under way. Without `committed` their pins end too."""
        gone = []
        for lead in leads:
            self._loans.give_back(lead)
            self._forget(lead)
            if lead in self._pinned:
                self._pinned.discard(lead)
                gone.append(lead)
        if gone and not committed:
            self._pool.release(gone)

    def _forget(self, lead: RequestKey) -> None:
        mine = self._under_way.pop(lead, None)
        if mine is not None:
            for digest in mine.digests:
                if self._coming.get(digest) is mine:
                    del self._coming[digest]
            mine.ended.set_result(None)

    def _announce(self, mine: _UnderWay) -> None:
        """The KV of its prefixes will be cached when the prompt has been computed, unless another comes before."""
        for digest in mine.digests:
            if mine.goes_before(self._coming.setdefault(digest, mine)):
                self._coming[digest] = mine

    def _digests(self, tokens: Sequence[int], salt: bytes) -> list[bytes]:
        """A digest of each prefix of full blocks."""
        chain = Chain(root_digest(salt.hex()), tokens, self.block_size)
        digests = bytes(chain.digests(chain.blocks))
        return [digests[begin : begin + DIGEST_BYTES] for begin in range(0, len(digests), DIGEST_BYTES)]
