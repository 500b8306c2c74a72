"""Pass costs: exact at measured points, equal for one pass and for many, and clear errors for broken files."""

from __future__ import annotations

import csv
import itertools
import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.config import Config
from alignedserve.config_sources import from_tree
from alignedserve.errors import ConfigError
from alignedserve.scheduler.core.scheduler_core import SchedulerCore
from alignedserve.scheduler.cost.fit import fit_grid
from alignedserve.scheduler.cost.grid import Curve, Grid4, Surface
from alignedserve.scheduler.cost.load import (
    configured_cost,
    default_hardware,
    load_parts,
    load_step_cost,
    shipped_names,
)
from alignedserve.scheduler.cost.makespan import makespan, makespan_bound, typical_order
from alignedserve.scheduler.cost.measured import MeasuredCost
from alignedserve.scheduler.cost.pass_model import LinearCostModel, Passes
from alignedserve.scheduler.cost.prior import cost_model_factory
from alignedserve.scheduler.cost.skew import AXES, SkewTable
from alignedserve.scheduler.cost.step import KERNEL_MODES, ChunkShape
from alignedserve.simulator.hardware import Hardware
from alignedserve.simulator.slowed import SlowedCost
from support.measured_tables import RTX, TABLES, needs_tables

LENGTHS = st.lists(st.integers(1, 40_000), min_size=1, max_size=40)


loaded = cache(load_step_cost)


@pytest.mark.parametrize("name", shipped_names())
@pytest.mark.parametrize("mode", KERNEL_MODES)
def test_what_ships_loads_and_says_whose_it_is(name: str, mode: str) -> None:
    cost = load_step_cost(name, mode)
    told = cost.describe()
    assert (told["name"], told["kernel_mode"]) == (name, mode)
    assert len(told["source"]["sha256"]) == 64
    assert all(told["source"][key] for key in ("attribution", "licence"))
    json.dumps(told)
    hardware = Hardware(**default_hardware(name))
    assert 1000 < hardware.kv_tokens < hardware.pool_tokens
    assert 0.001 < cost.step_s((), [500] * 32) < cost.step_s((), [500] * 64) < 1.0


@given(lengths=LENGTHS, steps=st.integers(0, 70), name=st.sampled_from(shipped_names()))
@settings(max_examples=60, deadline=None)
def test_a_run_of_passes_is_each_of_them_bit_for_bit(lengths: list[int], steps: int, name: str) -> None:
    for mode in KERNEL_MODES:
        cost = loaded(name, mode)
        steps = steps if mode == "split_kv" else min(steps, 4)
        expected = [cost.step_s((), [length + step for length in lengths]) for step in range(steps)]
        assert cost.run_s(lengths, steps) == expected
        balanced = [cost.balanced_step_s((), [length + step for length in lengths]) for step in range(steps)]
        assert cost.balanced_run_s(lengths, steps) == balanced


@given(lengths=LENGTHS, name=st.sampled_from(shipped_names()))
@settings(max_examples=60, deadline=None)
def test_number_sum_longest_and_shortest_are_all_that_a_split_kernel_asks(lengths: list[int], name: str) -> None:
    cost, counted = loaded(name), (len(lengths), sum(lengths), max(lengths), min(lengths))
    assert cost.counted_s(*counted) == cost.step_s((), lengths)
    assert SlowedCost(cost, 1.5).counted_s(*counted) == 1.5 * cost.step_s((), lengths)
    assert cost.counted_s(0, 0, 0, 0) == 0


@given(lengths=st.lists(st.integers(1, 4000), min_size=1, max_size=3))
@settings(max_examples=30, deadline=None)
def test_other_kernels_take_the_requests_between_as_equal(lengths: list[int]) -> None:
    """With at most one between, nothing is assumed."""
    cost = loaded(RTX, "no_split_longest_first")
    counted = cost.counted_s(len(lengths), sum(lengths), max(lengths), min(lengths))
    assert counted == pytest.approx(cost.step_s((), lengths))


