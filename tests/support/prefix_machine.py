"""A shard with a prefix index beside a model of what each block holds, killed between any two writes.

The model writes into every leased block, as writers may at any moment. No match may ever lead to such a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from alignedserve.errors import AlignedServeError
from alignedserve.kv_pool import prefix_index
from alignedserve.kv_pool.prefix_chain import digest, root_digest
from alignedserve.kv_pool.records import WriterKey
from alignedserve.request import RequestKey
from alignedserve.scheduler.cache import eviction
from alignedserve.scheduler.cache.returns import KINDS
from alignedserve.scheduler.cache.sessions import Note
from alignedserve.scheduler.cache.values import LruPolicy, ValuePolicy
from support.kv_pool import drop_prefix
from support.prefix_pool import Fuse, Killed, index_memory, open_indexed

CAPACITY = 18
SIZE = 4
ROOTS = [root_digest("model", salt) for salt in ("", "salt")]
WRITERS = st.sampled_from([WriterKey("prefill", "p", 1), WriterKey("decode", "d", 1)])
NAMES = st.sampled_from("abcd")
# Few kinds of blocks, so that prefixes are shared; then a partly filled block.
PROMPTS = st.tuples(st.sampled_from(ROOTS), st.lists(st.integers(0, 1), max_size=5), st.integers(0, 3))
PINS = st.sampled_from(("~pin-x", "~pin-y"))
FUSES = st.one_of(st.just(-1), st.just(-1), st.integers(0, 25))

Prompt = tuple[bytes, list[int], int]
Result = TypeVar("Result")


def tokens_of(prompt: Prompt) -> list[int]:
    _, kinds, rest = prompt
    return [kind * 10 + place for kind in kinds for place in range(SIZE)] + [99] * rest


class PrefixMachine(RuleBasedStateMachine):
    """`content`: what was written to each block last: a root and all tokens up to the block's end, or None for scraps.

    `requests`: every sequence of tokens that a request has been committed with; `epochs`: its current epoch.
    """

    few = 48
    own_writer: WriterKey | None = None  # of the shard's process

    @initialize(collide=st.booleans(), lru=st.booleans(), reserve=st.integers(0, 3))
    def start(self, *, collide: bool, lru: bool, reserve: int) -> None:
        prefix_index.FEW, eviction.FEW = self.few, min(self.few, 32)
        self.memory, self.reserve = index_memory(CAPACITY), reserve
        self.digest = (lambda _: bytes(16)) if collide else digest
        self.policy = LruPolicy() if lru else ValuePolicy(lambda tokens: 1 + tokens**1.5, SIZE)
        self.content: dict[int, object] = {}
        self.requests: dict[str, list[tuple[bytes, list[int]]]] = {}
        self.epochs = dict.fromkeys("abcd", 0)
        self.known: list[tuple[bytes, list[int]]] = []
        self.kills = 0
        self.open_pool()

    def open_pool(self) -> None:
        self.fuse = Fuse()
        self.pool, self.index = open_indexed(
            self.memory, CAPACITY, self.policy, self.reserve, self.fuse, digest=self.digest
        )

    def until_killed(self, fuse: int, step: Callable[[], Result]) -> Result | None:
        """The result of `step`; None, and a successor, if it was killed."""
        self.fuse.left = fuse
        try:
            return step()
        except Killed:
            self.kills += 1
            self.open_pool()
            return None
        finally:
            self.fuse.left = -1

    def write(self, blocks: list[int], root: bytes, tokens: list[int], first: int = 0) -> None:
        for place, block in enumerate(blocks, first + 1):
            self.content[block] = (root, tuple(tokens[: place * SIZE]))

    def lease(self, writer: WriterKey, count: int) -> list[int] | None:
        """Blocks leased to the writer; None if it is lost or there is no room."""
        try:
            missing = count - len(self.pool._blocks.leased_to(writer))
            if missing > 0:
                self.pool.want(writer, missing)
            self.pool.hello(writer)  # it no longer waits
        except AlignedServeError:
            return None
        leased = self.pool._blocks.leased_to(writer)
        return leased[:count] if len(leased) >= count else None

    def commit_tokens(
        self, writer: WriterKey, name: str, root: bytes, tokens: list[int], kept: list[int], fuse: int
    ) -> None:
        fresh = self.lease(writer, -(-len(tokens) // SIZE) - len(kept))
        if fresh is None or not tokens:
            return
        self.write(fresh, root, tokens, len(kept))
        self.requests.setdefault(name, []).append((root, tokens))
        self.known.append((root, tokens))
        key, blocks = RequestKey(name, self.epochs[name]), [*kept, *fresh]

        def step() -> bool:
            self.pool.commit(
                writer, key, len(tokens), blocks, kept_blocks=len(kept), payload=b"p", token_ids=tokens, root=root
            )
            return True

        if self.until_killed(fuse, step):
            holding = self.pool.holding(name)
            assert holding is not None
            assert len(holding.block_ids) == len(blocks)
            assert set(blocks) - set(holding.block_ids) <= set(self.pool._blocks.leased_to(writer))

    @rule(writer=WRITERS, name=NAMES, prompt=PROMPTS, fuse=FUSES)
    def commit(self, writer: WriterKey, name: str, prompt: Prompt, fuse: int) -> None:
        self.commit_tokens(writer, name, prompt[0], tokens_of(prompt), [], fuse)

    @rule(writer=WRITERS, name=NAMES, more=st.integers(1, 6), kind=st.integers(0, 1), fuse=FUSES)
    def grow(self, writer: WriterKey, name: str, more: int, kind: int, fuse: int) -> None:
        """The request was continued from what it holds: its full blocks stay."""
        holding = self.pool.holding(name)
        if holding is None:
            return
        kept = list(holding.block_ids[: holding.kv_tokens // SIZE])
        root, before = self.held_tokens(name)
        self.commit_tokens(writer, name, root, [*before, *[kind * 10] * more], kept, fuse)

    @rule(name=NAMES, prompt=PROMPTS, newer=st.booleans(), fuse=FUSES)
    def pin(self, name: str, prompt: Prompt, *, newer: bool, fuse: int) -> None:
        root, tokens = prompt[0], tokens_of(prompt)
        self.epochs[name] += newer
        key = RequestKey(name, self.epochs[name])
        before = self.pool.holding(name)
        most = max(0, min(self.pool.match(root, tokens), (len(tokens) - 1) // SIZE))
        self.requests.setdefault(name, []).append((root, tokens))
        found = self.until_killed(fuse, lambda: self.pool.pin(key, root, tokens, len(tokens)))
        if found is not None and (before is None or before.key != key) and found[0].block_ids:
            assert len(found[0].block_ids) == most

    @rule(name=NAMES, fuse=FUSES, how=st.sampled_from(("release", "drop")))
    def release(self, name: str, fuse: int, how: str) -> None:
        holding = self.pool.holding(name)
        key = RequestKey(name, self.epochs[name])
        if how == "drop" and holding is not None:
            self.until_killed(fuse, lambda: self.pool.drop([(holding.key, holding.kv_tokens)]))
        elif how == "release":
            self.epochs[name] += 1
            self.until_killed(fuse, lambda: self.pool.release([key]))

    @rule(name=NAMES, most=st.integers(1, 24), fuse=FUSES)
    def adopt(self, name: str, most: int, fuse: int) -> None:
        self.epochs[name] += 1
        self.until_killed(fuse, lambda: self.pool.adopt([(RequestKey(name, self.epochs[name]), most)]))

    @rule(writer=WRITERS, prompt=PROMPTS, first=st.integers(0, 4), fuse=FUSES, name=st.sampled_from(("", *"abcd")))
    def cache(self, writer: WriterKey, prompt: Prompt, first: int, fuse: int, name: str) -> None:
        root, tokens = prompt[0], tokens_of(prompt)
        blocks = self.lease(writer, max(0, len(tokens) // SIZE - first))
        if not blocks:
            return
        self.write(blocks, root, tokens, first)
        self.known.append((root, tokens))
        result = self.until_killed(fuse, lambda: self.pool.cache(writer, root, tokens, blocks, first, (), name))
        if result is not None:
            assert set(blocks) - set(result[0]) <= set(self.pool._blocks.leased_to(writer))

    @rule(prompt=PROMPTS, fuse=FUSES)
    def drop_prefix(self, prompt: Prompt, fuse: int) -> None:
        root, tokens = prompt[0], tokens_of(prompt)
        if not tokens:
            return
        before = [self.pool.match(*known) for known in self.known]
        whole = not prompt[2] and self.pool.match(root, tokens) * SIZE == len(tokens)
        dropped = self.until_killed(fuse, lambda: drop_prefix(self.pool, root, tokens))
        if dropped is None:
            return
        assert dropped > 0 or not whole
        for (its_root, known), count in zip(self.known, before, strict=True):
            left = self.pool.match(its_root, known)
            both = enumerate(zip(known, tokens, strict=False)) if its_root == root else ()
            alike = next((at for at, (one, other) in both if one != other), min(len(known), len(tokens)))
            alike *= its_root == root
            if alike == len(tokens):
                assert left * SIZE < len(tokens)
            elif count * SIZE > alike:  # its last block is of another prefix
                assert left == count

    @rule(root=st.sampled_from(ROOTS), fuse=FUSES)
    def drop_root(self, root: bytes, fuse: int) -> None:
        if self.until_killed(fuse, lambda: drop_prefix(self.pool, root, [])) is not None:
            assert all(self.pool.match(root, tokens) == 0 for known, tokens in self.known if known == root)

    @rule(prompt=PROMPTS, name=PINS, fuse=FUSES)
    def keep(self, prompt: Prompt, name: str, fuse: int) -> None:
        """What is cached is held under a name, in place of what was."""
        root, tokens = prompt[0], tokens_of(prompt)[: len(prompt[1]) * SIZE]
        found = self.pool.indexed(root, tokens)
        if tokens and len(found) * SIZE == len(tokens):
            self.requests.setdefault(name, []).append((root, tokens))
            before = self.pool.holding(name)
            kept = self.until_killed(fuse, lambda: self.pool.keep(name, found, b"what it is"))
            now = self.pool.holding(name)
            if kept is None:
                assert now == before or (now is not None and list(now.block_ids) == found)
            else:
                assert kept[0] == now
            assert now is None or self.pool.read(now.key) == (now, b"what it is")

    @rule(name=PINS, fuse=FUSES)
    def let_go(self, name: str, fuse: int) -> None:
        self.until_killed(fuse, lambda: self.pool.let_go(name))

    @rule(writer=WRITERS, count=st.integers(1, 8), fuse=FUSES)
    def want(self, writer: WriterKey, count: int, fuse: int) -> None:
        if writer in self.pool._lost or self.pool._has_ended(writer):
            return
        free = self.pool.counts().free - self.pool.counts().leased
        evicted = self.index.evicted_blocks
        grants = self.until_killed(fuse, lambda: self.pool.want(writer, count))
        if grants is not None:
            granted = sum(len(grant.block_ids) for grant in grants)
            assert self.index.evicted_blocks - evicted == max(0, granted - free)  # free blocks first

    @rule(writer=WRITERS, fuse=FUSES, dead=st.booleans())
    def lose(self, writer: WriterKey, fuse: int, *, dead: bool) -> None:
        """It is lost, or has ended and is followed by a process that the shard takes for new after its own restart."""
        self.until_killed(fuse, lambda: self.pool.writer_lost(writer))
        if dead:
            self.until_killed(fuse, lambda: self.pool.writer_dead(writer))
            self.open_pool()

    @rule(name=NAMES, kind=st.sampled_from(KINDS), session=st.sampled_from(("", "s")))
    def note_ending(self, name: str, kind: str, session: str) -> None:
        self.pool.note_ending(name, Note(kind, session, 0.0))
        sessions = self.pool.sessions
        assert sessions is not None
        linked = {digest for one in sessions for digest in one.digests}
        assert sessions._by_digest.keys() <= linked

    @rule()
    def succeed(self) -> None:
        self.open_pool()

    def held_tokens(self, name: str) -> tuple[bytes, list[int]]:
        """The tokens of the full blocks that a request holds, as its blocks say: they must be its own."""
        holding = self.pool.holding(name)
        assert holding is not None
        full = holding.block_ids[: holding.kv_tokens // SIZE]
        for root, tokens in reversed(self.requests[name]):
            expected = [(root, tuple(tokens[: place * SIZE])) for place in range(1, len(full) + 1)]
            if [self.content[block] for block in full] == expected and len(tokens) >= len(full) * SIZE:
                return root, tokens[: len(full) * SIZE]
        raise AssertionError(f"{name} holds {[self.content[block] for block in full]}")

    @invariant()
    def what_is_found_is_what_was_written(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        counts = self.pool.counts()
        assert counts.free + counts.owned + counts.cached == CAPACITY
        assert self.pool.room() == counts.free + counts.cached
        leases = self.pool._blocks._leases.items()
        set_aside = {block for writer, each in leases if writer != self.own_writer for block in each}
        set_aside |= {block for each in self.pool._blocks._quarantine.values() for block in each}
        for block in set_aside:  # its writer may write to it at any moment
            assert not self.index.indexed[block]
            self.content[block] = None
        for root, tokens in self.known[-25:]:
            found = self.index.match(self.index.chain(root, tokens), 99)
            assert [self.content[block] for block in found] == [
                (root, tuple(tokens[: place * SIZE])) for place in range(1, len(found) + 1)
            ]
        for holding in self.pool.inventory():
            self.held_tokens(holding.key.request_id)

    def teardown(self) -> None:
        """All requests end and all writers die: what is not free is cached, and all of it can be had."""
        prefix_index.FEW, eviction.FEW = 48, 32
        if not hasattr(self, "pool"):
            return
        self.pool.release([RequestKey(name, 10**6) for name in "abcd"])
        for name in ("~pin-x", "~pin-y"):
            self.pool.let_go(name)
        for writer in self.pool.writers():
            self.pool.writer_dead(writer)
        counts = self.pool.counts()
        assert (counts.owned, counts.leased) == (0, 0)
        assert counts.free + counts.cached == CAPACITY
        (grant,) = self.pool.want(WriterKey("decode", "last", 1), CAPACITY)
        assert len(grant.block_ids) == CAPACITY
        assert self.index.blocks == 0
        self.pool.check_integrity()


class ManyMachine(PrefixMachine):
    """The same, with every step on blocks done by calls of NumPy."""

    few = 0
