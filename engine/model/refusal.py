"""Detects models that would be served wrongly, from their configuration and class."""

from __future__ import annotations

import inspect as python_inspect
import sys
from typing import Any

from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

from alignedserve.errors import UnsupportedModelError
from alignedserve.model import batch_dependent_rotary

_PER_MODEL = ("head_dim", "hidden_size", "num_attention_heads", "num_key_value_heads")


def refuse_unsupported(config: PretrainedConfig, text: PretrainedConfig, trust_remote_code: bool = False) -> None:
    """Raises UnsupportedModelError if `config` (with text part `text`) needs something that is not supported."""
    model_class = _causal_lm_class(config, trust_remote_code)
    for reason in (
        _quantisation(config, text),
        _class_reason(config, model_class),
        _rope_reason(text),
        _attention_reason(text),
    ):
        if reason:
            raise UnsupportedModelError(f"model_type {config.model_type!r} is not supported: {reason}")


def has_sinks(config: PretrainedConfig, trust_remote_code: bool = False) -> bool:
    """Whether the model's attention uses sinks, according to the source code of its class."""
    model_class = _causal_lm_class(config, trust_remote_code)
    source = None if model_class is None else _module_source(model_class)
    return source is not None and "s_aux" in source


def attribute(config: PretrainedConfig, key: str) -> Any:
    """`config.key`, or None. Raises UnsupportedModelError if layers have different values."""
    try:
        return getattr(config, key, None)
    except Exception as error:  # transformers raises AmbiguousGlobalPerLayerAttributeError, no AttributeError
        raise UnsupportedModelError(
            f"model_type {config.model_type!r} is not supported: its layers differ in {key}"
        ) from error


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
    names = ("rope_parameters", "rope_scaling")
    return batch_dependent_rotary({name: getattr(text, name, None) for name in names})


def _attention_reason(text: PretrainedConfig) -> str | None:
    def get(key: str) -> Any:
        return attribute(text, key)

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
