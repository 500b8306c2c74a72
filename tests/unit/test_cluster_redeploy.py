"""What a changed configuration asks of a cluster that runs."""

from __future__ import annotations

from typing import Any

import pytest

from alignedserve.cluster.plan import Shape
from alignedserve.cluster.redeploy import COUNTS, DIVIDES_MEMORY, ROLLED, SERVES, Change, compare, compare_all
from alignedserve.config import Config
from alignedserve.config_sources import from_arguments, known_keys


def change(**arguments: Any) -> Change:
    return compare(Config(), from_arguments(arguments))


def test_an_unchanged_configuration_asks_for_nothing() -> None:
    assert change().is_none
    assert str(change()) == "everything goes on"


@pytest.mark.parametrize(
    "arguments", [{"gateway": {"max_queue": 7, "drain_s": 3.0}}, {"model": {"chat_template": "own.jinja"}}]
)
def test_what_gateways_alone_read_leaves_everything_else_as_it_is(arguments: dict[str, Any]) -> None:
    assert change(**arguments).is_none


def test_other_numbers_of_instances_scale() -> None:
    assert change(cluster={"decode": 2}) == Change(shape=Shape(1, 2))


def test_keys_of_the_scheduler_are_read_by_instances_too() -> None:
    assert change(scheduler={"min_batch_requests": 9}).rolled == {"scheduler", "decode", "prefill"}


def test_both_at_once() -> None:
    found = change(cluster={"prefill": 3}, decode={"overlap": "off"})
    assert found == Change(shape=Shape(3, 1), rolled=frozenset({"decode"}))


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("model", "path", "other"),
        ("model", "served_name", "other"),
        ("kv_pool", "size_gib", 2.0),
        ("kv_pool", "block_size", 32),
        ("scheduler", "max_batch_share", 0.3),
        ("cluster", "prefetch", False),
        ("engine", "attention", "torch"),
    ],
)
def test_other_stores_or_another_model_replace_the_cluster(section: str, key: str, value: Any) -> None:
    found = change(**{"cluster": {"decode": 2}} | {section: {key: value}})
    assert found.replaced_for == (f"{section}.{key}",)
    assert not found.rolled
    assert found.shape is None


def test_processes_of_several_configurations_are_asked_for_all_of_it() -> None:
    first = from_arguments({"decode": {"overlap": "off"}})
    second = from_arguments({"kv_pool": {"growth_reserve": 0.2}, "cluster": {"decode": 5}})
    found = compare_all([("decode", first), ("kv_pool", second), ("prefill", first)], Config())
    assert found == Change(rolled=frozenset({"decode", "kv_pool"}))


def test_every_key_that_is_named_is_one() -> None:
    assert {*COUNTS, *SERVES, *ROLLED, *DIVIDES_MEMORY} <= set(known_keys())
