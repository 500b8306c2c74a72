"""Admission by prediction, in virtual time: refusals, latencies of accepted requests, and a steady rate."""

from __future__ import annotations

import statistics

import pytest

from alignedserve.control.samples import value
from alignedserve.errors import OverloadedError
from alignedserve.metrics import Page
from alignedserve.request import PROBE, RequestKey
from alignedserve.scheduler.core import events as ev
from alignedserve.scheduler.core.actions import Reject
from alignedserve.scheduler.core.overload import MOST_ROOM, Overload
from alignedserve.scheduler.cost.pass_model import LinearCostModel, LinearFit, Passes, RunningQuantile
from support.core_cell import CoreCell, key, only
from support.paced_cell import Pace, PacedCell

TTFT_S, TPOT_S = 0.075, 0.027
TOKENS = 32
PACE = Pace(prefill_s=0.004, prefill_token_s=1.2e-4, iteration_s=0.004, row_s=3e-4, noise=0.5)


def kept(lives, ttft_s=TTFT_S, tpot_s=TPOT_S):
    """The accepted requests that met both objectives."""
    return [life for life in lives if accepted(life) and life.ttft_s() <= ttft_s and life.tpot_s(TOKENS) <= tpot_s]


def accepted(life):
    return life.retry_after_s is None


def test_without_objectives_no_request_is_refused_for_load():
    cell = PacedCell(PACE)
    lives = cell.offer(300, 3)
    assert cell.core.room(cell.now_s).requests == MOST_ROOM
    cell.drain()
    assert all(accepted(life) and life.ended_s for life in lives)
    cell.core.check_integrity()


def test_at_ten_times_the_capacity_as_many_requests_meet_the_objectives_as_at_capacity():
    good = {}
    for rate in (40, 60, 80, 600):
        cell = PacedCell(PACE, ttft_objective_s=TTFT_S, tpot_objective_s=TPOT_S)
        cell.offer(5, 3)
        early, lives = cell.offer(rate, 5), cell.offer(rate, 10)
        cell.drain()
        good[rate] = len(kept(lives))
        assert good[rate] >= 0.85 * sum(map(accepted, lives)), "most of what is accepted keeps what was promised"
        assert all(life.ended_s for life in early + lives if accepted(life))
        cell.core.check_integrity()
    assert good[600] >= 0.9 * max(good.values())


class LoadOfNow(Overload):
    """Judges by the current decode load, which Mooncake found to oscillate."""

    def _decoding_at(self, now_s, after_s, decode_s):
        return float(len(self._times))


def accepted_each_quarter_second(overload=None):
    """Arrivals far beyond the decode capacity, a prefill that runs ahead of it, and long decodes."""
    cell = PacedCell(Pace(prefill_s=0.001, prefill_token_s=5e-5, row_s=3e-4), tpot_objective_s=TPOT_S)
    if overload is not None:
        cell.core._overload = overload(cell.core._state, cell.core._admission)
    cell.offer(5, 3)
    rates = [sum(map(accepted, cell.offer(600, 0.25))) for _ in range(40)]
    return rates[8:]


def test_the_rate_of_acceptance_is_steady_where_the_load_of_now_makes_it_swing():
    steady, swinging = accepted_each_quarter_second(), accepted_each_quarter_second(LoadOfNow)

    def spread(rates):
        return statistics.pstdev(rates) / statistics.mean(rates)

    assert spread(steady) < 0.45
    assert spread(swinging) > 2 * spread(steady)


def test_what_is_submitted_again_is_never_refused_for_load():
    cell = PacedCell(PACE, ttft_objective_s=TTFT_S, tpot_objective_s=TPOT_S)
    cell.offer(5, 3)
    lives = cell.offer(600, 1)
    assert not all(map(accepted, lives))
    assert accepted(cell.submit("again", 64, epoch=1))


def test_an_empty_cluster_takes_a_request_that_it_could_not_serve_in_time():
    cell = PacedCell(PACE, ttft_objective_s=1e-4, tpot_objective_s=1e-4)
    assert accepted(cell.submit("first", 64))
    assert not accepted(cell.submit("second", 64))
    cell.drain()
    assert accepted(cell.submit("third", 64))


def test_nothing_is_learnt_from_probes():
    cell = PacedCell(PACE, ttft_objective_s=TTFT_S, tpot_objective_s=TPOT_S)
    cell.offer(5, 3)
    cell.drain()
    before = cell.core._overload.outlook(cell.now_s)
    for number in range(100):
        assert accepted(cell.submit(f"{PROBE}{number}", 1))
        cell.drain()
    after = cell.core._overload.outlook(cell.now_s)
    assert after.first_s == pytest.approx(before.first_s, rel=0.1)
    assert after.first_s > cell.core._overload.predict(1, 1, cell.now_s).first_s
    cell.offer(600, 1)
    refused = cell.core._overload.refused
    assert refused > 0
    assert not accepted(cell.submit(f"{PROBE}refused", 1))
    assert cell.core._overload.refused == refused


