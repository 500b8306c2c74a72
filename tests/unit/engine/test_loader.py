"""Weights are loaded strictly. A model whose attention differs from its description is refused before it serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.llama import modeling_llama

from alignedserve.engine.attention import SERVING, ActiveForward, active, paged_attention
from alignedserve.engine.backends.torch_backend import TorchBackend
from alignedserve.engine.model import loader
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.model.loader import LoadedModel, load_model
from alignedserve.errors import AlignedServeError, ModelError, UnsupportedModelError
from alignedserve.model import ModelInfo
from alignedserve.testing.models import make_model


def info_of(folder: Path, dtype: str = "float32") -> ModelInfo:
    return inspect_model("test", folder, dtype, "cpu")


def change_weights(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_model_is_frozen_in_evaluation_mode_with_paged_attention(tmp_path: Path) -> None:
    loaded = load_model(info_of(make_model("gpt2", tmp_path, seed=1)), "cpu")
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.model.config._attn_implementation == SERVING
    assert loaded.keeps_logits


def test_missing_tensor_is_an_error_that_names_it(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path, seed=1)
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=name):
        load_model(info_of(folder), "cpu")


def test_tied_embeddings_are_not_missing(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path, seed=1, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    load_model(info_of(folder), "cpu")


def test_tensor_of_another_shape_is_an_error(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path, seed=1)
    change_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(5)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight|size"):
        load_model(info_of(folder), "cpu")


def test_truncated_weights_are_an_error(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path, seed=1)
    info = info_of(folder)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1000])
    with pytest.raises(ModelError, match="is truncated"):
        load_model(info, "cpu")


def test_nan_weights_are_an_error(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path, seed=1)
    change_weights(folder, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))
    with pytest.raises(ModelError, match="NaN"):
        load_model(info_of(folder), "cpu")


def test_pickled_weights_are_never_loaded(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path, seed=1)
    info = info_of(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="pickled"):
        load_model(info, "cpu")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["llama", "mixtral", "gemma2"])
def test_probe_allows_for_rounding(kind: str, dtype: str, tmp_path: Path) -> None:
    load_model(info_of(make_model(kind, tmp_path, seed=2), dtype), "cpu")


@pytest.fixture
def llama_attention(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """For tests that give Llama an attention that violates transformers' interface."""
    return monkeypatch


def load_llama(tmp_path: Path) -> LoadedModel:
    return load_model(info_of(make_model("llama", tmp_path, seed=1)), "cpu")


def patch_interface(monkeypatch: pytest.MonkeyPatch, wrap: Any) -> None:
    """Make Llama's attention call `wrap(interface)` instead of the interface."""
    original = modeling_llama.ALL_ATTENTION_FUNCTIONS.get_interface

    class Interface:
        def get_interface(self, name: str, default: Any) -> Any:
            return wrap(original(name, default))

    monkeypatch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", Interface())


def test_attention_that_bypasses_the_interface_is_refused(llama_attention: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Bypass:
        def get_interface(self, name: str, default: Any) -> Any:
            return default

    llama_attention.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", Bypass())
    with pytest.raises(UnsupportedModelError, match=r"went through|fails on a packed batch"):
        load_llama(tmp_path)


def test_unknown_attention_feature_is_refused(llama_attention: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def wrap(interface: Any) -> Any:
        return lambda *args, **kwargs: interface(*args, position_bias=torch.ones(4), **kwargs)

    patch_interface(llama_attention, wrap)
    with pytest.raises(UnsupportedModelError, match="position_bias"):
        load_llama(tmp_path)


def test_sinks_that_the_models_own_attention_does_not_have_are_refused(
    llama_attention: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def wrap(interface: Any) -> Any:
        return lambda *args, **kwargs: interface(*args, s_aux=torch.ones(4), **kwargs)

    patch_interface(llama_attention, wrap)  # its eager attention accepts any keyword, and ignores this one
    with pytest.raises(UnsupportedModelError, match="logits are off by"):
        load_llama(tmp_path)


def test_bias_added_outside_the_interface_is_refused(llama_attention: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def wrap(interface: Any) -> Any:
        def attend(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
            length = query.shape[2]  # depends on what else is in the batch
            return interface(module, query * (1 + 0.05 * length), *args, **kwargs)

        return attend

    patch_interface(llama_attention, wrap)
    with pytest.raises(UnsupportedModelError, match="logits are off by"):
        load_llama(tmp_path)


def test_window_that_only_the_mask_knows_is_refused(llama_attention: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from transformers.masking_utils import create_sliding_window_causal_mask

    def windowed(config: Any, **kwargs: Any) -> Any:
        config.sliding_window = 64
        return create_sliding_window_causal_mask(config=config, **kwargs)

    llama_attention.setattr(modeling_llama, "create_causal_mask", windowed)
    with pytest.raises(UnsupportedModelError, match="hides all but 64 tokens"):
        load_llama(tmp_path)


def test_mask_of_its_own_is_refused(llama_attention: pytest.MonkeyPatch, tmp_path: Path) -> None:
    llama_attention.setattr(modeling_llama, "create_causal_mask", lambda **kwargs: torch.zeros(1, 1, 1, 1))
    with pytest.raises(UnsupportedModelError, match="does not take its mask"):
        load_llama(tmp_path)


def test_attention_that_is_not_causal_is_refused(llama_attention: pytest.MonkeyPatch, tmp_path: Path) -> None:
    original = modeling_llama.LlamaAttention.__init__

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.is_causal = False

    llama_attention.setattr(modeling_llama.LlamaAttention, "__init__", build)
    with pytest.raises(UnsupportedModelError, match="not causal"):
        load_llama(tmp_path)


def test_layer_that_selects_keys_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class LightningIndexer(torch.nn.Module):
        pass

    original = loader._from_pretrained

    def with_indexer(*args: Any) -> Any:
        model = original(*args)
        model.model.layers[1].self_attn.indexer = LightningIndexer()
        return model

    monkeypatch.setattr(loader, "_from_pretrained", with_indexer)
    with pytest.raises(UnsupportedModelError, match="selects keys"):
        load_llama(tmp_path)


class Layer(torch.nn.Module):
    layer_idx = 0


def call(**kwargs: Any) -> None:
    backend = TorchBackend(torch.zeros(1, 1, 1, 2, 4, 8))
    with active(ActiveForward(backend)):
        paged_attention(Layer(), *[torch.zeros(1, 1, 1, 8)] * 3, kwargs.pop("attention_mask", None), **kwargs)


@pytest.mark.parametrize(
    "argument",
    [
        {"attention_mask": torch.zeros(1)},
        {"s_aux": torch.zeros(2)},
        {"position_bias": torch.zeros(1)},
        {"output_attentions": True},
        {"is_causal": False},
        {"dropout": 0.1},
        {"something_new": 1},
    ],
    ids=lambda argument: next(iter(argument)),
)
def test_argument_that_is_not_known_is_refused(argument: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError):
        call(**argument)


@pytest.mark.parametrize(
    "argument",
    [{"something_new": None}, {"is_causal": True}, {"position_ids": torch.zeros(1)}, {"output_attentions": False}],
    ids=lambda argument: next(iter(argument)),
)
def test_harmless_argument_goes_through_to_the_backend(argument: dict[str, Any]) -> None:
    with pytest.raises(AlignedServeError, match=r"begin\(\)"):
        call(**argument)


def test_attention_outside_a_forward_pass_is_an_error() -> None:
    with pytest.raises(AlignedServeError, match="outside"):
        paged_attention(Layer(), *[torch.zeros(1, 1, 1, 8)] * 3, None)
