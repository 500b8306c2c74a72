"""What the shard's decisions do with the prefix index: which blocks a commit uses, and what stays cached."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from alignedserve.config import Config
from alignedserve.errors import AccountingError, TransferError
from alignedserve.kv_pool.block_table import NONE
from alignedserve.kv_pool.prefix_chain import Chain
from alignedserve.kv_pool.prefix_index import PrefixIndex
from alignedserve.kv_pool.table import AllocationTable
from alignedserve.scheduler.cache.sessions import Note, Sessions
from alignedserve.scheduler.cache.values import CachePolicy, cache_policy
from alignedserve.scheduler.cost.load import configured_cost
from alignedserve.scheduler.cost.step import ChunkShape
from alignedserve.scheduler.instance.block_allocator import Writer
from alignedserve.scheduler.instance.caching_allocator import CachingAllocator


def configured_policy(config: Config, block_size: int) -> CachePolicy:
    """`kv_pool.cache_policy` with the configured cost model."""
    cost = configured_cost(config.scheduler)

    def prefill_s(tokens: int) -> float:  # without a cost model the unit is a token
        return cost.step_s([ChunkShape(tokens, 0)], ()) if cost is not None else float(tokens)

    return cache_policy(config.kv_pool.cache_policy, prefill_s, block_size)


def open_index(config: Config, table: AllocationTable, block_size: int) -> PrefixIndex | None:
    """The prefix index, over the entries in the segment; None without `kv_pool.prefix_cache`."""
    if not config.kv_pool.prefix_cache:
        table.forget_index()
        return None
    return PrefixIndex(table.open_index(), block_size, configured_policy(config, block_size))


@dataclass(frozen=True, slots=True)
class Placement:
    """The blocks of a request, with those that the index has already in place of the writer's.

    The first `known` blocks are indexed. Blocks `known .. end - 1` are to be indexed as blocks of `chain`.
    """

    block_ids: list[int]
    checksums: list[int]
    known: int = 0
    end: int = 0
    chain: Chain | None = None


@dataclass(frozen=True, slots=True)
class Continuation:
    """Blocks that continue the indexed blocks `found` of `chain`, from number `len(found)` on."""

    chain: Chain
    found: list[int]
    block_ids: list[int]


class PrefixCache:
    """The index of a shard and its allocator, kept in step: an indexed block is held or cached.

    The indexed blocks of a holding are its first ones, each continued by the next. So what a held block continues is
    held too, and a prefix is never cut.
    """

    def __init__(self, index: PrefixIndex, blocks: CachingAllocator, sessions: Sessions) -> None:
        self.index = index
        self.blocks = blocks
        self.sessions = sessions

    def place(
        self,
        root: bytes,
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        replaceable: Collection[int],
        checksums: Sequence[int],
    ) -> Placement:
        """Where the KV of `token_ids`, written to `block_ids`, is to be. Changes nothing.

        A block in `replaceable` gives way to one that the index has for the same tokens. At the first that cannot, the
        rest stays as it is and is not indexed. Raises TransferError if an indexed block would not be where its tokens
        are, and if `root` is not a digest.
        """
        placed = self._match(root, token_ids, block_ids, replaceable, checksums) if token_ids else None
        placed = placed or Placement(list(block_ids), list(checksums))
        indexed = self.index.indexed
        if any(indexed[block] for block in placed.block_ids[placed.known :]):
            leading = self.index.linked(placed.block_ids)
            if any(indexed[block] for block in placed.block_ids[leading:]):
                raise TransferError(
                    f"{self.blocks.store_id}: blocks from {placed.block_ids[leading]} on do not continue those before "
                    "them: write the request in full"
                )
        return placed

    def _match(
        self,
        root: bytes,
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        replaceable: Collection[int],
        checksums: Sequence[int],
    ) -> Placement | None:
        index = self.index
        chain = index.chain(root, token_ids)
        final, sums = list(block_ids), list(checksums)
        found = index.match(chain, len(final))
        known = len(found)
        if found != final[:known]:
            for place, block in enumerate(found):
                if final[place] == block:
                    continue
                its_sum = index.checksums([block]) if sums else ()
                if final[place] not in replaceable or (sums and not its_sum):
                    known = place
                    break
                final[place] = block
                sums[place : place + 1] = its_sum
            if len(set(final)) < len(final):  # it names a block that the index knows by other tokens
                return None
        end = known
        if known == len(found):
            last = min(chain.blocks, len(final))
            while end < last and not index.indexed[final[end]]:
                end += 1
        return Placement(final, sums, known, end, chain)

    def index_placed(self, placed: Placement, joined: Sequence[int], request_id: str = "") -> None:
        """Index the new blocks of a placement. `joined`: indexed blocks that the request did not hold before."""
        if joined:
            self.index.queue.use(joined)
        if placed.chain is not None:
            begin, end = placed.known, placed.end
            parent = placed.block_ids[begin - 1] if begin else NONE
            self.index.insert(placed.chain, begin, placed.block_ids[begin:end], parent, placed.checksums[begin:end])
            self.sessions.came_back(request_id, placed.chain.digests(end), begin, end)

    def rest(self, block_ids: Sequence[int], request_id: str = "") -> None:
        """A holder has let go of some of these blocks of one chain: rank what is cached now.

        `request_id`: of a request that has ended.
        """
        cached = self.blocks.cached
        if any(cached[block] for block in reversed(block_ids)):
            self._touch(self.index.leading(block_ids), request_id)

    def _touch(self, block_ids: Sequence[int], request_id: str) -> None:
        chance = 1.0
        if request_id and block_ids:
            last, sessions = block_ids[-1], self.sessions
            sessions.returns.look(sessions.clock(), self.index.evicted_blocks, self.blocks.cached_blocks)
            chance = self.sessions.ended(request_id, self.index.digest_of(last), last, len(block_ids))
        self.index.queue.touch(block_ids, chance)

    def note_ending(self, request_id: str, note: Note) -> None:
        """The gateway says how a request ended: rank its blocks again, if they are cached already."""
        session = self.sessions.note(request_id, note)
        if session is None or not self.index.indexed[session.block]:
            return
        if self.index.digest_of(session.block) == session.digests[-1]:
            self.index.queue.touch(self.index.chain_to(session.block), self.sessions.chance(session))

    def match(self, root: bytes, token_ids: Sequence[int], most_blocks: int) -> list[int]:
        """The indexed blocks of the longest prefix of these tokens. Raises TransferError if `root` is not a digest."""
        return self.index.match(self.index.chain(root, token_ids), most_blocks)

    def find(self, root: bytes, token_ids: Sequence[int], most_blocks: int, request_id: str) -> tuple[list[int], int]:
        """Like `match`, for a request that is going to use the blocks.

        Also the number of them that an earlier request of its conversation has used: a use counts once a conversation.
        """
        chain = self.index.chain(root, token_ids)
        found = self.index.match(chain, most_blocks)
        return found, self.sessions.came_back(request_id, chain.digests(len(found)), 0, len(found))

    def continuation(
        self, root: bytes, token_ids: Sequence[int], block_ids: Sequence[int], first_block: int, leased: Sequence[int]
    ) -> Continuation:
        """Which of `block_ids`, written as the blocks from number `first_block` on, can be added to the index.

        Raises TransferError if `root` is not a digest.
        """
        chain = self.index.chain(root, token_ids)
        end = min(chain.blocks, first_block + len(block_ids))
        found = self.index.match(chain, end)
        new: list[int] = []
        if len(found) >= first_block:
            mine = set(leased)
            for block in block_ids[len(found) - first_block : end - first_block]:
                if block not in mine:
                    break
                mine.discard(block)
                new.append(block)
        return Continuation(chain, found, new)

    def add_cached(self, new: Continuation, checksums: Sequence[int], request_id: str) -> None:
        """Index blocks of a request that are cached already. `checksums`: one for each, or none."""
        parent = new.found[-1] if new.found else NONE
        self.index.insert(new.chain, len(new.found), new.block_ids, parent, checksums)
        self._touch(self.index.leading([*new.found, *new.block_ids]), request_id)

    def remove(self, block_ids: Sequence[int], spared: Collection[int]) -> int:
        """Remove these blocks (`PrefixIndex.begun_by`) from the index, but those in `spared`, which has whole prefixes.

        Some may have been removed already. Returns the number of blocks removed.
        """
        ids = [block for block in block_ids if self.index.indexed[block] and block not in spared]
        self.index.remove(ids)
        self.blocks.uncache([block for block in ids if self.blocks.cached[block]])
        return len(ids)

    def take_over(self, unclaimed: Collection[int], writer: Writer) -> list[int]:
        """At a succession: of these blocks, leased to `writer`, the indexed ones are cached. Returns them."""
        indexed = self.index.indexed
        kept = [block for block in unclaimed if indexed[block]]
        self.blocks.cache_leased(kept, writer)
        return kept

    def check_integrity(self) -> None:
        """Recount the index. Raises AccountingError if it does not match the allocator."""
        self.index.check_integrity(self.blocks.cached)
        for block, (indexed, cached) in enumerate(zip(self.index.indexed, self.blocks.cached, strict=True)):
            if indexed and not cached and not self.blocks.holder_count(block):
                raise AccountingError(f"{self.blocks.store_id}: block {block} is indexed, but neither held nor cached")
