"""Models with random weights, created on the device without a download."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from alignedserve.engine import attention
from alignedserve.engine.backends.base import AttentionNeeds
from alignedserve.engine.model.loader import LoadedModel
from alignedserve.engine.model.probe import probe
from alignedserve.model import ModelInfo

GAIN = 1.2
"""Gain of each matrix product on random inputs: large enough that tokens vary, too small to overflow."""

PROBED_LAYERS = 2
"""Layers of a deep model on which its attention is probed: over more layers rounding errors look like faults."""

_LLAMA_7B = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_OPT_7B = {
    "vocab_size": 50272,
    "hidden_size": 4096,
    "word_embed_proj_dim": 4096,
    "ffn_dim": 16384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
_MEDIUM = {  # 192 KiB of KV a token: a moderate batch reads more KV than weights
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2-7b": ("llama", _LLAMA_7B),
    "opt-6.7b": ("opt", _OPT_7B),
    "medium": ("llama", _MEDIUM),
}
_SMALL_LLAMA = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
_SMALL_OPT = {"vocab_size": 512, "hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 192, "num_hidden_layers": 2}
_SMALL_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


def shape(name: str, small: bool) -> tuple[str, dict[str, Any]]:
    """The model type and configuration for transformers. `small`: reduced to two layers of two heads."""
    kind, values = SHAPES[name]
    if small:
        values = {**values, **(_SMALL_OPT if kind == "opt" else _SMALL_LLAMA), **_SMALL_HEADS}
    if kind == "opt":
        values = {key: value for key, value in values.items() if key != "num_key_value_heads"}
    return kind, values


def random_model(name: str, device: str, *, small: bool, dtype: torch.dtype, seed: int) -> LoadedModel:
    """A random model of the shape `name` on `device`, as the loader returns it, with paged attention."""
    attention.register()
    model = _draw(name, device, small=small, dtype=dtype, seed=seed)
    loaded = _loaded(name, model, device, small=small)
    if loaded.info.layers > PROBED_LAYERS:
        few = _draw(name, device, small=small, dtype=dtype, seed=seed, num_hidden_layers=PROBED_LAYERS)
        return replace(loaded, needs=probe(_loaded(name, few, device, small=small)))
    return replace(loaded, needs=probe(loaded))


def _loaded(name: str, model: PreTrainedModel, device: str, *, small: bool) -> LoadedModel:
    model.set_attn_implementation(attention.SERVING)
    config: Any = model.config
    heads = int(config.num_attention_heads)
    info = ModelInfo(
        name=f"{name}{'-small' * small}",
        path="",
        model_type=str(config.model_type),
        dtype=str(model.dtype).removeprefix("torch."),
        layers=int(config.num_hidden_layers),
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        vocab_size=int(config.vocab_size),
        max_positions=int(config.max_position_embeddings),
        eos_token_ids=(),
        generation_defaults={},
        weight_bytes=sum(parameter.nbytes for parameter in model.parameters()),
    )
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    needs = AttentionNeeds(torch.device(device).type, info.dtype, heads, info.kv_heads, info.head_dim, 0)
    return LoadedModel(info, model, torch.device(device), keeps, needs, range(info.layers))


def write_model(name: str, folder: Path, device: str, *, small: bool, dtype: torch.dtype, seed: int) -> Path:
    """Write such a model to a folder that a cluster can load."""
    model = _draw(name, device, small=small, dtype=dtype, seed=seed)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=1, pad_token_id=0)
    model.save_pretrained(folder)
    return folder


def _draw(name: str, device: str, *, small: bool, dtype: torch.dtype, seed: int, **overrides: Any) -> PreTrainedModel:
    kind, values = shape(name, small)
    values = {**values, **overrides}
    config = AutoConfig.for_model(kind, bos_token_id=0, eos_token_id=1, pad_token_id=0, **values)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator(device).manual_seed(seed)
    deviation = GAIN / values["hidden_size"] ** 0.5
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.empty_like(parameter).normal_(0.0, deviation, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise)
            else:
                parameter.add_(noise)  # norms and biases keep their mean
    drawn: PreTrainedModel = model.eval().requires_grad_(False)
    return drawn


def read_weight_bytes(loaded: LoadedModel) -> int:
    """Bytes of weights that a decode iteration reads: all but untied embedding tables, of which it reads few rows."""
    model: Any = loaded.model
    tables = {
        module.weight.data_ptr(): module.weight.nbytes
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding)
    }
    head = model.get_output_embeddings()
    if head is not None:
        tables.pop(head.weight.data_ptr(), None)
    return sum(parameter.nbytes for parameter in model.parameters()) - sum(tables.values())


def linear_flops(loaded: LoadedModel) -> int:
    """Floating-point operations of a token in all matrix products except the one of the logits."""
    model: Any = loaded.model
    head = model.get_output_embeddings()
    linears = (module for module in model.modules() if isinstance(module, torch.nn.Linear) and module is not head)
    return sum(2 * module.weight.numel() for module in linears)


def causal_attention_flops(loaded: LoadedModel, tokens: int) -> int:
    """Floating-point operations of causal attention over one prompt of `tokens` tokens, without a cached prefix."""
    heads = int(loaded.model.config.num_attention_heads)
    seen = tokens * (tokens + 1) // 2
    return 4 * seen * heads * loaded.info.head_dim * loaded.info.layers
