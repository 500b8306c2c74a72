"""Reads what a model is, and refuses what would be served wrongly, before any weight is loaded.

What can be known from the configuration and the model's class is refused here; `alignedserve.engine.probe` proves
the rest on the loaded model.

dtype `auto`: float32 on a CPU; on a GPU the checkpoint's own, except that float32 checkpoints are served in bfloat16.

Sampling defaults are the values that `generation_config.json` names itself, not the ones that transformers would
fill in. Where it says `do_sample: false`, its temperature, top_p, top_k and min_p are not meant to be used and are
left out; repetition_penalty holds for greedy decoding too.
"""

from __future__ import annotations

import inspect as python_inspect
import json
import logging
import math
import struct
import sys
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

from alignedserve.errors import InvalidRequestError, ModelError, UnsupportedModelError
from alignedserve.geometry import DTYPE_BYTES
from alignedserve.model import ModelInfo, check_model_folder
from alignedserve.request import SamplingParams

log = logging.getLogger(__name__)

_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p")
_PER_MODEL = ("head_dim", "hidden_size", "num_attention_heads", "num_key_value_heads")
# Keys of generation_config.json that change what `generate` writes and that no request here can ask for.
_UNSERVED_GENERATION_KEYS = (
    "bad_words_ids",
    "encoder_repetition_penalty",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "no_repeat_ngram_size",
    "num_beams",
    "sequence_bias",
    "suppress_tokens",
    "begin_suppress_tokens",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
)


def inspect_model(name: str, path: str | Path, dtype: str, device: str, trust_remote_code: bool = False) -> ModelInfo:
    """What every role must know of the model in folder `path`, served as `name` in `dtype` (or `auto`).

    Raises ModelError for a folder that is missing or broken, UnsupportedModelError for a model whose tokens would be
    wrong. Reads no weights beyond the headers of the safetensors files.
    """
    folder = Path(path)
    check_model_folder(folder)
    config = _read_config(folder, trust_remote_code)
    text = config.get_text_config(decoder=True)
    refuse_unsupported(config, text, trust_remote_code)
    generation = _read_generation_config(folder)
    stored, elements = _read_headers(folder)
    served = _resolve_dtype(dtype, device, stored if stored in DTYPE_BYTES else _config_dtype(text))
    heads = _positive(text, "num_attention_heads", folder)
    return ModelInfo(
        name=name,
        path=str(folder),
        model_type=config.model_type,
        dtype=served,
        layers=_positive(text, "num_hidden_layers", folder),
        kv_heads=_kv_heads(text, heads),
        head_dim=_attribute(text, "head_dim") or _positive(text, "hidden_size", folder) // heads,
        vocab_size=_positive(text, "vocab_size", folder),
        max_positions=_max_positions(text, folder),
        eos_token_ids=_eos_token_ids(config, text, generation),
        generation_defaults=_generation_defaults(generation, folder),
        weight_bytes=elements * DTYPE_BYTES[served],
    )


def refuse_unsupported(config: PretrainedConfig, text: PretrainedConfig, trust_remote_code: bool = False) -> None:
    """Raises UnsupportedModelError where `config` (whose text part is `text`) asks for something not served here."""
    model_class = _causal_lm_class(config, trust_remote_code)
    for reason in (
        _quantisation(config, text),
        _class_reason(config, model_class),
        _rope_reason(text),
        _attention_reason(text),
    ):
        if reason:
            raise UnsupportedModelError(f"model_type {config.model_type!r} is not supported: {reason}")


def _read_config(folder: Path, trust_remote_code: bool) -> PretrainedConfig:
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # transformers and its validators raise many unrelated types
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"transformers cannot read {folder / 'config.json'}: {reason}") from error
    return config


def _causal_lm_class(config: PretrainedConfig, trust_remote_code: bool) -> type | None:
    """The class that AutoModelForCausalLM would build; None for code that comes with the checkpoint."""
    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return None
    try:
        found = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise UnsupportedModelError(
            f"model_type {config.model_type!r} is not supported: transformers has no causal language model for it"
        ) from None
    chosen = found[0] if isinstance(found, (list, tuple)) else found
    assert isinstance(chosen, type)
    return chosen


def _quantisation(config: PretrainedConfig, text: PretrainedConfig) -> str | None:
    for part in (config, text):
        quantised = getattr(part, "quantization_config", None)
        if quantised:
            method = quantised.get("quant_method") if isinstance(quantised, dict) else type(quantised).__name__
            return f"its weights are quantised ({method})"
    return None


def _class_reason(config: PretrainedConfig, model_class: type | None) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING:
        return "it is an encoder"
    if model_class is None:
        return None
    if getattr(model_class, "_is_stateful", False):
        return "it keeps a recurrent state beside its keys and values"
    source = _module_source(model_class)
    if not getattr(model_class, "_supports_attention_backend", False) or (
        source is not None and "ALL_ATTENTION_FUNCTIONS" not in source
    ):
        return "its attention does not go through transformers' attention interface"
    return None


def _module_source(model_class: type) -> str | None:
    try:
        return python_inspect.getsource(sys.modules[model_class.__module__])
    except (KeyError, OSError, TypeError):
        return None


