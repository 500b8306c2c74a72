"""Batch-formation policies by name, behind one narrow contract."""

from pathlib import Path

import pytest

from alignedserve.config import SchedulerConfig
from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey
from alignedserve.scheduler.policies.base import BatchLimits, BatchPolicy, Entry
from alignedserve.scheduler.systems import policy_class, resolve

NAMES = ("aligned", "aligned-cost", "fcfs")
EXAMPLE = "examples.shortest_first:ShortestFirst"
LENGTHS = (900, 100, 110, 2000, 105, 120)
LIMITS = BatchLimits(max_blocks=1000, min_requests=3, max_requests=100)


def make(name, lengths=LENGTHS):
    policy = policy_class(resolve(name))(SchedulerConfig(leaf_tokens=16))
    for i, tokens in enumerate(lengths):
        policy.insert(Entry(RequestKey(str(i)), tokens, tokens, float(i)))
    return policy


def tokens(entries):
    return [entry.tokens for entry in entries]


def test_the_contract_is_small_and_all_abstract():
    assert len(BatchPolicy.__abstractmethods__ - {"__init__"}) <= 7


def test_aligned_forms_a_batch_of_similar_lengths_and_fcfs_of_the_oldest():
    assert tokens(make("aligned").form(LIMITS, None, 0.0)) == [100, 110, 105, 120]
    assert tokens(make("fcfs").form(LIMITS, None, 0.0)) == [900, 100]


def test_fcfs_takes_a_request_larger_than_the_limit_alone():
    assert tokens(make("fcfs", (5000, 10)).form(LIMITS, None, 0.0)) == [5000]
    assert make("fcfs", ()).form(LIMITS, None, 0.0) == []


def test_late_joins_match_by_length_under_aligned_and_by_age_under_fcfs():
    assert tokens(make("aligned").matching(101, 115, LIMITS)) == [110, 105]
    assert tokens(make("aligned").matching(101, 115, BatchLimits(106, 1, 9))) == []
    assert tokens(make("aligned").matching(101, 115, BatchLimits(110, 1, 9))) == [110]
    assert tokens(make("fcfs").matching(101, 115, BatchLimits(1100, 1, 2))) == [900, 100]
    assert make("aligned").matches(110, 101, 115)
    assert not make("aligned").matches(116, 101, 115)
    assert make("fcfs").matches(116, 101, 115)


def test_lengths_beyond_the_range_of_the_tree_match_too():
    assert tokens(make("aligned", (65_530, 70_000, 90_000, 10)).matching(66_000, 80_000, BatchLimits(10**6, 1, 9))) == [
        70_000
    ]


@pytest.mark.parametrize("name", [*NAMES, EXAMPLE])
def test_every_policy_keeps_its_books(name, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[4])
    policy = make(name)
    assert policy.totals() == (6, sum(LENGTHS))
    for entry in policy.form(LIMITS, None, 0.0):
        policy.remove(entry.key)
    policy.check_integrity()
    with pytest.raises(AccountingError):
        policy.remove(RequestKey("unknown"))
    with pytest.raises(AccountingError):
        policy.insert(Entry(RequestKey("3"), 1, 1, 0.0))
    policy.check_integrity()


def test_the_example_raises_as_the_contract_asks_where_its_books_do_not_match(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[4])
    for spoil in (lambda policy: setattr(policy, "_blocks", 1), lambda policy: policy._order.pop()):
        policy = make(EXAMPLE)
        spoil(policy)
        with pytest.raises(AccountingError):
            policy.check_integrity()


@pytest.mark.parametrize("name", [*NAMES, EXAMPLE])
def test_a_seed_is_in_its_batch(name, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[4])
    assert make(name, (900, 100, 110)).form(BatchLimits(950, 3, 9), RequestKey("0"), 0.0)[0].tokens == 900
