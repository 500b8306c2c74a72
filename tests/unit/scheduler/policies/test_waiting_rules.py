"""`scheduler.waiting_rule`: which policy it chooses, and the paper's own rule to the letter."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.config import SchedulerConfig
from alignedserve.request import RequestKey
from alignedserve.scheduler.policies.aligned import AlignedPolicy
from alignedserve.scheduler.policies.aligned_cost import AlignedCostPolicy
from alignedserve.scheduler.policies.base import BatchLimits, Entry
from alignedserve.scheduler.policies.fcfs import FcfsPolicy
from alignedserve.scheduler.policies.paper_rule import PaperRulePolicy
from alignedserve.scheduler.systems import configured_policy, default_objective_s, make_policy

LIMITS = BatchLimits(max_blocks=10_000, min_requests=2, max_requests=100)


def paper_rule(after_s: float = 5.0) -> PaperRulePolicy:
    config = SchedulerConfig(waiting_rule="paper", starvation_after_s=after_s, max_prefix_tokens=4096, leaf_tokens=16)
    policy = make_policy(config)
    assert isinstance(policy, PaperRulePolicy)
    return policy


def insert(policy: PaperRulePolicy, since_s: float, *lengths: int) -> None:
    for number, tokens in enumerate(lengths):
        policy.insert(Entry(RequestKey(f"{since_s:g}-{tokens}-{number}"), tokens, tokens, since_s))


def take(policy: PaperRulePolicy, now_s: float, limits: BatchLimits = LIMITS) -> list[int]:
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
        ("aligned-cost", "paper", AlignedCostPolicy, 5.0),
        ("fcfs", "overdue", FcfsPolicy, math.inf),
    ],
)
def test_the_rule_chooses_the_policy_and_whether_requests_become_overdue(
    policy: str, rule: str, kind: type, objective_s: float
) -> None:
    config = SchedulerConfig(policy=policy, waiting_rule=rule)
    assert configured_policy(config) is kind
    assert default_objective_s(config) == objective_s


def test_requests_of_a_user_defined_policy_become_overdue_and_its_module_is_not_imported() -> None:
    assert default_objective_s(SchedulerConfig(policy="no_such_module:Policy", starvation_after_s=7.0)) == 7.0


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
