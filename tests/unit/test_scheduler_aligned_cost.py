"""Policy aligned-cost: of contiguous ranges the one with the most predicted tokens a second within the objective."""

from hypothesis import given
from hypothesis import strategies as st

from alignedserve.config import SchedulerConfig
from alignedserve.request import RequestKey
from alignedserve.scheduler.cost_model import LinearCostModel
from alignedserve.scheduler.policies.aligned_cost import AlignedCostPolicy
from alignedserve.scheduler.policies.base import BatchLimits, Entry, InstanceState

BLOCK = 16
LIMITS = BatchLimits(max_blocks=150, min_requests=3, max_requests=64)


class SkewedCost:
    """A pass takes as long as if all were as long as the longest, and 1 ms."""

    def step_s(self, chunks, lengths):
        return 1e-3 + len(lengths) * max(lengths) * 1e-6


def make(lengths, **config):
    policy = AlignedCostPolicy(SchedulerConfig(leaf_tokens=16, **config))
    policy.use_cost(SkewedCost())
    for i, tokens in enumerate(lengths):
        policy.insert(Entry(RequestKey(str(i)), tokens, -(-tokens // BLOCK), float(i)))
    return policy


def lengths_of(batch):
    return sorted(entry.tokens for entry in batch)


def running(*lengths):
    mean = sum(lengths) // max(1, len(lengths))
    ends = (min(lengths), max(lengths)) if lengths else (0, 0)
    return InstanceState(len(lengths), *ends, mean, LinearCostModel())


def test_fewer_and_shorter_beat_the_densest_range_where_that_is_long():
    lengths = [100, 101, 102, 103] + [900] * 5
    assert lengths_of(make(lengths).form(LIMITS, None, 0.0)) == [100, 101, 102, 103]


def test_what_runs_has_a_say():
    """Beside long requests short ones take as long as they do, so the more the better; beside short ones they win."""
    limits = BatchLimits(max_blocks=456, min_requests=6, max_requests=8)
    chosen = {}
    for length in (100, 3000):
        policy = make([100] * 6 + [900] * 8)
        policy.look_at(running(*[length] * 4))
        chosen[length] = lengths_of(policy.form(limits, None, 0.0))
    assert chosen == {100: [100] * 6, 3000: [900] * 8}


def test_a_batch_that_would_miss_the_objective_is_left_for_one_that_does_not():
    lengths = [*[100] * 12, *[330] * 5]
    rates = make(lengths)
    assert lengths_of(rates.form(LIMITS, None, 0.0)) == [100] * 12
    only_few = make([*[100] * 4, *[330] * 9], tpot_objective_s=1.5e-3)
    assert lengths_of(only_few.form(LIMITS, None, 0.0)) == [100] * 4
    none_does = make(lengths, tpot_objective_s=1e-6)
    alone_s = SkewedCost().step_s((), lengths_of(none_does.form(LIMITS, None, 0.0)))
    assert alone_s <= min(SkewedCost().step_s((), batch) for batch in ([100] * 12, [330] * 5))


class LearntCost(LinearCostModel):
    def predict_iteration_s(self, lengths):
        return 1e-3 + sum(lengths) * 1e-6


def test_without_a_measured_cost_the_instances_own_model_decides(caplog):
    policy = AlignedCostPolicy(SchedulerConfig(leaf_tokens=16))
    for i, tokens in enumerate([100] * 4 + [900] * 4):
        policy.insert(Entry(RequestKey(str(i)), tokens, -(-tokens // BLOCK), float(i)))
    policy.look_at(InstanceState(0, 0, 0, 0, LearntCost()))
    assert lengths_of(policy.form(BatchLimits(180, 3, 64), None, 0.0)) == [100] * 4
    assert "does not know what unequal lengths cost" in caplog.text


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=60),
    st.integers(1, 400),
    st.integers(1, 20),
    st.integers(1, 64),
    st.data(),
)
def test_every_batch_fits_holds_the_seed_and_is_one_range_of_leaves(lengths, max_blocks, few, many, data):
    policy = make(lengths)
    policy.look_at(running(*data.draw(st.lists(st.integers(1, 3000), max_size=5))))
    limits = BatchLimits(max_blocks, min(few, many), many)
    seed = data.draw(st.none() | st.sampled_from([RequestKey(str(i)) for i in range(len(lengths))]))
    if seed is not None:  # the core's seed is the oldest of all that are overdue, so of its leaf
        leaf = policy.tree.leaf_of(policy.tree.entry(seed).tokens)
        seed = next(policy.tree.oldest(leaf)).key
    batch = policy.form(limits, seed, 1.0)
    assert batch
    assert seed is None or seed in [entry.key for entry in batch]
    assert len(batch) == 1 or sum(entry.blocks for entry in batch) <= max_blocks
    assert len(batch) <= many
    leaves = {policy.tree.leaf_of(entry.tokens) for entry in batch}
    left_out = [
        entry
        for entry in map(policy.tree.entry, (RequestKey(str(i)) for i in range(len(lengths))))
        if entry not in batch and min(leaves) < policy.tree.leaf_of(entry.tokens) < max(leaves)
    ]
    assert not left_out
    for entry in batch:
        policy.remove(entry.key)
    policy.check_integrity()
