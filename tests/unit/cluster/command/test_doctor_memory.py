"""The stores that `alignedserve doctor` says a cluster would have."""

from __future__ import annotations

from pathlib import Path

import pytest

from alignedserve.cluster.cli import doctor_memory
from alignedserve.cluster.cli.doctor_memory import examine_memory
from alignedserve.config_sources import from_tree
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.model.instance_memory import CudaMeter
from alignedserve.errors import ResourceError
from alignedserve.memory import GIB
from alignedserve.model import resolve_model
from alignedserve.sizing import plan_stores


def test_the_plan_is_the_one_that_a_start_would_make(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_memory, "available_memory_bytes", lambda: 8 * GIB)
    config = from_tree({"cluster": {"device": "cpu", "decode": 2}, "kv_pool": {"size_gib": 0.5}})
    rows, on_gpus = examine_memory(config)
    plan = plan_stores(config, inspect_model("tiny", resolve_model("tiny"), "float32", "cpu"), 8 * GIB)
    assert [int(row["blocks"]) for row in rows] == [
        plan.pool,
        plan.decode_cache,
        plan.prefill_cache,
        plan.batch_buffer,
        plan.requests_buffer,
    ]
    assert rows[0]["size"] == "512.0 MiB"
    assert not on_gpus


def test_what_does_not_fit_is_an_error_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_memory, "available_memory_bytes", lambda: GIB // 4)
    with pytest.raises(ResourceError, match=r"needs .* of host memory, but only .*the pool's shard"):
        examine_memory(from_tree({"cluster": {"device": "cpu"}, "kv_pool": {"size_gib": 0.5}}))


def test_ranks_on_gpus_are_planned_by_the_one_with_the_least_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_memory, "count_gpus", lambda: 4)
    looked: list[list[str]] = []

    def look(self: CudaMeter) -> tuple[int, int]:
        looked.append([str(device) for device in self._devices])
        return 20 * GIB, 24 * GIB

    monkeypatch.setattr(CudaMeter, "look", look)
    tree = {"cluster": {"device": "cuda", "tensor_parallel": 2}, "kv_pool": {"size_gib": 0.5}}
    rows, on_gpus = examine_memory(from_tree(tree))
    assert looked == [["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"]]
    assert all(int(row["tokens"]) > 0 for row in rows)
    assert [line.partition(":")[0] for line in on_gpus] == [
        "memory of each decode instance",
        "memory of each prefill instance",
    ]
    assert "of 20.00" in on_gpus[0]


def test_instances_on_several_nodes_are_not_planned_here(tmp_path: Path) -> None:
    tree = {
        "cluster": {"device": "cpu"},
        "decode": {"pipeline_parallel": 2, "nodes": 2},
        "model": {"path": str(tmp_path)},
    }
    assert examine_memory(from_tree(tree)) == ([], [])
