"""The order of eviction beside a naive model, and what it keeps in memory."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from alignedserve.errors import ConfigError
from alignedserve.scheduler.cache import eviction
from alignedserve.scheduler.cache.eviction import CHUNK_ENTRIES, SLACK_ENTRIES, EvictionQueue
from alignedserve.scheduler.cache.values import CachePolicy, LruPolicy, ValuePolicy, cache_policy

BLOCK = 16


def linear(tokens: int) -> float:
    return 1e-3 + 1e-5 * tokens + 1e-8 * tokens * tokens


class Naive:
    """Each block's rank, touch and depth in dicts; the least of all cached ones goes first."""

    def __init__(self, policy: CachePolicy) -> None:
        self.policy = policy
        self.inflation = 0.0
        self.touches = 0
        self.ranks: dict[int, tuple[float, int, int]] = {}
        self.uses: dict[int, int] = {}

    def touch(self, chain: list[int], chance: float = 1.0) -> None:
        self.touches += 1
        value = 0.0
        for depth, block in reversed(list(enumerate(chain))):
            value = max(value, self.policy.value(self.uses[block], len(chain), chance))
            rank = self.inflation + 2 ** (math.ceil(math.log2(value) * 4 - 1e-6) / 4)
            if rank >= self.ranks.get(block, (0.0, 0, 0))[0]:
                self.ranks[block] = rank, self.touches, -depth

    def take(self, count: int, cached: bytearray) -> list[int]:
        taken = []
        while count > len(taken) and (left := [block for block in self.ranks if cached[block] and block not in taken]):
            taken.append(min(left, key=lambda block: self.ranks[block]))
            self.inflation = max(self.inflation, self.ranks[taken[-1]][0])
        return taken


@pytest.mark.parametrize("few", [0, 32])
@pytest.mark.parametrize("policy", [LruPolicy(), ValuePolicy(linear, BLOCK)], ids=["lru", "value"])
@pytest.mark.parametrize("seed", range(3))
def test_blocks_go_in_the_order_of_a_naive_model(
    policy: CachePolicy, seed: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eviction, "FEW", few)
    draw, capacity = random.Random(seed), 60
    queue, naive = EvictionQueue(capacity, policy), Naive(policy)
    parents: dict[int, int] = {}  # of the blocks in use
    cached = bytearray(capacity)

    def chain_of(block: int) -> list[int]:
        chain = [block]
        while parents[chain[-1]] >= 0:
            chain.append(parents[chain[-1]])
        return chain[::-1]

    taken_in_all = 0
    for _ in range(600):
        action = draw.choice(["grow", "touch", "touch", "take"])
        free = [block for block in range(capacity) if block not in parents]
        if action == "grow" and free:
            new = draw.sample(free, min(len(free), draw.randint(1, 6)))
            parent = draw.choice([-1, *parents])
            for block in new:
                parents[block], parent = parent, block
                cached[block] = 1
            queue.use(new)
            naive.uses.update(dict.fromkeys(new, 1))
            queue.touch(chain_of(new[-1]))
            naive.touch(chain_of(new[-1]))
        elif action == "touch" and parents:
            chain, chance = chain_of(draw.choice(list(parents))), draw.choice([1.0, 1.0, 0.1, 7.0])
            if draw.random() < 0.5:
                queue.use(chain)
                for block in chain:
                    naive.uses[block] += 1
            queue.touch(chain, chance)
            naive.touch(chain, chance)
        elif action == "take":
            count = draw.randint(1, 12)
            ids = np.flatnonzero(np.frombuffer(cached, np.uint8)).astype(np.int32)
            next_ones = queue.next_ones(ids, np.array([len(chain_of(block)) for block in ids.tolist()]), count)
            taken = queue.take(count, cached)
            assert next_ones.tolist() == taken == naive.take(count, cached)
            taken_in_all += len(taken)
            for block in taken:
                assert block not in parents.values()  # what continues it went before
                del parents[block], naive.ranks[block], naive.uses[block]
                cached[block] = 0
            queue.forget(taken)
    assert taken_in_all > 300


def test_held_blocks_are_passed_over_and_entered_again_at_their_next_touch() -> None:
    queue, cached = EvictionQueue(4, ValuePolicy(linear, BLOCK)), bytearray(b"\1\1\1\1")
    queue.use([0, 1])
    for _ in range(40):
        queue.use([2, 3])
    queue.touch([2, 3])
    queue.touch([0, 1])
    cached[2] = cached[3] = 0  # pinned
    assert queue.take(4, cached) == [1, 0]
    cached[2] = cached[3] = 1
    queue.touch([2, 3], chance=1e-9)
    assert queue.take(4, cached) == [3, 2]


def test_lru_gives_up_what_was_used_least_recently_and_value_what_costs_least_to_compute_again() -> None:
    short, long = [0, 1], list(range(10, 60))
    for policy, first in ((LruPolicy(), long), (ValuePolicy(linear, BLOCK), long), (ValuePolicy(linear, 1024), short)):
        queue, cached = EvictionQueue(60, policy), bytearray(b"\1") * 60
        for chain in (long, short):
            queue.use(chain)
            queue.touch(chain)
        # With blocks of 16 tokens a pass's fixed part counts: a short prompt costs more a block.
        assert queue.take(1, cached) == [first[-1]]


def test_what_is_used_often_outlives_what_was_used_last_until_it_has_aged() -> None:
    queue, cached = EvictionQueue(1000, ValuePolicy(linear, BLOCK)), bytearray(b"\1") * 1000
    for _ in range(8):
        queue.use([0])
    queue.touch([0])
    evicted = []
    for block in range(1, 40):  # a stream of blocks that are used once, two of which fit
        queue.use([block])
        queue.touch([block])
        if block > 2:
            evicted += queue.take(1, cached)
    assert 0 not in evicted[:6]
    assert 0 in evicted


def test_entries_stay_in_proportion_to_the_store_however_often_blocks_are_touched() -> None:
    capacity = 2 * CHUNK_ENTRIES
    queue, cached = EvictionQueue(capacity, ValuePolicy(linear, BLOCK)), bytearray(b"\1") * capacity
    chains = [list(range(begin, begin + 64)) for begin in range(0, capacity, 64)]
    draw, last = random.Random(1), {}
    for block in range(capacity):
        queue.use([block])
    for turn in range(1500):
        number = draw.randrange(len(chains)) if turn % 3 else 0  # one chain is hot
        queue.touch(chains[number])
        last[number] = turn
    for number in set(range(len(chains))) - set(last):
        queue.touch(chains[number])
        last[number] = -1
    assert queue.entries <= 2 * capacity + SLACK_ENTRIES + CHUNK_ENTRIES
    assert queue.entries == sum(len(chunk) for each in queue._classes.values() for chunk in each.chunks)
    taken = queue.take(capacity, cached)
    assert sorted(taken) == list(range(capacity))
    touched = [number for number in sorted(last, key=lambda number: last[number]) if last[number] >= 0]
    assert [block // 64 for block in taken[-64 * len(touched) :: 64]][-3:] == touched[-3:]
    assert queue.take(1, cached) == []


def test_an_unknown_policy_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'mru'.*value or lru"):
        cache_policy("mru", linear, BLOCK)
    assert isinstance(cache_policy("lru", linear, BLOCK), LruPolicy)
