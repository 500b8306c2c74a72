"""What passes take in a cluster: how the slowdowns follow from what workers count."""

from __future__ import annotations

import pytest

from alignedserve.cluster.profile_cluster import Sums, slowdown_beside
from alignedserve.errors import ResourceError


def test_a_slowdown_is_of_what_was_predicted_without_what_the_engine_adds() -> None:
    before, after = Sums(10, 1.0, 0.5, 100.0), Sums(30, 5.0, 2.5, 110.0)
    between = after.since(before)
    assert between == Sums(20, 4.0, 2.0, 10.0)
    assert between.busy == pytest.approx(0.4)
    assert between.slowdown(host_overhead_s=0.05) == pytest.approx((4.0 - 1.0) / 2.0)
    with pytest.raises(ResourceError, match="--seconds more"):
        after.since(after).slowdown(0.0)


def test_beside_and_alone_together_are_what_was_measured() -> None:
    beside = slowdown_beside(1.6, alone=1.2, share=0.5)
    assert 0.5 * 1.2 + 0.5 * beside == pytest.approx(1.6)
    assert slowdown_beside(1.6, alone=1.2, share=1.0) == 1.6


def test_what_hardly_ever_happened_tells_nothing_more_than_the_mean() -> None:
    assert slowdown_beside(1.3, alone=1.2, share=0.05) == 1.3
    assert slowdown_beside(1.1, alone=1.2, share=0.9) == 1.2  # noise: a neighbour makes nothing faster
