"""Plans for tensor parallel ranks of models without one in transformers (`base_model_tp_plan`)."""

from __future__ import annotations

from typing import Any

from alignedserve.errors import UnsupportedModelError

ATTENTION = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.sinks": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}
"""For plans of transformers that share only the experts."""
_EXPERTS = {
    "layers.*.mlp.experts": "moe_tp_experts",
    "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "layers.*.mlp.experts.down_proj": "rowwise",
}

_GPT2 = {
    "h.*.attn.c_attn": "colwise",
    "h.*.attn.c_proj": "rowwise",
    "h.*.mlp.c_fc": "colwise",
    "h.*.mlp.c_proj": "rowwise",
}


def _gated(mlp: str) -> dict[str, str]:
    return {
        f"layers.*.{mlp}.gate_proj": "colwise",
        f"layers.*.{mlp}.up_proj": "colwise",
        f"layers.*.{mlp}.down_proj": "rowwise",
    }


# In transformers' words. Names are those below the base model.
OWN_PLANS: dict[str, dict[str, str]] = {
    "opt": {
        "decoder.layers.*.self_attn.q_proj": "colwise",
        "decoder.layers.*.self_attn.k_proj": "colwise",
        "decoder.layers.*.self_attn.v_proj": "colwise",
        "decoder.layers.*.self_attn.out_proj": "rowwise",
        "decoder.layers.*.fc1": "colwise",
        "decoder.layers.*.fc2": "rowwise",
    },
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    # transformers' own is by the dimensions of the experts' tensors, which are transposed
    "aria_text": {**ATTENTION, **_gated("mlp.shared_experts"), **_EXPERTS},
    "gpt_oss": {
        **ATTENTION,
        "layers.*.mlp.experts": "moe_tp_experts",
        "layers.*.mlp.experts.gate_up_proj": "colwise",
        "layers.*.mlp.experts.gate_up_proj_bias": "colwise",
        "layers.*.mlp.experts.down_proj": "rowwise",
        "layers.*.mlp.experts.down_proj_bias": "rowwise",
    },
    "afmoe": {
        **ATTENTION,
        "layers.*.self_attn.gate_proj": "colwise",
        **_gated("mlp"),
        **_gated("mlp.shared_experts"),
        **_EXPERTS,
    },
    "hunyuan_v1_dense": {**ATTENTION, **_gated("mlp")},
    "hunyuan_v1_moe": {**ATTENTION, **_gated("mlp.shared_mlp"), **_EXPERTS},
}


def require_packing(model_type: str, multi_query: Any) -> None:
    """`multi_query`: of the configuration, if it has such a key. Raises UnsupportedModelError."""
    if multi_query is False:
        raise UnsupportedModelError(
            f"model_type {model_type!r} without multi_query packs queries, keys and values head by head, "
            "which tensor parallel ranks cannot share; share it by layers instead: --prefill-pp, --decode-pp"
        )
