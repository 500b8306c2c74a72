"""`scheduler.waiting_rule`: which policy it chooses, the paper's own rule to the letter, and rounds."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.config import SchedulerConfig
from alignedserve.request import RequestKey
from alignedserve.scheduler.core.actions import MarkUrgent
from alignedserve.scheduler.cost.learned_skew import Share
from alignedserve.scheduler.cost.load import load_step_cost
from alignedserve.scheduler.cost.pass_model import LinearCostModel
from alignedserve.scheduler.policies.aligned import AlignedPolicy
from alignedserve.scheduler.policies.aligned_cost import AlignedCostPolicy
from alignedserve.scheduler.policies.base import BatchLimits, BatchPolicy, Entry, InstanceState
from alignedserve.scheduler.policies.fcfs import FcfsPolicy
from alignedserve.scheduler.policies.paper_rule import PaperRulePolicy
from alignedserve.scheduler.policies.rounds import LATE_S, LEAST_FOR_ROUND, RoundsPolicy
from alignedserve.scheduler.systems import configured_policy, default_objective_s, make_policy
from support.small_cell import Load, Shape, SmallCell

LIMITS = BatchLimits(max_blocks=10_000, min_requests=2, max_requests=100)


def paper_rule(after_s: float = 5.0) -> PaperRulePolicy:
    config = SchedulerConfig(waiting_rule="paper", starvation_after_s=after_s, max_prefix_tokens=4096, leaf_tokens=16)
    policy = make_policy(config)
    assert isinstance(policy, PaperRulePolicy)
    return policy


def insert(policy: BatchPolicy, since_s: float, *lengths: int) -> None:
    for number, tokens in enumerate(lengths):
        policy.insert(Entry(RequestKey(f"{since_s:g}-{tokens}-{number}"), tokens, tokens, since_s))


def take(policy: BatchPolicy, now_s: float, limits: BatchLimits = LIMITS) -> list[int]:
    found = policy.form(limits, None, now_s)
    for entry in found:
        policy.remove(entry.key)
    policy.check_integrity()
    return [entry.tokens for entry in found]


@pytest.mark.parametrize(
    ("policy", "rule", "kind", "objective_s"),
    [
        ("aligned", "overdue", AlignedPolicy, 5.0),
        ("aligned", "paper", PaperRulePolicy, math.inf),
        ("aligned-no-prefetch", "paper", PaperRulePolicy, math.inf),
        ("aligned", "rounds", RoundsPolicy, math.inf),
        ("aligned-cost", "paper", AlignedCostPolicy, 5.0),
        ("fcfs", "overdue", FcfsPolicy, math.inf),
        ("alignedserve.scheduler.policies.aligned:AlignedPolicy", "rounds", AlignedPolicy, 5.0),
        ("alignedserve.scheduler.policies.rounds:RoundsPolicy", "overdue", RoundsPolicy, math.inf),
    ],
)
def test_the_rule_chooses_the_policy_and_whether_requests_become_overdue(
    policy: str, rule: str, kind: type, objective_s: float
) -> None:
    config = SchedulerConfig(policy=policy, waiting_rule=rule)
    assert configured_policy(config) is kind
    assert default_objective_s(config) == objective_s


class Bounded(RoundsPolicy):
    """A policy of a user, which inherits `OVERDUE = False`."""


class Unbounded(RoundsPolicy):
    OVERDUE = True


@pytest.mark.parametrize(("kind", "objective_s"), [(Bounded, math.inf), (Unbounded, 0.5)])
def test_a_user_defined_policy_says_whether_requests_become_overdue(
    kind: type[BatchPolicy], objective_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "users_policies", sys.modules[__name__])
    scheduler = SchedulerConfig(
        policy=f"users_policies:{kind.__name__}",
        starvation_after_s=0.5,
        max_prefix_tokens=256,
        min_batch_requests=4,
        leaf_tokens=4,
    )
    assert default_objective_s(scheduler) == objective_s
    cell = SmallCell(Shape(scheduler=scheduler, pool_blocks=4000, batch_buffer=40, max_running=6))
    Load(cell, random.Random(1)).stream("short", 200, 0.0055, (10, 14), (14, 18))
    cell.run()
    marked = [action for _, action in cell.log if isinstance(action, MarkUrgent)]
    assert bool(marked) == (objective_s < math.inf)
    assert {decode.scheduler.starvation_after_s for decode in cell.decodes.values()} == {objective_s}


def test_a_subtree_without_a_batch_for_too_long_goes_first() -> None:
    policy = paper_rule()
    insert(policy, 0.0, 2000, 2010)
    for now_s in (0.0, 2.0, 4.0):  # the densest range is another one
        insert(policy, now_s, *[100] * 40)
        assert take(policy, now_s, BatchLimits(4000, 2, 40)) == [100] * 40
    insert(policy, 5.0, *[100] * 40)
    assert take(policy, 5.0, BatchLimits(4020, 2, 40))[:2] == [2000, 2010]
    assert take(policy, 5.1, BatchLimits(4000, 2, 40)) == [100] * 40


def test_a_subtree_that_yields_batches_may_leave_a_request_out_for_ever() -> None:
    """The stamp is the node's: what the batches of its own leaf leave out is not found by it."""
    policy = paper_rule()
    policy.insert(Entry(RequestKey("large"), 112, 5000, 0.0))  # it fits in no batch with others
    for step in range(1, 30):
        insert(policy, float(step), *[100] * 20)
        assert 112 not in take(policy, float(step), BatchLimits(4000, 2, 20))


