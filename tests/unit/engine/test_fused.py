"""Which parts of a model are compiled: only those that are faster, give the same values, and are not in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from alignedserve.engine.model import fused
from alignedserve.engine.model.fused import Function, compile_for_decode, fuse
from alignedserve.testing.models import make_model


class Fused:
    """A model, its parts compiled by `compiler`, and the inputs of the compiled functions."""

    def __init__(
        self, folder: Path, kind: str, compiler: Callable[[Function], Function], *, dtype: Any = torch.bfloat16
    ) -> None:
        make_model(kind, folder, seed=3)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.calls = 0
        self.kept: list[str] = []
        self._compiler = compiler

    def logits(self) -> torch.Tensor:
        with torch.inference_mode():
            ids = torch.arange(4).unsqueeze(0)
            found: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits
        return found

    def fuse(self, *seconds: float) -> list[str]:
        """`seconds`: the times of the eager and the compiled function in turn, repeated."""
        times = [*seconds] * 20
        with torch.inference_mode():
            return fuse(self.model, self.logits, lambda run: times.pop(0), self._compile)

    def _compile(self, function: Function) -> Function:
        compiled = self._compiler(function)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return compiled(*args, **kwargs)

        return counted


@pytest.fixture(autouse=True)
def whole_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the rotary functions that are replaced in transformers' modules."""
    from transformers.models.llama import modeling_llama
    from transformers.models.qwen3 import modeling_qwen3

    for module in (modeling_llama, modeling_qwen3):
        monkeypatch.setattr(module, "apply_rotary_pos_emb", module.apply_rotary_pos_emb)


def test_what_is_faster_is_replaced_everywhere_and_gives_the_same(tmp_path: Path) -> None:
    model = Fused(tmp_path, "qwen3", lambda function: function)
    expected = model.logits()
    kept = model.fuse(2.0, 1.0)
    assert set(kept) == {"Qwen3RMSNorm of 64", "Qwen3RMSNorm of 16", "apply_rotary_pos_emb", "the gate of Qwen3MLP"}
    model.calls = 0
    assert torch.equal(model.logits(), expected)
    layers = model.model.config.num_hidden_layers
    assert model.calls == layers * (2 + 2 + 1 + 1) + 1
    exact = Fused(tmp_path, "qwen3", lambda function: function, dtype=torch.float32)
    model.calls = 0
    exact.logits()
    assert model.calls == 0


def test_torch_compiles_them_for_any_number_of_rows(tmp_path: Path) -> None:
    model = Fused(tmp_path, "llama", lambda function: torch.compile(function, backend="aot_eager"))
    expected = model.logits()
    assert len(model.fuse(2.0, 1.0)) == 3
    torch.testing.assert_close(model.logits(), expected, rtol=0.02, atol=0.02)
    with torch.inference_mode():
        assert model.model(input_ids=torch.arange(9).unsqueeze(0)).logits.shape[1] == 9


def test_what_is_no_faster_stays(tmp_path: Path) -> None:
    model = Fused(tmp_path, "llama", lambda function: function)
    assert model.fuse(1.0, 0.97) == []
    model.calls = 0
    model.logits()
    assert model.calls == 0


def test_what_gives_other_values_or_does_not_compile_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def wrong(function: Function) -> Function:
        if function.__name__ == "forward":
            raise RuntimeError("no compiler here")
        return lambda *args, **kwargs: tuple(1.02 * value for value in function(*args, **kwargs))

    model = Fused(tmp_path, "llama", wrong)
    expected = model.logits()
    assert model.fuse(2.0, 1.0) == []
    assert torch.equal(model.logits(), expected)
    said = [record.getMessage() for record in caplog.records if record.name == fused.__name__]
    assert sum("no compiler here" in text for text in said) == 1
    assert any("gives different values" in text for text in said)


def test_a_model_in_fp32_is_left_alone(tmp_path: Path) -> None:
    assert Fused(tmp_path, "llama", lambda function: function, dtype=torch.float32).fuse(2.0, 1.0) == []


def test_models_without_such_parts_are_left_alone(tmp_path: Path) -> None:
    assert Fused(tmp_path, "opt", lambda function: function).fuse(2.0, 1.0) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_inductors_kernels_give_the_same_on_a_gpu(tmp_path: Path) -> None:
    model = Fused(tmp_path, "qwen3", compile_for_decode)
    model.model.cuda()
    ids = torch.arange(64, device="cuda").unsqueeze(0)
    with torch.inference_mode():
        expected = model.model(input_ids=ids).logits
        times = [2.0, 1.0] * 20
        kept = fuse(model.model, lambda: model.model(input_ids=ids), lambda run: times.pop(0))
        found = model.model(input_ids=ids).logits
    assert len(kept) == 4
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