@given(lengths=LENGTHS, longer=st.integers(0, 5000))
@settings(max_examples=60, deadline=None)
def test_more_work_takes_no_less_time(lengths: list[int], longer: int) -> None:
    cost = loaded(RTX)
    equal = [max(lengths)] * len(lengths)
    assert cost.step_s((), equal) <= cost.step_s((), [equal[0] + longer] * len(equal))
    assert cost.step_s((), equal) <= cost.step_s((), [*equal, equal[0]])
    assert cost.step_s((), lengths) <= cost.step_s((), equal) * (1 + 1e-12), "never slower than all as the longest"
    assert cost.balanced_step_s((), lengths) <= cost.step_s((), lengths) * (1 + 1e-12)
    chunk = ChunkShape(1 + longer % 2048, max(lengths))
    assert cost.step_s([chunk], []) <= cost.step_s([ChunkShape(chunk.tokens, chunk.cached_tokens + longer)], [])
    assert cost.step_s([chunk], []) <= cost.step_s([ChunkShape(chunk.tokens + longer, chunk.cached_tokens)], [])


@given(lengths=LENGTHS, order=st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_the_order_of_requests_says_nothing_but_in_a_kernel_that_does_not_sort(lengths: list[int], order: Any) -> None:
    mixed = list(lengths)
    order.shuffle(mixed)
    for mode in set(KERNEL_MODES) - {"no_split"}:
        cost = loaded(RTX, mode)
        assert cost.step_s((), lengths) == cost.step_s((), mixed)
        assert cost.step_s([ChunkShape(100)], lengths) == cost.step_s([ChunkShape(100)], mixed)


def list_schedule(jobs: list[int], workers: int) -> int:
    """Each job to the worker that is free first."""
    free = [0] * workers
    for job in jobs:
        first = free.index(min(free))
        free[first] += job
    return max(free) if jobs else 0


@given(lengths=st.lists(st.integers(1, 50), max_size=30), heads=st.integers(1, 9), workers=st.integers(1, 23))
@settings(max_examples=150, deadline=None)
def test_the_makespan_is_that_of_scheduling_job_by_job(lengths: list[int], heads: int, workers: int) -> None:
    jobs = [length for length in lengths for _ in range(heads)]
    found = makespan(lengths, heads, workers)
    assert found == list_schedule(jobs, workers)
    if jobs:
        assert max(lengths) <= found <= makespan_bound(sum(lengths), max(lengths), heads, workers)


def test_a_long_job_that_begins_last_costs_more_than_one_that_begins_first() -> None:
    batch, sorted_jobs = (load_step_cost(RTX, mode, block_bandwidth=5e9) for mode in KERNEL_MODES[1:])
    last, first = [500] * 200 + [8000], [8000] + [500] * 200
    assert batch.step_s((), last) > 1.2 * batch.step_s((), first)
    assert sorted_jobs.step_s((), last) == batch.step_s((), first) == sorted_jobs.step_s((), first)
    assert batch.describe()["kernel_mode"] == "no_split"


def test_a_typical_order_costs_about_the_mean_of_shuffled_batches() -> None:
    cost = load_step_cost(RTX, "no_split", block_bandwidth=10e9)
    errors: dict[str, list[float]] = {"typical": [], "ascending": []}
    for seed, short in itertools.product(range(3), (0.95, 0.7)):
        draw = random.Random(seed)
        lengths = [draw.randint(*((32, 999) if draw.random() < short else (1000, 8000))) for _ in range(128)]
        assert sorted(typical_order(lengths)) == sorted(lengths)
        assert typical_order(lengths) == typical_order(sorted(lengths))
        mean_s = sum(cost.step_s((), draw.sample(lengths, 128)) for _ in range(20)) / 20
        for name, ordered in (("typical", typical_order(lengths)), ("ascending", sorted(lengths))):
            errors[name].append(cost.step_s((), ordered) / mean_s - 1)
    assert max(map(abs, errors["typical"])) < 0.04
    assert max(errors["ascending"]) > 0.08


def test_one_block_is_the_straggler_and_never_beats_the_memory() -> None:
    lengths = [500] * 15 + [8000]
    split, slow = load_step_cost(RTX), load_step_cost(RTX, "no_split_longest_first", block_bandwidth=5e9)
    quick = load_step_cost(RTX, "no_split", block_bandwidth=1e15)
    straggler = 32 * (8000 * 512 / 5e9)  # layers, one head's bytes of the longest
    without_attention = split.step_s((), [1] * 16)
    assert slow.step_s((), lengths) == pytest.approx(without_attention + straggler, rel=0.02)
    assert quick.step_s((), lengths) == split.balanced_step_s((), lengths)
    times = [load_step_cost(RTX, "no_split", block_bandwidth=x).step_s((), lengths) for x in (5e9, 25e9, 200e9)]
    assert times == sorted(times, reverse=True)
    equal = [700] * 40
    assert slow.step_s((), equal) == slow.balanced_step_s((), equal)
    assert slow.step_s([ChunkShape(256)], equal) == slow.balanced_step_s([ChunkShape(256)], equal)


def test_distserves_formula_is_met_in_both_regimes() -> None:
    cost = load_step_cost("a100-opt-13b")
    assert cost.step_s((), [1000] * 94) == pytest.approx(
        (19.9347026 + 0.00062693565 * 94_000 + 0.0385069774 * 94) / 1e3
    )
    assert cost.step_s((), [700] * 95) == pytest.approx((7.16618895 + 0.00057980004 * 66_500 + 0.158310962 * 95) / 1e3)
    prompts = [ChunkShape(1000), ChunkShape(500)]
    expected = 18.1025465 + 0.101912257 * 1500 + 7.12226431e-6 * (1000**2 + 500**2)
    assert cost.step_s(prompts, ()) == pytest.approx(expected / 1e3)


def test_past_the_grid_time_is_linear_in_bytes() -> None:
    cost = load_step_cost(RTX)
    a, b, c = (cost.step_s((), [length] * 4) for length in (20_000, 30_000, 40_000))
    assert c - b == pytest.approx(b - a)
    per_token = (c - b) / (4 * 10_000)
    bandwidth = 131072 / per_token
    assert 0.8e12 < bandwidth < 1.8e12, "bytes a second of the device's memory"


def test_unknown_names_modes_and_options_list_the_choices(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown cost model 'magic'; choose one of: a100-opt-13b, "):
        load_step_cost("magic")
    with pytest.raises(ConfigError, match=r"choose one of: split_kv, no_split"):
        load_step_cost(RTX, "other")
    with pytest.raises(ConfigError, match=r"no option 'speed'.*block_bandwidth, sm_count, heads"):
        load_step_cost(RTX, "no_split", speed=3)
    with pytest.raises(ConfigError, match=r"block_bandwidth.*above 0"):
        load_step_cost(RTX, "no_split", block_bandwidth=0)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda raw: raw.update(version=2), r"schema alignedserve-cost version 1"),
        (lambda raw: raw.pop("dense"), r"dense is missing"),
        (
            lambda raw: raw["dense"].update(tokens=[5, 1]),
            r"dense.tokens: a grid needs at least one point, and points must rise",
        ),
        (
            lambda raw: raw["attention"]["decode"].update(us=[[1.0]]),
            r"attention.decode.us must be numbers in the shape",
        ),
        (
            lambda raw: raw["skew"]["buckets"].append([0, 0, 0, 0, 7, 0.5]),
            r"has 7, which is not a bucket of cached_tokens",
        ),
        (lambda raw: raw["shape"].update(layers=0), r"shape.layers must be a number of at least 1"),
    ],
)
def test_a_broken_file_is_named_with_the_place(tmp_path: Path, change: Callable[[Any], Any], told: str) -> None:
    raw = json.loads((Path(load_parts.__code__.co_filename).parent / "data/a100-opt-13b.json").read_text())
    change(raw)
    (tmp_path / "mine.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"mine\.json.*" + told):
        load_step_cost(tmp_path / "mine.json")
    (tmp_path / "mine.json").write_text('{"schema": \n x}')
    with pytest.raises(ConfigError, match=r"mine\.json:2:2: broken JSON"):
        load_step_cost(tmp_path / "mine.json")


def test_interpolation_is_exact_at_the_points_and_linear_between() -> None:
    curve = Curve([1, 2, 4], [10.0, 30.0, 20.0])
    assert [curve.at(x) for x in (0, 1, 1.5, 2, 3, 4)] == [10.0, 10.0, 20.0, 30.0, 25.0, 20.0]
    assert curve.at(9) == 20.0, "past the last point it never falls"
    assert curve.at_each(np.array([0.0, 1.5, 3.3])).tolist() == [curve.at(x) for x in (0.0, 1.5, 3.3)]
    surface = Surface([1, 2], [1, 3], [[1.0, 3.0], [5.0, 9.0]])
    assert (surface.at(1, 3), surface.at(2, 1), surface.at(1.5, 2)) == (3.0, 5.0, 4.5)
    assert surface.at(3, 1) == 9.0, "past the last, along the secant"
    values = np.arange(16.0).reshape(2, 2, 2, 2)
    grid = Grid4([[0, 1]] * 4, values)
    assert grid.at(1, 0, 1, [0, 0.5, 1]) == [10.0, 10.5, 11.0]
    assert grid.at(0.5, 0.5, 0.5, [0.5]) == [7.5]


def test_a_bucket_that_was_not_measured_takes_the_nearest() -> None:
    bounds: dict[str, list[float]] = {axis: [] for axis in AXES} | {"requests": [2.0, 4.0], "longest": [100.0]}
    table = SkewTable(bounds, {(0, 0, 0, 0, 0): 0.2, (0, 2, 0, 1, 0): 0.6, (0, 1, 0, 1, 0): -0.3})
    assert table.at(2, 0.5, 100.0) == 0.2
    assert table.at(2, 0.5, 101.0) == 0.2
    assert table.at(3, 0.5, 50.0) == 0.0, "noise below 0 is 0"
    assert table.at(500, 0.5, 50.0) == 0.6


def test_a_fit_finds_what_made_the_measurements() -> None:
    rng = np.random.default_rng(5)
    points = rng.uniform((1, 0), (8, 100), (200, 2))
    values = fit_grid(([1, 8], [0, 100]), points, 3.0 + 2.0 * points[:, 0] * points[:, 1])
    assert values == pytest.approx(np.array([[3.0, 203.0], [3.0, 1603.0]]), rel=1e-5)


@needs_tables
def test_measured_points_are_met_exactly() -> None:
    parts = loaded(TABLES).parts
    assert parts.mixed is not None
    with (TABLES / "attention.csv").open() as file:
        for row in csv.DictReader(file):
            chunk, cached, requests, length = (
                int(row[name]) for name in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
            )
            if not chunk:
                found = parts.decode.at(requests, length)
            elif not requests:
                found = parts.chunk.at(chunk, cached)
            else:
                found = parts.mixed.at(chunk, cached, requests, [length])[0]
            assert found == float(row["time_us"])


def skew_errors(cost: MeasuredCost) -> dict[str, float]:
    """Mean relative error against skew.csv, which no grid was made from: equal and unequal lengths.

    Its times are sums of three iterations (attention.csv has their mean).
    """
    errors: dict[str, list[float]] = {"equal": [], "unequal": [], "as if equal": []}
    parts = cost.parts
    with (TABLES / "skew.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["t_skew_us"]]
    for row in rows:
        chunk, cached, requests = float(row["pc"]), float(row["kp"]), int(row["n"])
        mean, longest, shortest = float(row["kv_mean"]), float(row["kv_big"]), float(row["kvs"])
        if chunk:
            assert parts.mixed is not None
            at_mean, at_longest = parts.mixed.at(chunk, cached, requests, (mean, longest))
        else:
            at_mean, at_longest = parts.decode.at(requests, mean), parts.decode.at(requests, longest)
        share = (mean - shortest) / (longest - shortest)
        alpha = parts.skew.at(requests, share, longest, chunk, cached)
        skewed = at_mean + alpha * max(0.0, at_longest - at_mean)
        errors["equal"].append(abs(at_mean / (float(row["t_mean_us"]) / 3) - 1))
        errors["unequal"].append(abs(skewed / (float(row["t_skew_us"]) / 3) - 1))
        errors["as if equal"].append(abs(at_mean / (float(row["t_skew_us"]) / 3) - 1))
    return {name: float(np.mean(values)) for name, values in errors.items()}


@needs_tables
@pytest.mark.parametrize(("source", "equal", "unequal"), [(TABLES, 0.025, 0.04), (RTX, 0.05, 0.06)])
def test_unequal_lengths_are_predicted(source: str | Path, equal: float, unequal: float) -> None:
    errors = skew_errors(loaded(source))
    assert errors["equal"] < equal
    assert errors["unequal"] < unequal < errors["as if equal"]


@needs_tables
def test_tables_bring_the_hardware_of_the_model_fitted_to_them() -> None:
    collectives = {"collective_bandwidth": 0.8 * 64e9, "collective_latency_s": 20e-6}
    assert default_hardware(TABLES) == {**default_hardware(RTX), **collectives}
    assert load_parts(TABLES).sm_count == 188


def test_a_prior_predicts_at_once_and_is_corrected_by_what_is_measured() -> None:
    cost = loaded(RTX)
    model = cost_model_factory(from_tree({"scheduler": {"cost_model": RTX}, "prefill": {"token_budget": 512}}))()
    lengths = [300] * 15 + [5000]
    assert model.predict_iteration_s(lengths) == cost.step_s((), lengths)
    full, rest = cost.step_s([ChunkShape(512)], ()), cost.step_s([ChunkShape(76)], ())
    assert model.predict_prefill_s(1100) == pytest.approx(2 * full + rest)
    assert model.predict_prefill_s(0) == 0.0
    for _ in range(40):
        model.observe_iterations(Passes(10, 160, 160 * 500, 10 * 1.5 * cost.step_s((), [500] * 16)))
        model.observe_chunks(Passes(4, 2048, 0, 4 * 0.8 * full))
    assert model.predict_iteration_s(lengths) == pytest.approx(1.5 * cost.step_s((), lengths), rel=0.05)
    assert model.predict_prefill_s(512) == pytest.approx(0.8 * full, rel=0.05)
    model.observe_iterations(Passes(1, 16, 16 * 500, 1000.0))
    assert model.predict_iteration_s(lengths) < 2.5 * cost.step_s((), lengths), "a machine that stood still"


def test_without_one_the_scheduler_learns_as_it_goes() -> None:
    assert isinstance(cost_model_factory(Config())(), LinearCostModel)
    with pytest.raises(ConfigError, match="unknown cost model 'magic'"):
        SchedulerCore(from_tree({"scheduler": {"cost_model": "magic"}}), 16)


def test_the_configured_cost_has_the_configured_mode_and_bandwidth_of_a_block() -> None:
    lengths = [100] * 30 + [8000]
    settings = {"cost_model": RTX, "kernel_mode": "no_split"}
    slow, usual = (
        configured_cost(from_tree({"scheduler": {**settings, **more}}).scheduler)
        for more in ({"block_bandwidth_gb_s": 2.0}, {})
    )
    assert slow is not None
    assert usual is not None
    assert slow.step_s((), lengths) > 1.2 * usual.step_s((), lengths)
    split = configured_cost(from_tree({"scheduler": {"cost_model": RTX, "block_bandwidth_gb_s": 2.0}}).scheduler)
    assert split is not None
    assert split.step_s((), lengths) < usual.step_s((), lengths)


def test_a_batch_of_which_only_counts_are_known_has_no_length_below_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """`SharedPool` asks for four requests of 4 tokens on average, the longest of 16."""
    cost = load_step_cost("a100-opt-13b", "no_split")
    asked: list[list[int]] = []
    monkeypatch.setattr(cost, "step_s", lambda chunks, lengths: asked.append(list(lengths)))
    cost.counted_s(4, 16, 16, 2)
    assert asked == [[16, 2, 0, 0]]