def test_an_empty_subtree_begins_anew_with_its_next_request() -> None:
    policy = paper_rule()
    insert(policy, 0.0, 2000)
    assert take(policy, 0.0) == [2000]
    insert(policy, 100.0, *[100] * 50)
    insert(policy, 100.0 + 1e-3, 2000)
    assert take(policy, 101.0, BatchLimits(4000, 2, 40)) == [100] * 40


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["insert", "take", "wait"]), st.integers(1, 5000), st.integers(1, 12)), max_size=60
    )
)
@settings(max_examples=60, deadline=None)
def test_every_node_with_requests_has_a_stamp(steps: list[tuple[str, int, int]]) -> None:
    policy, now_s, waiting = paper_rule(after_s=3.0), 0.0, 0
    for number, (what, tokens, count) in enumerate(steps):
        if what == "insert":
            policy.insert(Entry(RequestKey(str(number)), tokens, tokens, now_s))
            waiting += 1
        elif what == "take":
            found = take(policy, now_s, BatchLimits(200 * count, 2, count))
            assert bool(found) == bool(waiting)
            waiting -= len(found)
        else:
            now_s += count / 3
        policy.check_integrity()
    assert policy.totals()[0] == waiting


def rounds(**keys: object) -> RoundsPolicy:
    config = SchedulerConfig(**{"waiting_rule": "rounds", "max_prefix_tokens": 4096, "leaf_tokens": 16, **keys})  # type: ignore[arg-type]
    policy = make_policy(config)
    assert isinstance(policy, RoundsPolicy)
    return policy


def test_batches_of_a_round_go_upward_and_the_next_round_begins_at_the_shortest() -> None:
    policy, limits = rounds(), BatchLimits(1000, 2, 100)
    insert(policy, 0.0, 900, 100, 300, 310, 90, 500, 2000)
    assert sorted(take(policy, 1.0, limits)) == [90, 100, 300, 310]
    insert(policy, 2.0, 80, 600)
    assert take(policy, 3.0, limits) == [500]
    assert take(policy, 3.0, limits) == [900]
    assert take(policy, 3.0, limits) == [2000]  # larger than K
    assert sorted(take(policy, 4.0, limits)) == [80, 600]
    assert take(policy, 5.0, limits) == []


def test_a_batch_that_was_not_sent_is_formed_again() -> None:
    policy, limits = rounds(), BatchLimits(500, 2, 100)
    insert(policy, 0.0, 100, 200, 210, 1000)
    first = policy.form(limits, None, 1.0)
    assert policy.form(limits, None, 2.0) == first
    assert [entry.tokens for entry in first] == [100, 200]
    policy.remove(first[-1].key)
    assert sorted(take(policy, 3.0, limits)) == [100, 210]
    assert take(policy, 3.0, limits) == [1000]