def _rope_reason(text: PretrainedConfig) -> str | None:
    for kind in _rope_types(getattr(text, "rope_parameters", None)) | _rope_types(getattr(text, "rope_scaling", None)):
        if kind == "longrope" or "dynamic" in kind:
            return f"its rotary embedding ({kind!r}) depends on the longest position in the batch"
    return None


def _rope_types(parameters: Any) -> set[str]:
    """Every `rope_type` in a rotary configuration, which may hold one for each type of layer."""
    if not isinstance(parameters, dict):
        return set()
    kinds = {str(parameters[key]) for key in ("rope_type", "type") if parameters.get(key)}
    return kinds.union(*(_rope_types(value) for value in parameters.values()))


def _attention_reason(text: PretrainedConfig) -> str | None:
    def get(key: str) -> Any:
        return _attribute(text, key)

    layer_types = set(get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    per_layer = [key for key in _PER_MODEL if isinstance(get(key), (list, tuple))]
    value_size = get("v_head_dim")
    other_size = get("global_head_dim") or get("head_dim")
    reasons = {
        f"it has layers of type {', '.join(sorted(map(str, layer_types)))}": layer_types,
        f"its layers differ in {', '.join(per_layer)}": per_layer,
        "not all of its layers are attention": set(get("layers_block_type") or ()) - {"attention"},
        "its attention is not causal": get("is_causal") is False or get("use_bidirectional_attention"),
        "its key heads and value heads differ": get("kv_lora_rank")
        or (value_size and value_size != (get("head_dim") or value_size)),
        "its layers share keys and values": get("num_kv_shared_layers"),
        "it has cross-attention": get("cross_attention_layers") or get("add_cross_attention"),
        "its attention is cut into chunks": get("attention_chunk_size"),
        "its layers have heads of different sizes": other_size != get("head_dim"),
        "its attention adds a bias by distance (ALiBi)": get("alibi"),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _kv_heads(text: PretrainedConfig, heads: int) -> int:
    if getattr(text, "multi_query", False):
        return 1
    return _attribute(text, "num_key_value_heads") or heads


def _positive(text: PretrainedConfig, key: str, folder: Path) -> int:
    value = _attribute(text, key)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{folder / 'config.json'} has no usable {key}: {value!r}")
    return value


def _max_positions(text: PretrainedConfig, folder: Path) -> int:
    for key in ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len", "seq_length"):
        value = getattr(text, key, None)
        if isinstance(value, int) and value > 0:
            return value
    raise ModelError(f"{folder / 'config.json'} does not say how many positions the model has")


def _read_generation_config(folder: Path) -> dict[str, Any]:
    file = folder / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{file} holds no JSON object")
    ignored = [key for key in _UNSERVED_GENERATION_KEYS if raw.get(key) not in (None, [], 0, 1, 1.0)]
    if ignored:
        log.warning("%s: not used here: %s", file, ", ".join(ignored))
    return raw


def _eos_token_ids(config: PretrainedConfig, text: PretrainedConfig, generation: dict[str, Any]) -> tuple[int, ...]:
    """All end tokens of generation_config.json, as `generate` takes them; where it names none, those of config.json."""
    for value in (generation.get("eos_token_id"), _attribute(config, "eos_token_id"), _attribute(text, "eos_token_id")):
        found = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        tokens = tuple(sorted({token for token in found if isinstance(token, int) and token >= 0}))
        if tokens:
            return tokens
    return ()


def _attribute(config: PretrainedConfig, key: str) -> Any:
    """`config.key`, or None. Raises UnsupportedModelError where layers have values of their own."""
    try:
        return getattr(config, key, None)
    except Exception as error:  # transformers: AmbiguousGlobalPerLayerAttributeError, not an AttributeError
        raise UnsupportedModelError(
            f"model_type {config.model_type!r} is not supported: its layers differ in {key}"
        ) from error


def _generation_defaults(generation: dict[str, Any], folder: Path) -> dict[str, float]:
    keys = () if generation.get("do_sample") is False else _SAMPLING_KEYS
    defaults = {
        key: generation[key] for key in (*keys, "repetition_penalty") if isinstance(generation.get(key), (int, float))
    }
    try:
        SamplingParams(**defaults)
    except InvalidRequestError as error:
        raise ModelError(f"{folder / 'generation_config.json'}: {error}") from error
    return defaults


def _read_headers(folder: Path) -> tuple[str | None, int]:
    """The dtype of most elements in the safetensors files, and the number of elements."""
    counts: dict[str, int] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with file.open("rb") as stream:
                (size,) = struct.unpack("<Q", stream.read(8))
                if size > file.stat().st_size:
                    raise ValueError("its header is longer than the file")
                header = json.loads(stream.read(size))
        except (OSError, ValueError, struct.error) as error:
            raise ModelError(f"{file} is no readable safetensors file: {error}") from error
        for key, entry in header.items():
            if key != "__metadata__":
                counts[entry["dtype"]] = counts.get(entry["dtype"], 0) + math.prod(entry["shape"])
    if not counts:
        raise ModelError(f"{folder} holds no tensors")
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
