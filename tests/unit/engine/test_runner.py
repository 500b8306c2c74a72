"""The runner and the packed linear layers. test_exact checks the numbers."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from alignedserve.engine.model import cpu_linear
from alignedserve.engine.model.cpu_linear import PackedLinear, pack_linears
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.model.loader import LoadedModel, load_model
from alignedserve.engine.runner import ForwardItem, ModelRunner, allocate_cache
from alignedserve.errors import AccountingError, ConfigError, GeometryMismatchError, ResourceError
from alignedserve.geometry import KvGeometry
from alignedserve.testing.models import VOCAB_SIZE, make_model

GEOMETRY = KvGeometry("m", "bfloat16", layers=3, kv_heads=2, head_dim=16, block_size=8)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = make_model("qwen3", tmp_path_factory.mktemp("model"), seed=1)
    return load_model(inspect_model("test", folder, "float32", "cpu"), "cpu")


@pytest.fixture
def runner(loaded: LoadedModel) -> ModelRunner:
    return ModelRunner(loaded, allocate_cache(loaded.info.geometry(8), 12, "cpu"))


def test_loading_tells_how_many_tensors_are_there(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    folder = make_model("llama", tmp_path / "model", seed=1)
    load_model(inspect_model("test", folder, "float32", "cpu"), "cpu", progress=lambda *both: told.append(both))
    assert len(told) > 10
    assert told == [(number, len(told)) for number in range(1, len(told) + 1)]


def test_store_has_the_designs_layout() -> None:
    cache = allocate_cache(GEOMETRY, 5, "cpu")
    assert cache.shape == (5, 3, 2, 2, 8, 16)
    assert cache.is_contiguous()
    assert cache.dtype == torch.bfloat16
    assert cache[0].nbytes == GEOMETRY.block_bytes


def test_store_lies_in_the_shared_memory_that_it_is_given() -> None:
    memory = mmap.mmap(-1, 5 * GEOMETRY.block_bytes + 100)
    cache = allocate_cache(GEOMETRY, 5, "cpu", memoryview(memory))
    cache[1, 0, 0, 0, 0, 0] = 1.0
    assert memory[GEOMETRY.block_bytes : GEOMETRY.block_bytes + 2] == b"\x80\x3f"


def test_store_that_does_not_fit_is_a_resource_error() -> None:
    with pytest.raises(ResourceError, match="need"):
        allocate_cache(GEOMETRY, 5, "cpu", memoryview(bytearray(5 * GEOMETRY.block_bytes - 1)))
    with pytest.raises(ResourceError, match="no room"):
        allocate_cache(GEOMETRY, 1 << 45, "cpu")


def test_store_of_another_model_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(GeometryMismatchError, match="does not fit"):
        ModelRunner(loaded, torch.zeros(4, 3, 2, 2, 8, 32))
    with pytest.raises(GeometryMismatchError, match="float16"):
        ModelRunner(loaded, torch.zeros(4, 3, 2, 2, 8, 16, dtype=torch.float16))
    with pytest.raises(GeometryMismatchError, match="contiguous"):
        ModelRunner(loaded, torch.zeros(3, 4, 2, 2, 8, 16).transpose(0, 1))


def test_unknown_backend_is_refused_by_name(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="torch"):
        ModelRunner(loaded, allocate_cache(loaded.info.geometry(8), 2, "cpu"), backend="magic")


def test_rows_of_logits_come_in_item_order(runner: ModelRunner) -> None:
    items = [
        ForwardItem([1, 2, 3], 0, [0], "all"),
        ForwardItem([4, 5], 0, [1], "none"),
        ForwardItem([6], 0, [2]),
        ForwardItem([7, 8, 9, 10], 0, [3]),
    ]
    together = runner.forward(items)
    alone = torch.cat([runner.forward([item]) for item in items])
    assert together.shape == (5, VOCAB_SIZE)
    assert together.dtype == torch.float32
    torch.testing.assert_close(together, alone, rtol=0.0, atol=1e-4)


def test_pass_without_logits_or_items_has_no_rows(runner: ModelRunner) -> None:
    assert runner.forward([ForwardItem([1, 2], 0, [0], "none")]).shape == (0, VOCAB_SIZE)
    assert runner.forward([]).shape == (0, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (ForwardItem([], 0, [0]), "no tokens"),
        (ForwardItem([1], 8, [0]), "do not cover"),
        (ForwardItem([1] * 9, 0, [0]), "do not cover"),
        (ForwardItem([1], 0, [12]), "outside"),
        (ForwardItem([1, 2], 0, [-1]), "outside"),
    ],
)
def test_blocks_that_do_not_add_up_are_an_error(item: ForwardItem, message: str, runner: ModelRunner) -> None:
    with pytest.raises(AccountingError, match=message):
        runner.forward([ForwardItem([1], 0, [0]), item])


def test_only_the_blocks_of_new_tokens_are_written(runner: ModelRunner) -> None:
    runner.forward([ForwardItem(list(range(10)), 0, [4, 9], "none")])
    before = runner.cache.clone()
    runner.forward([ForwardItem([3], 10, [4, 9])])
    changed = (runner.cache != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [9]
    assert torch.equal(runner.cache[9, :, :, :, [0, 1, 3, 4]], before[9, :, :, :, [0, 1, 3, 4]])


def test_requests_may_read_the_same_blocks(runner: ModelRunner) -> None:
    prompt = list(range(16))
    runner.forward([ForwardItem(prompt, 0, [5, 6], "none")])
    shared = runner.forward([ForwardItem([1], 16, [5, 6, 7]), ForwardItem([2], 16, [5, 6, 8])])
    alone = [runner.forward([ForwardItem([*prompt, token], 0, [0, 1, 2])]) for token in (1, 2)]
    torch.testing.assert_close(shared, torch.cat(alone), rtol=0.0, atol=1e-4)


def test_a_cached_beginning_gives_the_same_bits_where_chunks_are_cut_alike(loaded: LoadedModel) -> None:
    tokens, kept, copied = list(range(1, 41)), [0, 1, 2], [7, 3, 9]
    first, second = (allocate_cache(loaded.info.geometry(8), 12, "cpu") for _ in range(2))
    computing, reusing = ModelRunner(loaded, first), ModelRunner(loaded, second)
    computing.forward([ForwardItem(tokens[:24], 0, kept, "none")])
    computed = computing.forward([ForwardItem(tokens[24:], 24, [*kept, 3, 4], "all")])
    second[copied] = first[kept]
    reused = reusing.forward([ForwardItem(tokens[24:], 24, [*copied, 1, 2], "all")])
    assert torch.equal(computed, reused)
    assert torch.equal(first[[3, 4]], second[[1, 2]])


def test_warm_up_touches_block_zero_only(runner: ModelRunner) -> None:
    runner.warm_up()
    assert runner.cache[0].abs().sum() > 0
    assert runner.cache[1:].abs().sum() == 0


class TwoLayers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(96, 160)
        self.second = Conv1D(96, 160)
        self.bilinear = torch.nn.Bilinear(4, 4, 4)


@pytest.fixture
def always_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "_is_faster", lambda weight: True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("always_pack")
def test_packed_layers_give_the_same_products(dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN packs no bf16 on this processor: it has neither AVX-512 (BW, VL and DQ) nor AVX-NE-CONVERT")
    torch.manual_seed(0)
    model = TwoLayers().to(dtype).requires_grad_(False)
    torch.nn.init.normal_(model.second.bias)
    inputs = [torch.randn(1, rows, 96, dtype=dtype) for rows in (1, 3, 32, 70)]
    inputs.append(torch.randn(96, 40, dtype=dtype).t().unsqueeze(0))  # not contiguous
    expected = [model.second(model.first(x)) for x in inputs]
    assert pack_linears(model) == 2
    assert isinstance(model.first, PackedLinear)
    with torch.inference_mode():
        found = [model.second(model.first(x)) for x in inputs]
    tolerance = 1e-4 if dtype == torch.float32 else 0.06
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=tolerance)
    assert model.first(torch.empty(1, 0, 96, dtype=dtype)).shape == (1, 0, 160)


@pytest.mark.usefixtures("always_pack")
def test_packed_layer_has_no_values_to_read() -> None:
    model = TwoLayers().requires_grad_(False)
    pack_linears(model)
    assert model.first.weight.shape == (160, 96)
    assert model.first.weight.dtype == torch.float32
    assert model.first.weight.is_meta


def test_layer_that_onednn_cannot_pack_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(cpu_linear, "pack", refuse)
    model = TwoLayers()
    assert pack_linears(model) == 0
    assert type(model.first) is torch.nn.Linear