def test_an_overdue_request_is_served_in_between_with_its_neighbours() -> None:
    policy, limits = rounds(), BatchLimits(3000, 2, 3)
    insert(policy, 0.0, 100, 110, 120, 130, 1000, 1010, 1020)
    assert sorted(take(policy, 1.0, limits)) == [100, 110, 120]
    found = policy.form(limits, RequestKey("0-1010-5"), 1.0)
    assert [entry.tokens for entry in found] == [1010, 1020]
    for entry in found:
        policy.remove(entry.key)
    assert 130 in take(policy, 1.0, limits)


def test_newcomers_join_late_in_the_next_round() -> None:
    policy, limits = rounds(), BatchLimits(250, 2, 100)
    insert(policy, 0.0, 100, 110, 1000)
    assert sorted(take(policy, 1.0, limits)) == [100, 110]
    insert(policy, 1.0 + LATE_S, 105)
    insert(policy, 1.0 + LATE_S + 0.1, 106)
    assert [entry.tokens for entry in policy.matching(90, 120, LIMITS)] == [105]
    assert take(policy, 30.0, limits) == [1000]
    assert [entry.tokens for entry in policy.matching(90, 120, LIMITS)] == [105]
    assert take(policy, 31.0, BatchLimits(105, 2, 1)) == [105]  # the turn
    assert [entry.tokens for entry in policy.matching(90, 120, LIMITS)] == [106]


def test_an_evicted_request_stays_in_the_round_if_its_length_is_still_ahead() -> None:
    policy, limits = rounds(), BatchLimits(1000, 2, 100)
    insert(policy, 0.0, 100, 300, 900, 950)
    assert sorted(take(policy, 1.0, limits)) == [100, 300]
    for tokens in (90, 920):
        policy.insert(Entry(RequestKey(f"evicted-{tokens}"), tokens, tokens, 5.0, evicted=True))
        policy.insert(Entry(RequestKey(f"new-{tokens}"), tokens, tokens, 5.0))
    policy.check_integrity()
    assert [take(policy, 6.0, limits) for _ in range(3)] == [[900], [920], [950]]
    assert sorted(take(policy, 7.0, limits)) == [90, 90]


def test_late_joins_do_not_overtake_a_batch_in_order_of_arrival() -> None:
    policy = rounds()
    policy.use_cost(load_step_cost("rtxpro6000-llama-3.1-8b"))
    assert policy.overtakes()
    insert(policy, 0.0, 4000, 200, 3000)
    assert take(policy, 1.0, BatchLimits(12_000, 36, 256)) == [4000, 200, 3000]
    assert not policy.overtakes()


@pytest.mark.parametrize(("model", "in_order"), [("rtxpro6000-llama-3.1-8b", "age"), ("a100-opt-13b", "length")])
def test_a_round_goes_in_order_of_arrival_where_unequal_lengths_cost_little(model: str, in_order: str) -> None:
    policy = rounds()
    policy.use_cost(load_step_cost(model))
    lengths = [(7919 * number) % 900 + 100 for number in range(40)]
    lengths[::10] = [4000, 1500, 2500, 3500]
    insert(policy, 0.0, *lengths)
    found = take(policy, 1.0, BatchLimits(12_000, 8, 256))
    expected = lengths if in_order == "age" else sorted(lengths)
    assert sorted(found) == sorted(expected[: len(found)])
    assert policy.matches(4000, 200, 210) is (in_order == "age")


def test_where_the_order_of_the_batch_counts_that_of_a_typical_one_is_judged() -> None:
    """In order of length, the worst, these lengths cost more than the least bubble; shuffled they cost less."""
    cost = load_step_cost("rtxpro6000-llama-3.1-8b", "no_split", block_bandwidth=2e9)
    lengths = [100 + 3 * number for number in range(243)] + [1000 + 540 * number for number in range(13)]
    assert 1 - cost.balanced_step_s((), lengths) / cost.step_s((), lengths) > LEAST_FOR_ROUND
    policy = rounds(max_prefix_tokens=8192)
    policy.use_cost(cost)
    insert(policy, 0.0, *lengths)
    take(policy, 1.0, BatchLimits(12_000, 8, 256))
    assert not policy.overtakes()


class Learned(LinearCostModel):
    """Has learned this share, whatever the lengths; notes those that it was asked for."""

    def __init__(self, share: Share | None) -> None:
        super().__init__()
        self.share = share
        self.asked: list[Sequence[int] | None] = []

    def unequal_lengths_share(self, lengths: Sequence[int] | None = None) -> Share | None:
        self.asked.append(lengths)
        return self.share