def test_a_prompt_is_judged_by_what_must_be_computed_of_it():
    cell = CoreCell(
        pool=5000, cache=1000, most_prompt=2000, queue_tokens=100, ttft_objective_s=0.27, homes={"p0": "k0", "d0": "k0"}
    )
    (view,) = cell.core._state.instances.prefill.values()
    view.load.cost = LinearCostModel(1e-4)

    def refused(name, **more):
        meta = ev.RequestMeta(key(name), 1000, 1020, f"group-{name}", "gw", **more)
        return bool(only(cell.do(ev.Submitted((meta,))), Reject))

    assert not refused("a", marks=b"mark-512"), "an empty cluster takes everything"
    assert not refused("b", marks=b"other512"), "2,000 tokens"
    assert refused("c")
    assert not refused("d", marks=b"mark-512"), "what a computes is not computed again"
    assert refused("e", marks=b"other512"), "488 tokens beside 2,488 of others"
    assert not refused("f", cached=(("k0", 990),))
    cell.do(ev.CancelRequested((key("d"),)))
    assert not refused("g", marks=b"other512"), "what b will leave is not computed again"


def test_room_is_told_by_what_must_be_computed_of_a_typical_prompt():
    cell = CoreCell(pool=5000, cache=1000, most_prompt=2000, ttft_objective_s=0.06, homes={"p0": "k0", "d0": "k0"})
    (view,) = cell.core._state.instances.prefill.values()
    view.load.cost = LinearCostModel(1e-4)
    for name, cached, room in ("a", 990, True), ("b", 990, True), ("c", 0, False):
        meta = ev.RequestMeta(key(name), 1000, 1020, f"group-{name}", "gw", cached=(("k0", cached),))
        cell.core._overload.refusal = lambda *_: None
        cell.do(ev.Submitted((meta,)))
        assert bool(cell.core.room(cell.now_s).requests) == room


def test_time_that_the_gateway_has_had_it_counts():
    cell = CoreCell(ttft_objective_s=0.5)
    cell.submit("a")
    late = ev.RequestMeta(key("late"), 10, 20, "late", "gw", age_s=0.6)
    (reject,) = only(cell.do(ev.Submitted((late,))), Reject)
    assert isinstance(reject.error, OverloadedError)
    assert reject.error.http_status == 429
    assert "0.5 s" in reject.error.message
    assert not only(cell.submit("b"), Reject)


def test_a_request_that_would_wait_too_long_for_room_in_pool_and_batch_is_refused():
    """The pool holds eight requests for two seconds each, so the queue advances by four a second."""
    cell = PacedCell(Pace(iteration_s=0.06, row_s=0.0), pool_blocks=64, cache_blocks=64, max_running=8, max_wait_s=5.0)
    cell.offer(2, 10, tokens=100)
    lives = cell.offer(20, 20, tokens=100)
    refused = [life for life in lives if not accepted(life)]
    assert refused
    assert all(0.0 < life.retry_after_s <= 60.0 for life in refused)
    cell.drain()
    waits = [life.ended_s - life.arrived_s - TOKENS * 0.06 for life in lives if accepted(life)]
    assert 2.5 < max(waits) < 10.0, "about the five seconds that are allowed"
    page = Page()
    cell.core.show_metrics(page, cell.now_s)
    assert value(page.text(), "alignedserve_requests_refused_for_load_total") == len(refused)
    cell.core.check_integrity()


def cell_after_some_load():
    cell = PacedCell(PACE, ttft_objective_s=TTFT_S, tpot_objective_s=TPOT_S)
    cell.offer(20, 3)
    return cell


def cell_with_slow_prefill():
    cell = PacedCell(Pace(prefill_token_s=1e-2), ttft_objective_s=1.0)
    for number in range(12):
        cell.submit(number, 20 + 10 * (number % 4))
        cell.run_until(cell.now_s + 0.6)
    return cell


def test_retry_after_grows_with_what_waits():
    cell = cell_with_slow_prefill()
    cell.submit("before", 50)
    refused = [cell.submit(f"long{tokens}", tokens) for tokens in (500, 2000)]
    assert refused[1].retry_after_s > refused[0].retry_after_s + 5.0


