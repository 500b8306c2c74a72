"""Prefix cache: which part of a prompt this node's shard already holds, so that only the rest is computed.

Matched blocks are pinned for the request that leads the job: they are its `Base`, as adopted KV is. Prompts that share
more with a prompt under way here than with the cache wait until its blocks are committed, so that a prefix that comes
with several prompts at once is computed once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from alignedserve.control.prefixes import cached_prefix
from alignedserve.errors import AlignedServeError
from alignedserve.kv_pool.prefix_chain import DIGEST_BYTES, Chain, root_digest
from alignedserve.kv_pool.writer import PoolWriter
from alignedserve.metrics import Page
from alignedserve.prefill_worker.loans import Loans
from alignedserve.prefill_worker.loop import Base
from alignedserve.request import RequestKey

logger = logging.getLogger(__name__)

LEAST_SHARED_BLOCKS = 8
"""A prompt waits for another one only if that computes at least this many blocks for it: a shorter part is computed
again in less time than its copy to the pool takes."""


class Prefixes:
    """For one event loop. Any failure of the shard costs a match, and never a request."""

    def __init__(self, pool: PoolWriter, pool_id: str, block_size: int, loans: Loans) -> None:
        self._pool = pool
        self._loans = loans
        self._pool_id = pool_id
        self._block_size = block_size
        self._pinned: set[RequestKey] = set()
        self._coming: dict[bytes, asyncio.Future[None]] = {}  # digest of a prefix of full blocks -> when it is cached
        self._under_way: dict[RequestKey, tuple[list[bytes], asyncio.Future[None]]] = {}
        self.queried_tokens = 0
        self.hit_tokens = {"host": 0, "disk": 0, "other node": 0}  # by where their KV was
        self.waited = 0

    def show_metrics(self, page: Page) -> None:
        meaning = "tokens of prompts that were looked up in the prefix cache"
        page.counter("prefix_cache_queried_tokens_total", meaning, self.queried_tokens)
        meaning = "tokens of prompts whose KV the prefix cache had, by where it was"
        for tier, tokens in self.hit_tokens.items():
            page.counter("prefix_cache_hit_tokens_total", meaning, tokens, tier=tier)
        meaning = "prompts that waited for another prompt to compute what both begin with"
        page.counter("prefix_cache_waited_prompts_total", meaning, self.waited)

    async def find(self, lead: RequestKey, tokens: Sequence[int], salt: bytes, copy_from: str = "") -> Base | None:
        """Pin what the shard has of the prompt; None if it has nothing. `ended` must follow, whatever happens.

        `copy_from`: a shard of another node that may have more.
        """
        digests = self._digests(tokens[:-1], salt)  # the last token is always computed
        self.queried_tokens += len(tokens)
        base, from_disk = await self._pin(lead, tokens, salt) if digests else (None, 0)
        held = base.tokens // self._block_size if base is not None else 0
        coming = next((self._coming[digest] for digest in reversed(digests[held:]) if digest in self._coming), None)
        shared = max((index + 1 for index, digest in enumerate(digests) if digest in self._coming), default=0) - held
        self._announce(lead, digests)
        if coming is not None and shared >= LEAST_SHARED_BLOCKS:
            self.waited += 1
            if base is not None:  # nothing is held while something else is waited for
                self._pool.unpin(lead, base.tokens)
            await asyncio.wait([coming])
            base, more = await self._pin(lead, tokens, salt)
            from_disk += more
        if copy_from and (lent := await self._borrow(copy_from, lead, tokens, salt, base)) is not None:
            self.hit_tokens["other node"] += lent.tokens
            return lent
        if base is not None:
            from_disk = min(from_disk, base.tokens)
            self.hit_tokens["disk"] += from_disk
            self.hit_tokens["host"] += base.tokens - from_disk
        return base

    async def _borrow(
        self, pool_id: str, lead: RequestKey, tokens: Sequence[int], salt: bytes, own: Base | None
    ) -> Base | None:
        """What the shard has of the prompt, if it is at least LEAST_SHARED_BLOCKS more than what this node's has."""
        lent = await self._loans.borrow(pool_id, lead, cached_prefix(tokens, salt))
        least = LEAST_SHARED_BLOCKS * self._block_size + (own.tokens if own is not None else 0)
        if lent is not None and lent.tokens >= least:
            return lent
        self._loans.give_back(lead)
        return None

    async def _pin(self, lead: RequestKey, tokens: Sequence[int], salt: bytes) -> tuple[Base | None, int]:
        """What the shard has of the prompt, and how many tokens of it came from disk just now."""
        self._pinned.add(lead)
        try:
            held = await self._pool.pin(lead, cached_prefix(tokens, salt))
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

    def ended(self, leads: Iterable[RequestKey], *, committed: bool = False) -> None:
        """These prompts are no longer under way. Without `committed` their pins end too."""
        gone = []
        for lead in leads:
            self._loans.give_back(lead)
            digests, ready = self._under_way.pop(lead, ((), None))
            for digest in digests:
                if self._coming.get(digest) is ready:
                    del self._coming[digest]
            if ready is not None and not ready.done():
                ready.set_result(None)
            if lead in self._pinned:
                self._pinned.discard(lead)
                gone.append(lead)
        if gone and not committed:
            self._pool.release(gone)

    def _announce(self, lead: RequestKey, digests: list[bytes]) -> None:
        """The KV of these prefixes will be cached when the prompt has been computed."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._under_way[lead] = digests, ready
        for digest in digests:
            self._coming.setdefault(digest, ready)

    def _digests(self, tokens: Sequence[int], salt: bytes) -> list[bytes]:
        """A digest of each prefix of full blocks."""
        chain = Chain(root_digest(salt.hex()), tokens, self._block_size)
        digests = bytes(chain.digests(chain.blocks))
        return [digests[begin : begin + DIGEST_BYTES] for begin in range(0, len(digests), DIGEST_BYTES)]