def order_of_the_next_round(policy: RoundsPolicy, now_s: float, share: Share | None) -> str:
    policy.look_at(InstanceState(0, 0, 0, 0, Learned(share), 12_000))
    insert(policy, now_s, 4000, 200, 3000)
    assert len(take(policy, now_s, BatchLimits(12_000, 36, 256))) == 3
    return "length" if policy.overtakes() else "age"


def test_what_an_instance_has_learned_decides_without_a_cost_model() -> None:
    policy = rounds()
    assert order_of_the_next_round(policy, 1.0, None) == "length", "not known yet"
    assert order_of_the_next_round(policy, 2.0, Share(0.06, 0.05)) == "length", "not certain"
    assert order_of_the_next_round(policy, 3.0, Share(0.01, 0.05)) == "age", "certain by a standard error"
    assert order_of_the_next_round(policy, 4.0, Share(0.3, 0.2)) == "age", "noise"
    assert order_of_the_next_round(policy, 5.0, Share(0.12, 0.02)) == "length", "it has come to cost something"
    assert order_of_the_next_round(policy, 6.0, Share(0.06, 0.03)) == "age", "a useful error"
    assert order_of_the_next_round(policy, 7.0, None) == "length", "the instance was replaced"


@pytest.mark.parametrize(("share", "late"), [(0.09, False), (0.2, True)])
def test_there_are_late_joins_by_length_only_where_lengths_cost_much(share: float, late: bool) -> None:
    """A late join overtakes older requests; batches of a round go by length from a smaller cost on."""
    policy = rounds()
    assert order_of_the_next_round(policy, 1.0, Share(share, 0.01)) == "length"
    insert(policy, 1.5, 210)
    assert policy.matches(210, 200, 220) is late
    assert [entry.tokens for entry in policy.matching(200, 220, BatchLimits(12_000, 8, 256))] == [210] * late


def test_the_learned_share_is_that_of_a_batch_of_all_waiting_lengths() -> None:
    policy, learned = rounds(), Learned(Share(0.0, 0.0))
    policy.look_at(InstanceState(0, 0, 0, 0, learned, 8_000))
    insert(policy, 0.0, *[200] * 30, *[1800] * 10)
    take(policy, 1.0, BatchLimits(8_000, 8, 256))
    (lengths,) = learned.asked
    assert lengths is not None
    assert sum(lengths) == pytest.approx(8_000, rel=0.1)
    assert {tokens // 100 for tokens in lengths} == {2, 18}
    policy.use_cost(load_step_cost("a100-opt-13b"))
    insert(policy, 2.0, 100, 4000)
    for now_s in (2.0, 3.0):
        take(policy, now_s, BatchLimits(8_000, 8, 256))
    assert len(learned.asked) == 1, "a measured cost comes first"


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["insert", "insert", "take", "late", "seed"]), st.integers(1, 5000), st.integers(1, 8)
        ),
        max_size=80,
    )
)
@settings(max_examples=80, deadline=None)
def test_no_request_sees_more_than_one_turn(steps: list[tuple[str, int, int]]) -> None:
    policy, now_s = rounds(), 0.0
    turns_at: dict[RequestKey, int] = {}
    turns = 0
    for number, (what, tokens, count) in enumerate(steps):
        now_s += 1.0
        limits = BatchLimits(800 * count, 2, count)
        if what == "insert":
            entry = Entry(RequestKey(str(number)), tokens, tokens, now_s)
            policy.insert(entry)
            turns_at[entry.key] = turns
            found = []
        elif what == "late":
            found = policy.matching(tokens // 2, tokens, limits)
        else:
            begun_s = policy._begun_s
            seed = next(iter(turns_at), None) if what == "seed" else None
            found = policy.form(limits, seed, now_s)
            assert bool(found) == bool(turns_at)
            assert seed is None or seed in [entry.key for entry in found]
            turns += policy._begun_s != begun_s
        for entry in found:
            policy.remove(entry.key)
            assert turns - turns_at.pop(entry.key) <= 1
        policy.check_integrity()
        assert all(turns - since <= 1 for since in turns_at.values())
