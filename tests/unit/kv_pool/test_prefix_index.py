"""The prefix index: exact matches whatever the digests are, in few and in many blocks, and what a successor finds."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable

import numpy as np
import pytest

from alignedserve.errors import AccountingError, TransferError
from alignedserve.kv_pool import prefix_index
from alignedserve.kv_pool.block_table import NONE, BlockTable
from alignedserve.kv_pool.entries import Ids, IndexEntries, entry_bytes
from alignedserve.kv_pool.prefix_chain import Chain, digest, root_digest
from alignedserve.kv_pool.prefix_index import PrefixIndex
from alignedserve.scheduler.cache.values import LruPolicy

ROOT, OTHER_ROOT = root_digest("model", ""), root_digest("model", "salt")


def truncated(data: bytes) -> bytes:
    """A digest of three bits: nearly all prefixes collide."""
    return bytes([hashlib.blake2b(data, digest_size=1).digest()[0] & 7]) + bytes(15)


class Model:
    """What each block holds: its root and all tokens up to its end."""

    def __init__(self, capacity: int, block_size: int, digest: Callable[[bytes], bytes]) -> None:
        self.size, self.digest = block_size, digest
        self.memory = memoryview(bytearray(capacity * entry_bytes(block_size)))
        self.held: dict[tuple[bytes, tuple[int, ...]], int] = {}
        self.free = list(range(capacity))
        self.open()

    def open(self, void: list[int] | None = None) -> None:
        self.index = PrefixIndex(IndexEntries(self.memory, self.size), self.size, LruPolicy(), self.digest)
        self.index.recover(void or [])

    def match(self, root: bytes, tokens: list[int]) -> list[int]:
        found = []
        for end in range(self.size, len(tokens) + 1, self.size):
            block = self.held.get((root, tuple(tokens[:end])))
            if block is None:
                break
            found.append(block)
        return found

    def check(self) -> None:
        cached = bytearray(len(self.index.indexed))
        for block in self.held.values():
            cached[block] = 1
        self.index.check_integrity(cached)

    def insert(self, root: bytes, tokens: list[int], checksums: bool = False) -> None:
        chain = self.index.chain(root, tokens)
        found = self.index.match(chain, chain.blocks)
        count = min(chain.blocks - len(found), len(self.free))
        new = [self.free.pop(0) for _ in range(count)]
        sums = [block * 3 + 1 for block in new] if checksums else ()
        self.index.insert(chain, len(found), new, found[-1] if found else NONE, sums)
        for place, block in enumerate(new, len(found) + 1):
            self.held[root, tuple(tokens[: place * self.size])] = block
        self.index.queue.touch([*found, *new])

    def evict(self, count: int) -> None:
        cached = bytearray(b"\1") * len(self.index.indexed)
        names = {block: name for name, block in self.held.items()}
        for block in self.index.evict(count, cached):
            root, tokens = names[block]
            assert not any(
                r == root and len(t) > len(tokens) and t[: len(tokens)] == tokens for r, t in self.held
            )  # a prefix is never cut
            del self.held[root, tokens]
            self.free.append(block)


@pytest.mark.parametrize("few", [0, 48])
@pytest.mark.parametrize("make", [digest, truncated], ids=["digest", "truncated"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_matches_are_those_of_a_dict_of_prefixes(
    block_size: int, make: Callable[[bytes], bytes], few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_index, "FEW", few)
    draw, model = random.Random(block_size + few), Model(64, block_size, make)
    known: list[tuple[bytes, list[int]]] = []
    hits = misses = 0
    for turn in range(150):
        root, base = draw.choice(known[-12:]) if known and draw.random() < 0.8 else (ROOT, [])
        root = OTHER_ROOT if draw.random() < 0.1 else root
        more = [draw.randint(0, 2) for _ in range(draw.randint(0, 4 * block_size))]
        tokens = base[: draw.choice([len(base), draw.randint(0, len(base))])] + more
        found = model.index.match(model.index.chain(root, tokens), draw.choice([3, 1000]))
        expected = model.match(root, tokens)
        assert found == expected[: len(found)]
        assert len(found) in (min(3, len(expected)), len(expected))
        hits += len(found)
        misses += len(expected) < len(tokens) // block_size
        action = draw.random()
        if action < 0.6:
            model.insert(root, tokens)
            known.append((root, tokens))
        elif action < 0.9:
            model.evict(draw.randint(1, 12))
        elif action < 0.95:
            model.open()
        if turn % 15 == 0:
            model.check()
    assert hits > 50
    assert misses > 50


def test_prefixes_of_equal_digests_are_told_apart_by_what_comes_before_a_block() -> None:
    """All digests are equal. The second block has the same tokens in both; only its parent differs."""
    model = Model(8, 4, lambda _: bytes(16))
    one, other = [1, 1, 1, 1, 9, 9, 9, 9], [2, 2, 2, 2, 9, 9, 9, 9]
    model.insert(ROOT, one)
    assert model.index.match(model.index.chain(ROOT, other), 8) == []
    assert model.index.match(model.index.chain(OTHER_ROOT, one), 8) == []
    model.insert(ROOT, other)
    assert model.index.match(model.index.chain(ROOT, one), 8) == [0, 1]
    assert model.index.match(model.index.chain(ROOT, other), 8) == [2, 3]
    model.check()
    model.open()
    assert model.index.match(model.index.chain(ROOT, other), 8) == [2, 3]


def test_long_chains_are_inserted_matched_and_evicted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "MOST_AT_ONCE", 90)
    model = Model(600, 2, digest)
    draw = random.Random(3)
    tokens = [draw.randrange(50_000) for _ in range(2 * 250)]
    fork = [*tokens[: 2 * 170], 1, *tokens[2 * 170 + 1 :]]
    model.insert(ROOT, tokens, checksums=True)
    model.insert(ROOT, fork)
    assert model.index.match(model.index.chain(ROOT, tokens), 999) == list(range(250))
    assert model.index.match(model.index.chain(ROOT, fork), 999) == [*range(170), *range(250, 330)]
    assert model.index.match(model.index.chain(ROOT, fork), 190) == [*range(170), *range(250, 270)]
    assert model.index.checksums([0, 5, 249]) == (1, 16, 748)
    assert model.index.checksums([0, 260]) == ()
    assert model.index.blocks == 330
    model.check()
    model.open()
    model.check()
    assert model.index.match(model.index.chain(ROOT, fork), 999) == [*range(170), *range(250, 330)]
    model.evict(100)  # the fork was used last
    assert len(model.index.match(model.index.chain(ROOT, fork), 999)) == 230
    assert len(model.index.match(model.index.chain(ROOT, tokens), 999)) == 170
    assert model.index.evicted_blocks == 100
    model.check()


def test_a_successor_drops_blocks_that_may_have_changed_and_all_that_continues_them() -> None:
    model = Model(16, 4, digest)
    tokens = list(range(24))
    model.insert(ROOT, tokens)
    model.insert(ROOT, [*tokens[:8], *[7] * 8])
    model.open(void=[2])
    assert model.index.match(model.index.chain(ROOT, tokens), 9) == [0, 1]
    assert model.index.match(model.index.chain(ROOT, [*tokens[:8], *[7] * 8]), 9) == [0, 1, 6, 7]
    assert model.index.indexed == bytes([1, 1, 0, 0, 0, 0, 1, 1]) + bytes(8)


def test_what_continues_a_lost_entry_is_dropped_in_one_pass_however_long_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a power failure, when a page of the disk tier's entries was not written."""
    model = Model(600, 4, digest)
    lost, kept = list(range(2000)), list(range(5000, 5200))
    model.insert(ROOT, lost)
    model.insert(ROOT, kept)
    model.index.entries.withdraw_each([0, 300])
    looks = 0
    valid = IndexEntries.valid

    def counted(entries: IndexEntries) -> Ids:
        nonlocal looks
        looks += 1
        return valid(entries)

    monkeypatch.setattr(IndexEntries, "valid", counted)
    model.open()
    assert looks <= 3
    assert model.index.match(model.index.chain(ROOT, kept), 99) == list(range(500, 550))
    assert model.index.blocks == 50
    model.index.check_integrity(model.index.indexed)
    model.index.entries.withdraw_each(list(range(500, 549)))
    model.open()
    assert model.index.blocks == 0, "no first block is left"


