"""What a status tells of an instance's ranks."""

from __future__ import annotations

import os
from dataclasses import replace

from alignedserve.metrics import Page
from alignedserve.ranks.degrees import Degrees
from alignedserve.ranks.now import RankNow, RankWatch, WaitedFile, resident_bytes, show_ranks

MIB = 1 << 20
FIRST = RankNow(0, 12, resident_bytes=512 * MIB, waited_s=10.0)
OTHER = RankNow(1, 13, resident_bytes=500 * MIB, waited_s=20.0)


def test_ranks_are_told_with_memory_and_the_share_of_time_that_they_wait() -> None:
    watch, two = RankWatch(), Degrees(2)
    assert watch.describe(two, [FIRST, OTHER], 100.0) == "2 ranks (pid 12: 512.0 MiB; pid 13: 500.0 MiB)"
    later = [replace(FIRST, waited_s=11.0), replace(OTHER, waited_s=22.0)]
    assert "waits" not in watch.describe(two, later, 101.0)  # the window is too short
    said = watch.describe(two, later, 104.0)
    assert said == "2 ranks (pid 12: 512.0 MiB, waits 25%; pid 13: 500.0 MiB, waits 50%)"
    assert watch.describe(two, later, 105.0) == said  # of the last window
    assert "pid 13: 500.0 MiB, waits 0%" in watch.describe(two, later, 106.0)


def test_before_ranks_are_started_there_is_only_their_number() -> None:
    assert RankWatch().describe(Degrees(1, 2), [], 1.0) == "2 stages"


def test_stages_are_told_with_their_layers_and_nodes() -> None:
    ranks = [RankNow(0, 12, layers=range(10)), RankNow(1, 13, "b", layers=range(10, 11))]
    assert RankWatch().describe(Degrees(1, 2), ranks, 1.0) == "2 stages (pid 12: layers 0-9; pid 13 on b: layer 10)"
    assert RankWatch().describe(Degrees(1, 2), [RankNow(0, 12), RankNow(1, 13)], 1.0) == "2 stages (pid 12; pid 13)"


def test_what_a_rank_writes_the_first_one_reads() -> None:
    first = WaitedFile(4)
    other = WaitedFile(4, os.dup(first.descriptor))
    other.note(3, 1.5)
    assert [first.of(index) for index in range(4)] == [0.0, 0.0, 0.0, 1.5]


def test_memory_is_that_of_the_process_and_none_when_it_has_ended() -> None:
    assert resident_bytes(os.getpid()) > 10 * MIB
    assert resident_bytes(1 << 30) == 0


def test_each_rank_has_metrics_of_its_own() -> None:
    page = Page(instance="decode-0")
    show_ranks(page, [replace(FIRST, weight_bytes=7), replace(OTHER, weight_bytes=9)])
    text = page.text()
    assert 'alignedserve_rank_waited_seconds_total{instance="decode-0",rank="1"} 20.0' in text
    assert 'alignedserve_rank_weight_bytes{instance="decode-0",rank="0"} 7.0' in text
    assert 'alignedserve_rank_resident_bytes{instance="decode-0",rank="1"} 5.24288e+08' in text
