"""What a token is worth: its price in a full batch of its own length."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.scheduler.cost.load import load_step_cost
from alignedserve.scheduler.cost.worth import FULL, TokenWorth


def linear(lengths):
    return 1e-2 + 1e-5 * len(lengths) + 1e-7 * sum(lengths)


def test_a_full_batch_of_one_length_does_a_seconds_work_a_second():
    worth = TokenWorth(linear, 100_000, 64, 65_536)
    for tokens in (100, 500, 4000):
        requests = min(64, int(FULL * 100_000) // tokens)
        work = requests * worth.of(tokens)
        assert work == pytest.approx(linear([tokens] * requests), rel=0.05)


def test_places_limit_short_requests_and_memory_long_ones():
    """A request that fills the cache pays for the whole iteration."""
    worth = TokenWorth(linear, 10_000, 16, 65_536)
    assert worth.of(100) == pytest.approx(linear([100] * 16) / 16, rel=0.05)
    assert worth.of(9_000) == pytest.approx(linear([9_000]), rel=0.05)
    unlimited = TokenWorth(linear, 0, 16, 65_536)
    assert unlimited.of(9_000) == pytest.approx(linear([9_000] * 16) / 16, rel=0.05)


@pytest.mark.parametrize("longest_tokens", [4, 16, 17])
def test_a_tree_of_few_lengths_has_worths_too(longest_tokens):
    """Requests longer than its leaves cover still cost more."""
    worth = TokenWorth(linear, 10_000, 16, longest_tokens)
    assert 0.0 < worth.of(1) <= worth.of(16) <= worth.of(17) < worth.of(5_000)


@given(st.integers(1, 70_000), st.integers(1, 70_000))
def test_longer_requests_are_worth_no_less(one, other):
    worth = TokenWorth(linear, 50_000, 64, 65_536)
    assert worth.of(min(one, other)) <= worth.of(max(one, other)) + 1e-12
    assert worth.of(one) >= 0.0


@pytest.mark.parametrize("mode", ["split_kv", "no_split"])
def test_unequal_lengths_do_less_work_a_second_where_the_longest_is_waited_for(mode):
    cost = load_step_cost("a100-opt-13b", kernel_mode=mode)
    worth = TokenWorth(lambda lengths: cost.step_s((), lengths), 66_144, 256, 65_536)

    def rate(lengths):
        return sum(map(worth.of, lengths)) / cost.step_s((), lengths)

    mixed = rate([500] * 100 + [8000])
    assert rate([500] * 120) == pytest.approx(1.0, rel=0.03)
    assert mixed < (0.85 if mode == "split_kv" else 1.05)