def test_a_prefix_goes_with_all_that_continues_it_and_what_only_it_continues() -> None:
    model = Model(32, 4, digest)
    system = list(range(16))
    for number in range(3):
        model.insert(ROOT, [*system, *[90 + number] * 12])
    model.insert(ROOT, [*system[:8], *[50] * 8])
    gone = model.index.begun_by(ROOT, system).tolist()
    assert sorted(gone) == list(range(2, 13))
    assert model.index.continued_by(3).tolist() == [block for block in gone if block != 2]
    model.index.remove(gone)
    assert model.index.match(model.index.chain(ROOT, [*system, *[90] * 12]), 9) == [0, 1]
    assert model.index.match(model.index.chain(ROOT, [*system[:8], *[50] * 8]), 9) == [0, 1, 13, 14]


@pytest.mark.parametrize(
    ("begin", "gone"),
    [
        ([], {*range(9)}),
        ([1, 2], {*range(5)}),  # less than a block
        ([1, 2, 3, 4, 5], {1, 2, 3}),  # the first block has another continuation
        ([1, 2, 3, 4, 5, 6, 7], {1, 2}),
        ([1, 2, 3, 4, 5, 6, 8], {3}),
        ([1, 2, 3, 4, 9], {4}),
        ([1, 2, 3, 4, 7], set()),
        ([1, 2, 3, 4, 5, 6, 7, 7, 9, 9, 9, 9, 9], {1, 2}),  # what is there of it ends before
        ([1, 2, 3, 4, 5, 6, 8, 8, 9], {3}),
        ([6], {5, 6}),
        ([8, 8, 8, 8, 8], {7, 8}),
    ],
)
def test_what_begins_with_tokens_that_fill_no_block_is_told_by_them(begin: list[int], gone: set[int]) -> None:
    model = Model(16, 4, digest)
    for tokens in [1, 2, 3, 4, 5, 6, 7, 7, 9, 9, 9, 9], [1, 2, 3, 4, 5, 6, 8, 8], [1, 2, 3, 4, 9, 9, 9, 9]:
        model.insert(ROOT, tokens)
    for tokens in [6] * 8, [8] * 8:
        model.insert(ROOT, tokens)
    model.insert(OTHER_ROOT, [1, 2, 3, 4, 5, 6, 7, 7])
    assert set(model.index.begun_by(ROOT, begin).tolist()) == gone


