"""Pins of a shard: held under a name until they are dropped, bounded, and found again by a successor."""

from __future__ import annotations

import pytest

from alignedserve.control.prefixes import cached_prefix
from alignedserve.errors import InvalidRequestError, PinsFullError
from alignedserve.kv_pool.kept import pins
from alignedserve.kv_pool.kept.pins import Pins
from alignedserve.kv_pool.pool import KvPool
from alignedserve.kv_pool.prefix_chain import root_digest
from alignedserve.kv_pool.table import AllocationTable
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.request import PIN, RequestKey
from support.kv_pool import PREFILL, drop_prefix, leased
from support.prefix_pool import GEOMETRY, index_memory, open_indexed

CAPACITY = 40
ROOT, SALTED = root_digest("model"), root_digest("model", "salt")
OTHER_WEIGHTS = root_digest("model", "other weights")
SYSTEM, OTHER = list(range(100, 116)), list(range(300, 312))


class Shard:
    def __init__(self, fraction: float = 0.5) -> None:
        self.memory = index_memory(CAPACITY)
        self.fraction, self.now_s = fraction, 0.0
        self.open()

    def open(self) -> None:
        self.pool: KvPool = open_indexed(self.memory, CAPACITY)[0]
        self.pins = Pins(self.pool, self.fraction, lambda: self.now_s)

    def compute(self, tokens: list[int], root: bytes = ROOT) -> None:
        """Cache these tokens by a request that has ended."""
        key = RequestKey(f"r{tokens[0]}-{len(tokens)}-{root.hex()}")
        blocks = leased(self.pool, PREFILL, len(tokens) // 4)
        self.pool.commit(PREFILL, key, len(tokens), blocks, token_ids=tokens, root=root)
        self.pool.give_back(PREFILL, self.pool._blocks.leased_to(PREFILL))
        self.pool.release([RequestKey(key.request_id, 10)])

    def keep(self, name: str, tokens: list[int], salt: bytes = b"", *, everywhere: bool = False) -> bool:
        pin = kp.PinnedPrefix(name=name, prefix=cached_prefix(tokens, salt), everywhere=everywhere)
        held = self.pins.keep(pin, SALTED if salt else ROOT)[0] is not None
        self.pool.check_integrity()
        return held

    def drop(self, tokens: list[int], salt: bytes = b"") -> tuple[list[str], int]:
        """The pins that end, and the number of blocks removed."""
        names, _ = self.pins.let_go_of(cached_prefix(tokens, salt))
        return names, drop_prefix(self.pool, SALTED if salt else ROOT, tokens, self.pins.blocks)

    def crowd(self) -> None:
        """Everything that can be given up is."""
        counts = self.pool.counts()
        leased(self.pool, PREFILL, counts.free + counts.cached - counts.leased)
        self.pool.give_back(PREFILL, self.pool._blocks.leased_to(PREFILL))


@pytest.fixture
def shard() -> Shard:
    return Shard()


def test_a_pin_of_other_weights_is_stale_until_it_is_computed_again(shard: Shard) -> None:
    shard.compute(SYSTEM)
    pin = kp.PinnedPrefix(name="system", prefix=cached_prefix(SYSTEM, b"", "old"))
    before, _ = shard.pins.keep(pin, ROOT)
    assert before is not None
    assert [one.stale for one in shard.pins.listed("old", prefixes=False)] == [False]
    (listed,) = shard.pins.listed("new", prefixes=True)
    assert listed.stale
    assert listed.pin.prefix == cached_prefix(SYSTEM, b"")
    renewed = kp.PinnedPrefix(name="system", prefix=cached_prefix(SYSTEM, b"", "new"))
    assert shard.pins.keep(renewed, OTHER_WEIGHTS)[0] is None
    shard.compute(SYSTEM, OTHER_WEIGHTS)
    after, _ = shard.pins.keep(renewed, OTHER_WEIGHTS)
    assert after is not None
    assert not set(after.block_ids) & set(before.block_ids)
    assert [one.stale for one in shard.pins.listed("new", prefixes=False)] == [False]
    assert len(shard.pins.blocks) == 4
    shard.pool.check_integrity()


def test_a_pin_outlives_all_who_need_room_and_its_shards_process(shard: Shard) -> None:
    assert not shard.keep("system", SYSTEM), "nothing is cached yet"
    shard.compute(SYSTEM)
    shard.compute(OTHER)
    assert shard.keep("system", SYSTEM, everywhere=True)
    shard.crowd()
    assert [shard.pool.match(ROOT, tokens) for tokens in (SYSTEM, OTHER)] == [4, 0]
    shard.open()
    (listed,) = shard.pins.listed("", prefixes=True)
    assert (listed.pin.name, listed.pin.everywhere, listed.tokens, listed.blocks) == ("system", True, 16, 4)
    assert listed.pin.prefix == cached_prefix(SYSTEM, b"")
    assert len(shard.pins.blocks) == 4
    shard.crowd()
    assert shard.pool.match(ROOT, SYSTEM) == 4
    assert shard.pins.let_go(["system", "none"])[0] == ["system"]
    assert shard.pool.counts().cached == 4
    shard.crowd()
    assert shard.pool.match(ROOT, SYSTEM) == 0
    shard.open()
    assert len(shard.pins) == 0


@pytest.mark.parametrize("looked_at", [True, False])
def test_a_pin_ends_when_the_cache_is_switched_off(shard: Shard, looked_at: bool) -> None:
    """It would hold blocks that no prompt finds, also once the cache is on again."""
    shard.compute(SYSTEM)
    assert shard.keep("system", SYSTEM)
    plain = KvPool("kv_pool-0", AllocationTable(shard.memory, GEOMETRY, CAPACITY), 4)
    if looked_at:
        assert len(Pins(plain, 0.5, lambda: 0.0)) == 0
        assert plain.counts().free == CAPACITY
    shard.open()
    assert len(shard.pins) == 0
    assert shard.pool.counts().owned == 0
    shard.compute(SYSTEM)
    assert shard.keep("system", SYSTEM)
    assert shard.pool.match(ROOT, SYSTEM) == 4


def test_pinning_again_changes_nothing_and_another_prefix_takes_the_name(shard: Shard) -> None:
    shard.compute(SYSTEM)
    shard.compute(OTHER)
    assert shard.keep("a", SYSTEM)
    holding = shard.pool.holding(PIN + "a")
    assert shard.keep("a", SYSTEM)
    assert shard.pool.holding(PIN + "a") is holding
    assert shard.keep("a", SYSTEM, everywhere=True)
    assert shard.keep("a", OTHER)
    assert len(shard.pins.blocks) == 3
    assert shard.pool.counts().owned == 3


def test_the_last_pin_that_there_may_be_can_be_replaced(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "MOST_PINS", 2)
    shard.compute(SYSTEM)
    shard.compute(OTHER)
    assert shard.keep("a", SYSTEM)
    assert shard.keep("b", SYSTEM[:8])
    assert shard.keep("b", OTHER)
    with pytest.raises(PinsFullError):
        shard.keep("c", OTHER)


def test_blocks_that_pins_share_count_once_against_their_share() -> None:
    shard = Shard(fraction=0.15)  # 6 blocks
    long = [*SYSTEM, *range(50, 58)]
    for tokens in (long, OTHER):
        shard.compute(tokens)
    assert shard.keep("system", SYSTEM)
    assert shard.keep("long", long)
    with pytest.raises(PinsFullError, match="hold 9 of its blocks, 6 are allowed"):
        shard.keep("other", OTHER)
    with pytest.raises(PinsFullError):  # before anything is computed for it
        shard.keep("unknown", list(range(900, 912)))
    assert shard.pool.counts().owned == 6
    shard.pins.let_go(["long"])
    with pytest.raises(PinsFullError):
        shard.keep("other", OTHER)
    shard.pins.let_go(["system"])
    assert shard.keep("other", OTHER)
    with pytest.raises(InvalidRequestError):
        shard.keep("n" * 600, OTHER)


def test_hits_and_last_use_are_those_of_prompts_that_begin_with_it(shard: Shard) -> None:
    shard.compute(SYSTEM)
    shard.keep("system", SYSTEM)
    for number, tokens in enumerate(([*SYSTEM, 1, 2], SYSTEM[:9], [*SYSTEM, 3])):
        shard.now_s = 10.0 * number
        held, _ = shard.pool.pin(RequestKey(f"q{number}"), ROOT, tokens, len(tokens))
        shard.pins.used(held.block_ids)
    shard.now_s = 25.0
    (listed,) = shard.pins.listed("", prefixes=False)
    assert (listed.hits, listed.idle_s) == (2, 5.0)
    assert not listed.pin.prefix.token_ids


def test_dropping_a_prefix_takes_its_pins_and_spares_those_it_continues(shard: Shard) -> None:
    long, salted = [*SYSTEM, *range(50, 62)], SYSTEM
    shard.compute(long)
    shard.compute(salted, SALTED)
    shard.keep("system", SYSTEM)
    shard.keep("long", long)
    shard.keep("salted", salted, b"salt")
    assert shard.drop([*long, 9]) == (["long"], 3)
    assert shard.pool.match(ROOT, long) == 4
    assert shard.drop([]) == (["system"], 4)
    assert shard.pool.match(SALTED, salted) == 4
    assert shard.drop([], b"salt") == (["salted"], 4)
    shard.pool.check_integrity()
    assert shard.pool.counts().free == CAPACITY


def test_a_beginning_that_ends_within_a_block_is_dropped_by_all_its_tokens(shard: Shard) -> None:
    other = [*SYSTEM[:14], 1, 2, *range(50, 58)]
    shard.compute([*SYSTEM, *range(50, 54)])
    shard.compute(other)
    assert shard.keep("system", SYSTEM)
    assert shard.keep("other", other)
    assert shard.drop([1, 2]) == ([], 0)
    assert shard.drop([*SYSTEM[:14], 3]) == ([], 0)
    assert shard.drop(SYSTEM[:15]) == (["system"], 2)  # its last block, and what continues it
    assert [shard.pool.match(ROOT, tokens) for tokens in (SYSTEM, other)] == [3, 6]
    assert shard.drop(SYSTEM[:2]) == (["other"], 6)  # less than a block
    shard.pool.check_integrity()
    assert shard.pool.counts().free == CAPACITY
