"""How layers are divided into stages: by the times of layers, embedding and head, within what memory is planned for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from alignedserve.engine import attention
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.parallel import layer_times, load
from alignedserve.engine.parallel.division import Costs, Division, shares
from alignedserve.engine.parallel.layer_times import DECODE, PREFILL, TimedPass, _Bench, measured_costs
from alignedserve.engine.parallel.sharded import ShardedModel, by_weights
from alignedserve.errors import UnsupportedModelError
from alignedserve.model import ModelInfo
from alignedserve.ranks.degrees import Degrees, RankPlace
from alignedserve.testing.models import make_model

CPU = torch.device("cpu")
TWO_STAGES = Degrees(1, 2)


def test_stages_are_as_balanced_as_can_be() -> None:
    assert shares([1.0] * 6, 2, 0.0) == [range(3), range(3, 6)]
    assert shares([1.0] * 6, 2, 2.0) == [range(4), range(4, 6)]
    assert shares([1.0] * 5, 2, 0.0) == [range(2), range(2, 5)]  # the first also does the driver's work
    assert shares([1.0] * 3, 3, 50.0) == [range(1), range(1, 2), range(2, 3)]
    assert shares([3.0, 1.0, 1.0, 1.0], 2, 0.0) == [range(1), range(1, 4)]


def test_the_embedding_counts_in_the_first_stage() -> None:
    assert shares([1.0] * 6, 2, 0.0, begin=2.0) == [range(2), range(2, 6)]
    assert shares([1.0] * 6, 2, 2.0, begin=2.0) == [range(3), range(3, 6)]
    assert shares([1.0] * 2, 2, 0.0, begin=9.0) == [range(1), range(1, 2)]


def test_no_stage_has_more_layers_than_memory_is_planned_for() -> None:
    assert shares([1.0] * 8, 2, 6.0) == [range(7), range(7, 8)]
    assert shares([1.0] * 8, 2, 6.0, most=5) == [range(5), range(5, 8)]
    assert shares([1.0] * 8, 2, 0.0, begin=6.0, most=6) == [range(2), range(2, 8)]
    assert shares([1.0] * 9, 3, 0.0, most=3) == [range(3), range(3, 6), range(6, 9)]


def test_the_description_has_the_layers_and_the_time_of_each_stage() -> None:
    costs = Costs([0.001] * 3, begin=0.0002, end=0.002, each=0.0001, measured=True)
    assert Division.by(costs, 2, 3).description == "layers 0-1, 2 (measured: 2.3 ms, 3.1 ms)"
    assert Division.by(Costs([0.2] * 2, measured=True), 2, 1).description == "layers 0, 1 (measured: 200 ms, 200 ms)"
    assert Division.by(Costs([1.0] * 4), 2, 3).description == "layers 0-1, 2-3 (by weights)"
    said = Division.by(Costs([1.0] * 4, why="layers cannot be timed"), 2, 3).description
    assert said == "layers 0-1, 2-3 (by weights: layers cannot be timed)"


def part_of(info: ModelInfo, divide: Any, degrees: Degrees = TWO_STAGES) -> ShardedModel:
    return ShardedModel(info, RankPlace(0, degrees), CPU, divide=divide)


def costs_of(folder: Path, degrees: Degrees = TWO_STAGES, timed: TimedPass = DECODE) -> Costs:
    """As they are measured at the load of a part, which must not change by that."""
    info, found = inspect_model("m", folder, "float32", "cpu"), []

    def divide(part: ShardedModel) -> Division:
        layers = list(part.model.get_submodule(part.stage.path))
        costs = measured_costs(part.model, part.stage.path, info, part.ranks.kv_range, CPU, timed, part.faster)
        assert list(part.model.get_submodule(part.stage.path)) == layers
        assert all(parameter.is_meta for parameter in part.model.parameters())
        assert not any(module._forward_hooks for module in part.model.modules())
        found.append(costs)
        return by_weights(part)

    part_of(info, divide, degrees)
    return found[0]


@pytest.mark.parametrize("timed", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("degrees", [TWO_STAGES, Degrees(2, 2)], ids=str)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "gpt_oss"])
def test_layers_of_every_form_are_timed(kind: str, degrees: Degrees, timed: TimedPass, tmp_path: Path) -> None:
    folder = make_model(kind, tmp_path / "m", seed=1, vocab_size=203, max_position_embeddings=64)
    costs = costs_of(folder, degrees, timed)
    assert costs.measured
    assert min(*costs.layers, costs.begin, costs.end, costs.each) > 0.0


def test_a_large_head_and_a_wide_layer_are_seen(tmp_path: Path) -> None:
    """One of the layers is dense, and has far more weights than a token needs of the others."""
    folder = make_model(
        "qwen3_moe", tmp_path / "m", seed=1, num_hidden_layers=4, mlp_only_layers=[1], intermediate_size=16384,
        moe_intermediate_size=32, num_experts=4, num_experts_per_tok=1, vocab_size=131072, max_position_embeddings=64,
    )  # fmt: skip
    costs = costs_of(folder)
    first, wide, *others = costs.layers
    assert others == [first, first]  # layers of a kind are measured once
    assert wide > first
    assert costs.end > first
    assert costs.begin < costs.end


def test_layers_that_attend_to_a_window_are_a_kind_of_their_own(tmp_path: Path) -> None:
    folder = make_model(
        "gemma3", tmp_path / "m", seed=1, num_hidden_layers=4, sliding_window=16, max_position_embeddings=2048,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    local, whole, *others = costs_of(folder).layers
    assert others == [local, whole]
    assert local < whole


def test_a_model_of_too_many_kinds_of_layers_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_times, "MOST_KINDS", 1)
    folder = make_model("gemma3", tmp_path / "m", seed=1, layer_types=["sliding_attention", "full_attention"] * 2,
                        num_hidden_layers=4)  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="it has 2 kinds of layers"):
        costs_of(folder)


def test_a_layer_that_cannot_be_timed_leaves_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_args: Any, **_kwargs: Any) -> Costs:
        raise UnsupportedModelError("no such layer")

    monkeypatch.setattr(load, "measured_costs", refuse)
    info = inspect_model("m", make_model("llama", tmp_path / "m", seed=1), "float32", "cpu")
    part = part_of(info, lambda part: load._by_times(part, DECODE))
    assert part.layers == part_of(info, None).layers
    assert part.stages.endswith("(by weights: layers cannot be timed)")
    assert "cannot be timed: no such layer" in caplog.text


def test_on_a_gpu_reading_the_kv_is_added(tmp_path: Path) -> None:
    """As many bytes as the requests have in the layer, or in its window."""
    info = inspect_model("m", make_model("llama", tmp_path / "m", seed=1), "float32", "cpu")
    attention.register()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "m"))
    bench = _Bench(model, info, 0, (0, 2), CPU, TimedPass(rows=3, new=1, cached=100))
    each = 2 * 2 * info.head_dim * 4
    assert bench.unread_s(1e9) == pytest.approx(3 * 100 * each / 1e9)
    bench.windows.append(10)
    assert bench.unread_s(1e9) == pytest.approx(3 * 10 * each / 1e9)