def test_a_block_is_indexed_once() -> None:
    model = Model(8, 4, digest)
    model.insert(ROOT, [1] * 8)
    with pytest.raises(AccountingError, match="already"):
        model.index.insert(model.index.chain(ROOT, [2] * 4), 0, [1], NONE)
    model.check()


def test_lists_of_one_slot_keep_all_their_blocks() -> None:
    table = BlockTable(np.zeros(64, np.int32))
    ids, hashes = np.arange(64, dtype=np.int32), np.arange(64, dtype=np.uint64) // np.uint64(8)
    table.add_all(ids, hashes)
    assert sorted(table.check().tolist()) == list(range(64))
    table.remove_all(ids[5:40], hashes[5:40])
    assert sorted(table.check().tolist()) == [*range(5), *range(40, 64)]
    table.remove_each([1, 41], [0, 5])
    table.add_each([7, 9], [5, 1])
    assert sorted(table.check().tolist()) == [0, 2, 3, 4, 7, 9, 40, *range(42, 64)]


def test_digests_are_chained_from_all_that_changes_kv() -> None:
    tokens = list(range(40))
    chain = Chain(ROOT, tokens, 16)
    assert chain.blocks == 2
    first = hashlib.blake2b(ROOT + b"".join(t.to_bytes(4, "little") for t in tokens[:16]), digest_size=16).digest()
    assert bytes(chain.digests(1)) == first
    assert bytes(chain.digests(2)) == first + digest(first + b"".join(t.to_bytes(4, "little") for t in tokens[16:32]))
    assert len({root_digest("a", "bc"), root_digest("ab", "c"), root_digest("abc"), root_digest("abc", "")}) == 4
    with pytest.raises(TransferError, match="16 bytes, not 3"):
        Chain(b"abc", tokens, 16)
