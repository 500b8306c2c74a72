"""What several conversations use is on disk before it goes: so it outlives a kill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from alignedserve.request import RequestKey
from support.disk_cases import ROOT, A, B, Make, cache, on_disk, opened, promote, tiers


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with tiers(tmp_path / "kv") as new:
        yield new


def test_what_several_conversations_have_used_outlives_a_kill(make: Make) -> None:
    first = opened(make())
    pinned = RequestKey("holds")
    cache(first, A)
    cache(first, [*A[:12], 1, 2, 3, 4])
    cache(first, B)
    first.pool.pin(pinned, ROOT, A[:13], 13)  # in use, so it is not written ahead of its eviction
    assert first.run(first.opened.demotion.keep_hot()) == 3
    assert first.run(first.opened.demotion.keep_hot()) == 0
    first.pool.release([pinned])
    first.kill()
    second = opened(make())
    assert (on_disk(second, A), on_disk(second, B)) == (3, 0)
    assert promote(second, A) == 3


def test_what_is_hot_takes_only_room_that_the_disk_has(make: Make) -> None:
    rig = opened(make(slots=6))
    cache(rig, B)
    rig.demote()
    cache(rig, A)
    cache(rig, [*A[:16], 1, 2, 3, 4])
    assert rig.run(rig.opened.demotion.keep_hot()) == 1
    assert (on_disk(rig, A), on_disk(rig, B)) == (1, 5)
