"""What unequal lengths cost is learned from sums over iterations, with its error; noise does not make it up."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from alignedserve.control.passes import PassMeter
from alignedserve.proto import decode_worker_pb2 as dw
from alignedserve.scheduler.cost.load import load_step_cost
from alignedserve.scheduler.cost.pass_model import LinearCostModel, Passes
from alignedserve.scheduler.cost.step import StepCost
from alignedserve.scheduler.policies.rounds import LEAST_FOR_ROUND
from alignedserve.scheduler.process.messaging import decode_reported

OPT, LLAMA = "a100-opt-13b", "rtxpro6000-llama-3.1-8b"
CACHE_TOKENS = {OPT: 60_000, LLAMA: 500_000}
REPORTED = 4  # iterations in a report


def mixed(rng: random.Random, short: float) -> int:
    return rng.randint(32, 999) if rng.random() < short else rng.randint(1000, 8000)


def batches(rng: random.Random, draw: Callable[[], int], cache_tokens: int) -> Iterator[list[list[int]]]:
    """The lengths of each iteration of a report, for ever, of a batch that is refilled as requests end.

    Now and then it is filled less, as in a cluster whose load changes.
    """
    running: list[list[int]] = []  # [tokens, tokens left to decode]
    full = cache_tokens
    while True:
        if rng.random() < 0.05:
            full = cache_tokens * rng.uniform(0.5, 1.0)
        report = []
        for _ in range(REPORTED):
            running = [[tokens + 1, left - 1] for tokens, left in running if left > 1]
            held = sum(tokens for tokens, _ in running)
            while held < 0.9 * full:
                tokens = draw()
                running.append([tokens, rng.randint(16, 256)])
                held += tokens
            report.append([tokens for tokens, _ in running])
        yield report


def passes(report: list[list[int]], seconds: float) -> Passes:
    return Passes(
        len(report),
        sum(map(len, report)),
        sum(map(sum, report)),
        seconds,
        sum(len(lengths) * max(lengths) for lengths in report),
    )


def teach(
    model: LinearCostModel,
    reports: Iterator[list[list[int]]],
    count: int,
    seconds_of: Callable[[list[int]], float],
    noise: Callable[[], float] = lambda: 1.0,
) -> None:
    for _ in range(count):
        report = next(reports)
        model.observe_iterations(passes(report, noise() * sum(map(seconds_of, report))))


def bubble(cost: StepCost, lengths: list[int]) -> float:
    step_s = cost.step_s((), lengths)
    return (step_s - cost.balanced_step_s((), lengths)) / step_s


def full_batch(draw: Callable[[], int], cache_tokens: int) -> list[int]:
    lengths: list[int] = []
    while sum(lengths) < 0.9 * cache_tokens:
        lengths.append(draw())
    return lengths


@pytest.mark.parametrize(
    ("name", "short", "least", "most"),
    [(OPT, 0.95, 0.16, 0.26), (OPT, 0.8, 0.1, 0.2), (OPT, 0.5, 0.04, 0.08), (LLAMA, 0.95, 0.0, 0.07)],
)
def test_the_share_of_a_mixed_batch_is_found(name: str, short: float, least: float, most: float) -> None:
    rng = random.Random(3)
    cost, model = load_step_cost(name), LinearCostModel()

    def draw() -> int:
        return mixed(rng, short)

    teach(model, batches(rng, draw, CACHE_TOKENS[name]), 400, lambda lengths: cost.step_s((), lengths))
    for _ in range(5):
        lengths = full_batch(draw, CACHE_TOKENS[name])
        expected, learned = bubble(cost, lengths), model.unequal_lengths_share(lengths)
        assert least <= expected <= most
        assert learned is not None
        assert abs(learned.value - expected) <= 0.03
        assert learned.error <= 0.03
    own = model.unequal_lengths_share()
    assert own is not None
    assert least - 0.03 <= own.value <= most + 0.03


def test_equal_lengths_cost_nothing_and_few_observations_tell_nothing() -> None:
    rng = random.Random(4)
    cost, model = load_step_cost(OPT), LinearCostModel()
    reports = batches(rng, lambda: mixed(rng, 0.95), CACHE_TOKENS[OPT])
    teach(model, reports, 63, lambda lengths: cost.balanced_step_s((), lengths))
    assert model.unequal_lengths_share([100, 8000]) is None
    teach(model, reports, 300, lambda lengths: cost.balanced_step_s((), lengths))
    learned = model.unequal_lengths_share([100] * 60 + [8000] * 4)
    assert learned is not None
    assert learned.value + learned.error < 0.02
    assert model.unequal_lengths_share([500] * 64).value == 0.0  # type: ignore[union-attr]


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_batches_of_equal_lengths_do_not_tell_what_unequal_ones_cost(noise: float) -> None:
    rng = random.Random(5)
    cost, model = load_step_cost(OPT), LinearCostModel()
    for _ in range(600):
        lengths = [rng.randint(300, 305)] * rng.randint(60, 180)
        seconds = cost.step_s((), lengths) * rng.gauss(1.0, noise)
        model.observe_iterations(passes([lengths], seconds))
    learned = model.unequal_lengths_share([100] * 100 + [8000] * 4)
    assert learned is not None
    assert learned.value + learned.error >= LEAST_FOR_ROUND
    assert learned.value - 2 * learned.error < LEAST_FOR_ROUND


class Drift:
    """Noise that lasts for some observations, as of a machine that others use too."""

    def __init__(self, rng: random.Random, spread: float, keeps: float) -> None:
        self._rng, self._spread, self._keeps, self._state = rng, spread, keeps, 0.0

    def __call__(self) -> float:
        self._state = self._keeps * self._state + (1.0 - self._keeps**2) ** 0.5 * self._rng.gauss(0.0, 1.0)
        return max(0.2, 1.0 + self._spread * self._state)


@pytest.mark.parametrize(("spread", "keeps"), [(0.1, 0.0), (0.3, 0.0), (0.15, 0.8)])
def test_noise_makes_no_bubble_out_of_nothing(spread: float, keeps: float) -> None:
    """Judged after every 50 observations, as if a round began then; two standard errors are rarely exceeded."""
    cost = load_step_cost(OPT)
    believed = judged = 0
    for seed in range(3):
        rng = random.Random(seed)
        model, noise = LinearCostModel(), Drift(rng, spread, keeps)
        reports = batches(rng, lambda rng=rng: mixed(rng, 0.95), CACHE_TOKENS[OPT])  # type: ignore[misc]
        lengths = full_batch(lambda rng=rng: mixed(rng, 0.95), CACHE_TOKENS[OPT])  # type: ignore[misc]
        for _ in range(14):
            teach(model, reports, 50, lambda lengths: cost.balanced_step_s((), lengths), noise)
            learned = model.unequal_lengths_share(lengths)
            if learned is not None:
                judged += 1
                believed += learned.value - 2 * learned.error >= LEAST_FOR_ROUND
    assert judged == 3 * 13
    assert believed <= 0.05 * judged


def test_a_change_is_learned_and_a_stall_is_not() -> None:
    rng = random.Random(6)
    cost, model = load_step_cost(OPT), LinearCostModel()
    reports = batches(rng, lambda: mixed(rng, 0.95), CACHE_TOKENS[OPT])
    lengths = full_batch(lambda: mixed(rng, 0.95), CACHE_TOKENS[OPT])
    teach(model, reports, 400, lambda lengths: cost.balanced_step_s((), lengths))
    report = next(reports)
    model.observe_iterations(passes(report, 100.0))
    teach(model, reports, 40, lambda lengths: cost.balanced_step_s((), lengths))
    learned = model.unequal_lengths_share(lengths)
    assert learned is not None
    assert learned.value < LEAST_FOR_ROUND
    teach(model, reports, 2300, lambda lengths: cost.step_s((), lengths))
    learned = model.unequal_lengths_share(lengths)
    assert learned is not None
    assert learned.value == pytest.approx(bubble(cost, lengths), abs=0.03)


def test_an_older_worker_that_does_not_measure_the_longest_teaches_nothing_about_it() -> None:
    """Its sums are equal in all else, and predictions are learned as before."""
    rng = random.Random(7)
    cost, old, new = load_step_cost(OPT), LinearCostModel(), LinearCostModel()
    reports = batches(rng, lambda: mixed(rng, 0.95), CACHE_TOKENS[OPT])
    for _ in range(200):
        whole = passes(report := next(reports), sum(cost.step_s((), lengths) for lengths in report))
        new.observe_iterations(whole)
        measured = {"passes": whole.passes, "tokens": whole.tokens, "cached_tokens": whole.cached_tokens}
        sent = dw.DecodeDescription(measured={**measured, "seconds": whole.seconds})  # type: ignore[arg-type]
        received = decode_reported("decode-0", sent).measured
        assert received is not None
        old.observe_iterations(received)
    assert old.unequal_lengths_share() is None
    assert new.unequal_lengths_share() is not None
    assert old.predict_iteration_s([700] * 80) == new.predict_iteration_s([700] * 80)


def test_the_worker_reports_what_equal_lengths_of_the_longest_would_read() -> None:
    meter = PassMeter()
    for lengths in [10, 30], [11, 31, 5]:
        meter.add(len(lengths), sum(lengths), 0.5, padded_tokens=len(lengths) * max(lengths))
    taken = meter.take()
    assert taken is not None
    sent = dw.DecodeDescription.FromString(dw.DecodeDescription(measured=taken).SerializeToString())
    assert decode_reported("decode-0", sent).measured == Passes(2, 5, 87, 1.0, 153)
