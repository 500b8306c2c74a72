"""What the pool remembers of ended requests: the newest epoch, for a limited time."""

from __future__ import annotations

from alignedserve.kv_pool import epochs
from alignedserve.kv_pool.epochs import OverEpochs


def test_the_newest_epoch_counts_whatever_the_order():
    over = OverEpochs()
    over.end("a", 3)
    over.end("a", 1)
    assert over.newest("a") == 3
    assert over.newest("b") == -1


def test_it_is_forgotten_when_nothing_late_can_speak_of_it_any_more():
    now = [0.0]
    over = OverEpochs(lambda: now[0])
    over.end("old", 0)
    now[0] = epochs.REMEMBERED_S / 2
    over.end("younger", 0)
    over.end("old", 1)  # mentioned again
    now[0] = epochs.REMEMBERED_S * 1.25
    over.end("new", 0)
    assert (over.newest("old"), over.newest("younger"), len(over)) == (1, 0, 3)
    now[0] = epochs.REMEMBERED_S * 2.5
    over.end("newer", 0)
    assert over.newest("old") == -1
    assert len(over) == 1


def test_its_number_is_bounded(monkeypatch):
    monkeypatch.setattr(epochs, "MAX_REMEMBERED", 10)
    over = OverEpochs()
    for number in range(100):
        over.end(str(number), 0)
    assert len(over) == 10
    assert over.newest("99") == 0
    assert over.newest("0") == -1
