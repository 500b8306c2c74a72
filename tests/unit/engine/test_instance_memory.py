"""An instance's actual memory is compared with the plan. An out-of-memory error lists every part."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from alignedserve.config import Config
from alignedserve.config_sources import from_tree
from alignedserve.device_memory import DeviceMemory
from alignedserve.engine.model import instance_memory
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.model.instance_memory import InstanceMemory, largest_passes
from alignedserve.engine.model.loader import LoadedModel, load_model
from alignedserve.engine.runner import ModelRunner, allocate_cache
from alignedserve.errors import ResourceError
from alignedserve.memory import GIB
from alignedserve.model import resolve_model
from alignedserve.sizing import StorePlan, plan_stores

MIB = 1 << 20


@dataclass
class PretendedMeter:
    """A device of 8 GiB on which the weights take `weights` bytes and a pass takes `activations` bytes."""

    weights: int
    activations: int
    trimmed: int = 0
    asked: list[int] = field(default_factory=list)

    def look(self) -> tuple[int, int]:
        return 7 * GIB, 8 * GIB

    def allocated(self) -> int:
        self.asked.append(self.weights)
        return self.weights

    def peak(self) -> int:
        return self.weights + self.activations

    def trim(self) -> None:
        self.trimmed += 1


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(inspect_model("tiny", resolve_model("tiny"), "auto", "cpu"), "cpu")


@pytest.fixture(autouse=True)
def small_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_memory, "TRIAL_BYTES", 4 * MIB)


def config(**sections: dict[str, Any]) -> Config:
    return from_tree({"kv_pool": {"size_gib": 0.1}, **sections})


def planned(loaded: LoadedModel, settings: Config, total: int = 8 * GIB) -> StorePlan:
    roles = ("prefill", "decode")
    devices = [(role, DeviceMemory(f"{role}-0", f"cuda:{role}", total, total)) for role in roles]
    return plan_stores(settings, loaded.info, 4 * GIB, devices)


def instance(role: str, settings: Config, meter: PretendedMeter | None) -> InstanceMemory:
    memory = InstanceMemory(role, f"{role}-0", "cuda:0", settings, meter)
    memory.look()
    return memory


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_pass_of_the_largest_size_runs_before_the_stores_are_made(loaded: LoadedModel, role: str) -> None:
    settings = config(prefill={"token_budget": 96, "max_requests": 8}, decode={"max_running": 12})
    runners: list[ModelRunner] = []

    def make_runner(store: torch.Tensor) -> ModelRunner:
        runners.append(ModelRunner(loaded, store))
        return runners[0]

    meter = PretendedMeter(weights=20 * MIB, activations=MIB)
    memory = instance(role, settings, meter)
    assert memory.gauges == {"device_total_bytes": 8.0 * GIB, "device_free_bytes": 7.0 * GIB}
    memory.check(loaded, planned(loaded, settings), make_runner)
    assert len(runners) == 1
    assert runners[0].cache.shape[0] == 4 * MIB // loaded.info.geometry(16).block_bytes  # backends are tried in it
    assert meter.trimmed == 1


def test_the_largest_passes_are_as_large_as_the_configuration_allows() -> None:
    settings = config(prefill={"token_budget": 1000, "max_requests": 16}, decode={"max_running": 12})
    (rows,) = largest_passes(settings, "decode", 4096, 16)
    assert [len(item.token_ids) for item in rows] == [1] * 12
    one, several = largest_passes(settings, "prefill", 4096, 16)
    assert [len(item.token_ids) for item in one] == [1000]
    assert len(several) == 16
    assert sum(len(item.token_ids) for item in several) == 1000
    blocks = [block for item in several for block in item.block_ids]
    assert len(set(blocks)) == len(blocks)
    few, _ = largest_passes(settings, "prefill", 300, 16)
    assert max(len(item.token_ids) for item in few) <= 300
    (least,) = largest_passes(config(prefill={"token_budget": 1}), "prefill", 4096, 16)
    assert [len(item.token_ids) for item in least] == [1]


def test_what_takes_more_than_planned_is_refused_where_the_blocks_do_not_fit(loaded: LoadedModel) -> None:
    settings = config(decode={"max_running": 4, "cache_blocks": 4 * GIB // loaded.info.geometry(16).block_bytes})
    plan = planned(loaded, settings)
    spare = plan.devices["decode"].budget - plan.devices["decode"].used
    estimate = plan.devices["decode"].parts["activations"]
    fits = PretendedMeter(weights=loaded.info.weight_bytes, activations=estimate + spare)
    instance("decode", settings, fits).check(loaded, plan, lambda store: ModelRunner(loaded, store))
    over = PretendedMeter(weights=loaded.info.weight_bytes, activations=estimate + spare + 300 * MIB)
    with pytest.raises(ResourceError) as refused:
        instance("decode", settings, over).check(loaded, plan, lambda store: ModelRunner(loaded, store))
    assert "decode-0 on cuda:0 (8.00 GiB) lacks 300.0 MiB: it needs weights" in refused.value.message
    assert "cache 4.00" in refused.value.message
    assert "decode.cache_blocks" in refused.value.message


def test_weights_that_are_larger_on_the_device_count_as_they_lie_there(loaded: LoadedModel) -> None:
    settings = config(decode={"max_running": 4, "cache_blocks": 4 * GIB // loaded.info.geometry(16).block_bytes})
    plan = planned(loaded, settings)
    meter = PretendedMeter(weights=5 * GIB, activations=MIB)
    with pytest.raises(ResourceError, match=r"lacks [\d.]+ GiB: it needs weights 5\.00"):
        instance("decode", settings, meter).check(loaded, plan, lambda store: ModelRunner(loaded, store))


def test_running_out_of_memory_at_any_step_is_told_with_every_part(loaded: LoadedModel) -> None:
    memory = instance("prefill", config(), PretendedMeter(weights=0, activations=0))
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 8 GiB")
    with pytest.raises(ResourceError, match=r"prefill-0 on cuda:0 ran out of memory during"), memory.explained():
        raise full
    memory.expect(loaded.info)
    parts = r"the plan was .*weights 0\.0.*7\.00 GiB of 8\.00 GiB were free before"
    with pytest.raises(ResourceError, match=parts), memory.explained():
        raise full


def test_a_store_without_room_is_told_so_too(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*shape: Any, **options: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    memory = instance("decode", config(), PretendedMeter(weights=0, activations=0))
    memory.expect(loaded.info)
    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(ResourceError, match=r"decode\.max_running or decode\.cache_blocks"), memory.explained():
        allocate_cache(loaded.info.geometry(16), 4, "cpu")


def test_graphs_that_take_more_than_planned_are_a_warning(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    memory = instance("decode", config(), PretendedMeter(weights=0, activations=0))
    memory.note_graphs(5.0 * GIB)  # nothing is known of the model yet
    memory.expect(loaded.info)
    memory.note_graphs(0.0)  # none were captured
    assert not caplog.records
    memory.note_graphs(5.0 * GIB)
    assert caplog.records[0].levelname == "WARNING"
    assert "CUDA graphs take 5.00 GiB, " in caplog.text


def test_other_errors_stay_what_they_are() -> None:
    memory = instance("decode", config(), PretendedMeter(weights=0, activations=0))
    with pytest.raises(ResourceError, match="no port"), memory.explained():
        raise ResourceError("no port")


def test_nothing_of_this_happens_on_a_cpu(loaded: LoadedModel) -> None:
    memory = InstanceMemory("decode", "decode-0", "cpu", config())
    memory.look()
    memory.expect(loaded.info)
    memory.check(loaded, planned(loaded, config()), lambda store: pytest.fail("a pass was run"))
    assert memory.gauges == {}


def test_a_plan_for_another_role_says_nothing(loaded: LoadedModel) -> None:
    settings = config()
    plan = replace(planned(loaded, settings), devices={})
    memory = instance("decode", settings, PretendedMeter(weights=100 * GIB, activations=0))
    memory.check(loaded, plan, lambda store: pytest.fail("a pass was run"))
    assert memory.gauges


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_estimate_is_above_what_a_gpu_takes(role: str) -> None:
    info = inspect_model("tiny", resolve_model("tiny"), "bfloat16", "cuda:0")
    model = load_model(info, "cuda:0")
    settings = config()
    memory = InstanceMemory(role, f"{role}-0", "cuda:0", settings)
    memory.look()
    plan = planned(model, settings)
    memory.check(model, plan, lambda store: ModelRunner(model, store))
    assert memory._planned is not None
    assert memory._planned.parts["activations"] == plan.devices[role].parts["activations"]