def test_room_falls_to_none():
    cell = cell_after_some_load()
    some = cell.core.room(cell.now_s)
    for name in range(200):
        cell.submit(f"more{name}", 64)
    none = cell.core.room(cell.now_s)
    assert some.limited
    assert 0 < some.requests < MOST_ROOM
    assert none.requests == 0


@pytest.mark.parametrize(("made", "most_s"), [(cell_after_some_load, 0.05), (cell_with_slow_prefill, 1.0)])
def test_a_client_that_retries_when_it_was_told_to_finds_room_soon(made, most_s):
    cell = made()
    while cell.core.room(cell.now_s).requests:
        cell.submit(len(cell.lives), 50)
    full_s, asked = cell.now_s, 0
    while not (room := cell.core.room(cell.now_s)).requests:
        cell.run_until(cell.now_s + room.again_s)
        asked += 1
    assert asked <= 3
    assert cell.now_s - full_s <= most_s


def test_a_cancelled_decode_teaches_nothing_and_leaves_nothing():
    cell = CoreCell(tpot_objective_s=10.0)
    cell.wait("a")
    cell.do(ev.Joined("d0", (key("a"),)))
    cell.do(ev.CancelRequested((key("a"),)), after_s=1.0)
    cell.do(ev.Finished((key("a"),)))
    times = cell.core._state.decode_times
    assert (len(times), times.mean_tokens) == (0, 0.0)


def test_the_quantile_follows_its_share_and_shrugs_off_an_outlier():
    quantile = RunningQuantile(0.8)
    for number in range(3000):
        quantile.observe(float(number * 7 % 100))
    assert quantile.value == pytest.approx(80.0, abs=15.0)
    before = quantile.value
    quantile.observe(1e6)
    assert quantile.value < before + 50.0


def test_more_work_is_never_predicted_to_take_less_time():
    fit = LinearFit((0.01, 0.0, 0.0), (1.0, 64.0, 65536.0))
    for rows, seconds in (10, 0.020), (11, 0.018), (12, 0.016), (10, 0.021):
        fit.observe((1.0, rows, rows * 100), seconds)
    assert min(fit.weights) >= 0.0
    assert fit.predict((1.0, 20, 2000)) >= fit.predict((1.0, 10, 1000))


def test_decode_passes_teach_each_instance_its_own_speed():
    cell = CoreCell(decodes=2)
    for _ in range(30):
        for decode_id, seconds in ("d0", 0.2), ("d1", 0.8):
            cell.do(ev.DecodeReported(decode_id, 100, 100, 0, 0, 0, 0, 0, 0, measured=Passes(10, 100, 5000, seconds)))
    costs = [cell.core._state.instances.decode[name].cost.predict_iteration_s([50] * 10) for name in ("d0", "d1")]
    assert costs == pytest.approx([0.02, 0.08], rel=0.05)


def test_an_instance_where_nothing_has_changed_is_not_predicted_anew(monkeypatch):
    """Each new request is compared with all instances, so every prediction would be repeated for each request."""
    asked = []
    predict = LinearCostModel.predict_iteration_s
    monkeypatch.setattr(
        LinearCostModel, "predict_iteration_s", lambda self, lengths: asked.append(1) or predict(self, lengths)
    )
    cell = CoreCell(decodes=8)
    for number in range(8):
        cell.make_busy(f"d{number}", name=str(number))
    report = ev.DecodeReported("d0", 100, 0, 1, 10, 10, 1, 0, 0, measured=Passes(10, 10, 100, 0.2))
    cell.do(report)
    asked.clear()
    for number in range(40):
        cell.wait(f"r{number}")
    assert 0 < len(asked) < 4 * 40  # a few for each instance at first, then none


def test_what_is_kept_of_predictions_goes_with_what_an_instance_measures():
    cell = CoreCell()
    view = cell.core._state.instances.decode["d0"]
    assert view.predict_equal_s(10, 50) == view.cost.predict_iteration_s([50] * 10)
    cell.do(ev.DecodeReported("d0", 100, 100, 0, 0, 0, 0, 0, 0, measured=Passes(10, 100, 5000, 9.0)))
    assert view.predict_equal_s(10, 50) == view.cost.predict_iteration_s([50] * 10) > 0.02
    for requests in range(1, 600):
        assert view.predict_equal_s(requests, 9) == view.cost.predict_iteration_s([9] * requests)


def test_request_keys_of_the_paced_cell_are_all_forgotten_at_the_end():
    cell = PacedCell(PACE, ttft_objective_s=TTFT_S)
    cell.offer(100, 1)
    cell.drain()
    assert cell.core.describe() == dict.fromkeys(cell.core.describe(), 0)
    assert RequestKey("0") not in cell.core._state.ledger.only.waiting
