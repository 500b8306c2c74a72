"""Reads the properties of a model, and refuses models that would be served wrongly, before any weight is loaded.

Models are refused here if the configuration and the model's class suffice to tell
(`alignedserve.engine.model.refusal`); `alignedserve.engine.model.probe` checks the rest on the loaded model.

dtype `auto`: float32 on a CPU; on a GPU the checkpoint's own, except that float32 checkpoints are served in bfloat16.

Sampling defaults are those of `generation_config.json` (`alignedserve.engine.model.generation`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from alignedserve.engine.model.generation import generation_defaults
from alignedserve.engine.model.refusal import attribute, refuse_unsupported
from alignedserve.errors import ModelError, UnsupportedModelError
from alignedserve.geometry import DTYPE_BYTES
from alignedserve.model import ModelInfo, check_model_folder, unserved_generation_keys
from alignedserve.weights.files import Tensor, read_json, read_tensors, weight_files, weights_identity
from alignedserve.weights.shapes import expert_count

log = logging.getLogger(__name__)

_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def inspect_model(name: str, path: str | Path, dtype: str, device: str, trust_remote_code: bool = False) -> ModelInfo:
    """The properties of the model in folder `path`, served as `name` in `dtype` (or `auto`), that every role needs.

    Raises ModelError for a folder that is missing or broken, UnsupportedModelError for a model whose tokens would be
    wrong. Reads the headers of the safetensors files, and samples of their weights.
    """
    folder = Path(path)
    raw = check_model_folder(folder)
    weights = weights_identity(folder, raw)  # before they are read: what changes meanwhile has another name
    tensors = read_tensors(weight_files(folder, raw))
    config = _read_config(folder, trust_remote_code)
    text = config.get_text_config(decoder=True)
    refuse_unsupported(config, text, trust_remote_code)
    generation = _read_generation_config(folder)
    stored, elements = _stored(tensors, folder)
    of_experts = _expert_elements(tensors, expert_count(raw))
    hidden, vocab_size = attribute(text, "hidden_size") or 0, _positive(text, "vocab_size", folder)
    tied = vocab_size * hidden if getattr(text, "tie_word_embeddings", False) else 0
    served = _resolve_dtype(dtype, device, stored if stored in DTYPE_BYTES else _config_dtype(text))
    heads = _positive(text, "num_attention_heads", folder)
    return ModelInfo(
        name=name,
        path=str(folder),
        model_type=config.model_type,
        dtype=served,
        layers=_positive(text, "num_hidden_layers", folder),
        kv_heads=_kv_heads(text, heads),
        head_dim=attribute(text, "head_dim") or _positive(text, "hidden_size", folder) // heads,
        vocab_size=vocab_size,
        max_positions=_max_positions(text, folder),
        eos_token_ids=_eos_token_ids(config, text, generation),
        generation_defaults=generation_defaults(generation, folder, vocab_size),
        weight_bytes=elements * DTYPE_BYTES[served],
        expert_bytes=of_experts * DTYPE_BYTES[served],
        tied_bytes=tied * DTYPE_BYTES[served],
        heads=heads,
        hidden_size=hidden,
        mlp_width=_mlp_width(text),
        weights=weights,
    )


def _expert_elements(tensors: Mapping[str, Tensor], experts: int | None) -> int:
    """Elements of all experts. Some model types name no `experts` in their files: a matrix for each, in one tensor."""
    return sum(
        math.prod(tensor.shape)
        for name, tensor in tensors.items()
        if ".experts." in name or (experts and len(tensor.shape) == 3 and tensor.shape[0] == experts)
    )


def _read_config(folder: Path, trust_remote_code: bool) -> PretrainedConfig:
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # transformers and its validators raise many unrelated types
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"transformers cannot read {folder / 'config.json'}: {reason}") from error
    return config


def _kv_heads(text: PretrainedConfig, heads: int) -> int:
    if getattr(text, "multi_query", False):
        return 1
    return attribute(text, "num_key_value_heads") or heads


def _positive(text: PretrainedConfig, key: str, folder: Path) -> int:
    value = attribute(text, key)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{folder / 'config.json'} has no usable {key}: {value!r}")
    return value


def _mlp_width(text: PretrainedConfig) -> int:
    """Width of the MLP, for all experts of a token together; 0 if the configuration does not tell."""
    try:
        widths = [attribute(text, key) for key in ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")]
        expert = attribute(text, "moe_intermediate_size") or next((width for width in widths if width), 0)
        experts = attribute(text, "num_experts_per_tok") or 0
        return max(int(width) for width in (*widths, expert * experts) if width is not None)
    except (UnsupportedModelError, TypeError, ValueError):
        return 0  # layers of several widths, or none: an estimate works without


def _max_positions(text: PretrainedConfig, folder: Path) -> int:
    for key in ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len", "seq_length"):
        value = getattr(text, key, None)
        if isinstance(value, int) and value > 0:
            return value
    raise ModelError(f"{folder / 'config.json'} does not give the number of positions of the model")


def _read_generation_config(folder: Path) -> dict[str, Any]:
    file = folder / "generation_config.json"
    if not file.is_file():
        return {}
    raw = read_json(file)
    if ignored := unserved_generation_keys(raw):
        log.warning("%s: these keys are ignored: %s", file, ", ".join(ignored))
    return raw


def _eos_token_ids(config: PretrainedConfig, text: PretrainedConfig, generation: dict[str, Any]) -> tuple[int, ...]:
    """All end tokens of generation_config.json, as `generate` takes them; if it has none, those of config.json."""
    for value in (generation.get("eos_token_id"), attribute(config, "eos_token_id"), attribute(text, "eos_token_id")):
        found = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        tokens = tuple(sorted({token for token in found if isinstance(token, int) and token >= 0}))
        if tokens:
            return tokens
    return ()


def _stored(tensors: Mapping[str, Tensor], folder: Path) -> tuple[str | None, int]:
    """The most common dtype of the elements in the safetensors files, and the number of elements."""
    counts: dict[str, int] = {}
    for tensor in tensors.values():
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + math.prod(tensor.shape)
    if not counts:
        raise ModelError(f"{folder} contains no tensors")
    return _SAFETENSORS_DTYPES.get(max(counts, key=lambda kind: counts[kind])), sum(counts.values())


def _config_dtype(text: PretrainedConfig) -> str:
    return str(getattr(text, "dtype", None) or "float32").removeprefix("torch.")


def _resolve_dtype(dtype: str, device: str, stored: str) -> str:
    if dtype == "auto":
        if not device.startswith("cuda"):
            return "float32"
        return "bfloat16" if stored == "float32" or stored not in DTYPE_BYTES else stored
    if dtype not in DTYPE_BYTES:
        raise ModelError(f"dtype {dtype!r} is not one of: auto, {', '.join(DTYPE_BYTES)}")
    return dtype
