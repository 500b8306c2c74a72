"""The end of a disk tier: what was dropped is erased from its file before, and what is cached is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from alignedserve.kv_pool.disk import demotion, tier
from support.disk_cases import ROOT, A, B, Make, cache, on_disk, opened, tiers
from support.disk_tier import HeldThreads, TierRig


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with tiers(tmp_path / "kv") as new:
        yield new


def written(make: Make) -> TierRig:
    """A tier with two prefixes on disk."""
    rig = opened(make())
    for tokens in (A, B):
        cache(rig, tokens)
    rig.demote()
    return rig


def test_what_is_dropped_is_erased_once_its_entries_are_written(make: Make) -> None:
    rig = written(make)
    HeldThreads.held = True
    rig.run(rig.tier.forget(ROOT, A))
    assert rig.run(rig.tier.erased(0.01)) is False
    waiting = rig.begin(rig.tier.erased(10.0))
    assert not waiting.done()
    rig.work(5)
    assert waiting.result() is True


def test_what_was_dropped_is_erased_before_the_tier_ends(make: Make) -> None:
    first = written(make)
    HeldThreads.held = True
    first.run(first.tier.forget(ROOT, A))
    closing = first.begin(first.tier.close())
    first.work(5)
    HeldThreads.held = False
    first.run(closing)
    second = opened(make())
    assert (on_disk(second, A), on_disk(second, B)) == (0, 5)


@pytest.mark.parametrize(("faults", "left", "told"), [(1, 0, "discards"), (2, 5, "delete it")])
def test_a_file_from_which_what_was_dropped_cannot_be_erased_is_discarded(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    faults: int,
    left: int,
    told: str,
) -> None:
    monkeypatch.setattr(tier, "FLUSH_S", 0.02)
    first = written(make)
    first.calls.write_faults = ["eio"] * faults
    first.run(first.tier.forget(ROOT, A))
    first.run(first.tier.close(flush=True))
    assert told in caplog.text
    second = opened(make())
    assert (on_disk(second, A), on_disk(second, B)) == (left, left)


def test_it_is_told_if_the_file_from_which_something_was_dropped_was_never_open(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "FLUSH_S", 0.02)
    written(make).kill()
    broken = make()
    broken.calls.read_faults = ["eio"]
    broken.start()
    broken.run(broken.tier.forget(ROOT, []))
    broken.run(broken.tier.close())
    assert "never open: what was dropped may be in" in caplog.text


def test_looks_that_find_only_copies_do_not_end_the_last_writing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demotion, "LAST_LOOKED_AT", 5)
    first = opened(make())
    cache(first, A)
    first.demote()
    first.kill()
    second = opened(make())
    cache(second, B)
    cache(second, A)  # goes last, so it is looked at first; that its blocks are on disk is not known yet
    second.run(second.tier.close(flush=True))
    third = opened(make())
    assert (on_disk(third, A), on_disk(third, B)) == (5, 5)
