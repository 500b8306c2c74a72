"""Samples of metrics at two moments: rates, shares and quantiles, also where processes began or ended meanwhile."""

from __future__ import annotations

import pytest

from alignedserve.gateway.live.samples import Change, Samples, Window
from alignedserve.metrics import Histogram, Page


def page(instance: str, tokens: float, *, extra: bool = False, waits: tuple[float, ...] = ()) -> str:
    found = Page(instance=instance)
    found.counter("tokens_total", "tokens", tokens)
    if extra:
        found.counter("ended_total", "ended", 3, outcome="stop")
    if waits:
        histogram = Histogram((0.1, 1.0))
        for wait_s in waits:
            histogram.observe(wait_s)
        found.histogram("wait_seconds", "waits", histogram)
    return found.text()


def change(before: str, now: str, seconds: float = 2.0) -> Change:
    return Change(Samples(before, 10.0), Samples(now, 10.0 + seconds))


def test_rates_are_of_all_processes_and_of_one() -> None:
    both = change(page("a", 10) + page("b", 5), page("a", 30) + page("b", 6))
    assert both.rate("tokens_total") == 10.5
    assert both.rate("tokens_total", instance="b") == 0.5
    assert both.grown("instance", "tokens_total") == {"a": 20, "b": 1}


def test_a_process_that_began_again_counts_from_0_and_one_that_is_new_not_at_all() -> None:
    assert change(page("a", 100), page("a", 4)).rate("tokens_total") == 2
    assert change(page("a", 100), page("a", 100) + page("b", 50)).rate("tokens_total") == 0
    assert change(page("a", 100) + page("b", 50), page("a", 100)).rate("tokens_total") == 0


def test_a_series_that_a_known_process_shows_for_the_first_time_began_at_0() -> None:
    assert change(page("a", 1), page("a", 1, extra=True)).grown("outcome", "ended_total") == {"stop": 3}


def test_quantiles_are_linear_within_a_bucket_and_end_at_the_last_bound() -> None:
    before, now = page("a", 0, waits=(0.05,)), page("a", 0, waits=(0.05, 0.05, 0.05, 0.5, 5.0))
    found = change(before, now).quantiles("wait_seconds", 0.25, 0.5, 0.75, 0.99)
    assert found == [pytest.approx(0.05), pytest.approx(0.1), pytest.approx(1.0), 1.0]
    assert change(now, now).quantiles("wait_seconds", 0.5) == [None]
    assert change(now, now).quantiles("other_seconds", 0.5) == [None]


def test_a_share_is_unknown_while_its_whole_stands_still() -> None:
    before, now = page("a", 10), page("a", 20)
    assert change(before, now).share("tokens_total", "tokens_total") == 1.0
    assert change(now, now).share("tokens_total", "tokens_total") is None


def test_a_window_forgets_what_is_older_and_all_after_a_pause() -> None:
    window, seconds = Window(10.0), []
    for at_s in (0.0, 4.0, 8.0, 12.0, 16.0, 50.0, 51.0):
        found = window.add(Samples(page("a", at_s), at_s))
        seconds.append(found.now.at_s - found.before.at_s)
    assert seconds == [0.0, 4.0, 8.0, 12.0, 12.0, 0.0, 1.0]


def test_a_window_does_not_count_from_a_page_that_lacks_what_is_needed() -> None:
    """A new supervisor's first pages have nothing of gateways."""
    window, rates = Window(10.0, "tokens_total"), []
    for at_s, text in ((0.0, ""), (1.0, page("a", 5)), (2.0, ""), (12.0, page("a", 27)), (22.0, page("a", 47))):
        found = window.add(Samples(text, at_s))
        rates.append(None if found.before is found.now else found.rate("tokens_total"))
    assert rates == [None, None, 0.0, 2.0, 2.0]


def test_labels_with_quotes_and_commas_are_read() -> None:
    found = Page(instance="a")
    found.gauge("thing", "a thing", 2, store='x/"y",z')
    assert Samples(found.text(), 0.0).by("store", "thing") == {'x/\\"y\\",z': 2}
