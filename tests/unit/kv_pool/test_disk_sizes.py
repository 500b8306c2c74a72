"""The disk tier's file at another `disk_gib`: what fits is kept, and a change that is cut short costs no more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from alignedserve.geometry import KvGeometry
from support.disk_cases import PAGES, A, B, Make, cache, metric, opened, promote, tiers
from support.disk_tier import TierRig
from support.prefix_pool import GEOMETRY


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with tiers(tmp_path / "kv") as new:
        yield new


@pytest.mark.parametrize("geometry", [GEOMETRY, PAGES], ids=["through a buffer", "straight"])
def test_a_file_that_is_made_larger_or_smaller_keeps_the_blocks_that_fit(make: Make, geometry: KvGeometry) -> None:
    def restarted(before: TierRig | None, slots: int) -> TierRig:
        if before is not None:
            before.kill()
        return opened(make(slots=slots, geometry=geometry))

    rig = restarted(None, 12)
    cache(rig, A)
    rig.demote()
    rig = restarted(rig, 300)
    assert (rig.tier.count().cached, rig.tier.count().capacity) == (5, 300)
    assert promote(rig, A) == 5
    for number in range(10):
        cache(rig, [number, *B[1:]])
        rig.demote()
    assert rig.tier.count().cached > 12
    rig = restarted(rig, 12)
    assert (rig.tier.count().capacity, 5 <= rig.tier.count().cached <= 12) == (12, True)
    assert promote(rig, A) == 5
    rig = restarted(rig, 300)
    assert rig.tier.count().cached <= 12, "nothing of what was cut off comes back"
    assert promote(rig, A) == 5
    assert metric(rig, "disk_tier_rejected_blocks_total") == 0


@pytest.mark.parametrize("slots", [6, 300])
@pytest.mark.parametrize("writes", range(3))
def test_a_change_of_size_that_a_crash_cuts_short_costs_blocks_only(make: Make, slots: int, writes: int) -> None:
    rig = opened(make(slots=12))
    cache(rig, A)
    rig.demote()
    rig.kill()
    cut = make(slots=slots)
    cut.calls.write_faults = [*[""] * writes, "eio"]
    cut.start(required=False)
    assert cut.tier.count().capacity == (slots if writes == 2 else 0)
    cut.kill()
    rig = opened(make(slots=slots))
    assert rig.tier.count().capacity == slots
    assert promote(rig, A) == 5
