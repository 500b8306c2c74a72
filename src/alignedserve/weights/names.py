"""The tensors of the tested model types: their names in a checkpoint, and their shapes in letters.

V: vocabulary size, P: positions, H: hidden size, Q and K: width of all query heads and of all key heads, D: width of a
head, N: number of query heads, I: width of the MLP, E: number of experts, X: width of an expert, W: width of a word
embedding. "2I H" is [2 * I, H]; "Q+2K" is a sum. Names are without the prefix, which differs between checkpoints
(`model.`, `transformer.`, `language_model.model.`); {} is an expert's number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Shapes = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Family:
    """The tensors that a checkpoint must contain under exactly these names, because transformers requires them."""

    top: Shapes
    layer: Shapes
    """Tensors of each layer, without `layers.N.`."""
    mlps: tuple[Shapes, ...] = ()
    """Alternative sets of tensors of a layer's MLP. A layer has one of them."""
    flagged: Mapping[str, Shapes] = field(default_factory=dict)
    """Tensors that a layer has if a key of config.json is true, by key."""
    layers: str = "layers"
    embedding: str = "embed_tokens.weight"
    head: Shapes = field(default_factory=lambda: {"lm_head.weight": "V H"})
    """Tensors of a model without tied embeddings, besides `embedding`."""
    width: str = "intermediate_size"
    expert_width: str = "intermediate_size"
    equal_heads: bool = False
    """Whether the width of a head is always the hidden size divided by the number of heads."""


def _with_biases(shapes: Shapes) -> Shapes:
    """The weights and a bias for each. A bias has as many values as the weight has rows."""
    biases = {name.replace(".weight", ".bias"): dims.split()[0] for name, dims in shapes.items()}
    return {**shapes, **biases}


def _biases(*names: str, of: Shapes) -> Shapes:
    return {f"{name}.bias": of[f"{name}.weight"].split()[0] for name in names}


_EMBEDDING: Shapes = {"embed_tokens.weight": "V H"}
_TOP: Shapes = {**_EMBEDDING, "norm.weight": "H"}
_ATTENTION: Shapes = {
    "self_attn.q_proj.weight": "Q H",
    "self_attn.k_proj.weight": "K H",
    "self_attn.v_proj.weight": "K H",
    "self_attn.o_proj.weight": "H Q",
}
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_ATTENTION_BIASES = _biases(*_QKV, "self_attn.o_proj", of=_ATTENTION)
_HEAD_NORMS: Shapes = {"self_attn.q_norm.weight": "D", "self_attn.k_norm.weight": "D"}
_NORMS: Shapes = {"input_layernorm.weight": "H", "post_attention_layernorm.weight": "H"}
_FEEDFORWARD_NORMS: Shapes = {"pre_feedforward_layernorm.weight": "H", "post_feedforward_layernorm.weight": "H"}
_MLP: Shapes = {"mlp.gate_proj.weight": "I H", "mlp.up_proj.weight": "I H", "mlp.down_proj.weight": "H I"}
_MLP_BIASES = _biases("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", of=_MLP)
_ROUTER: Shapes = {"mlp.gate.weight": "E H"}
_FUSED_EXPERTS: Shapes = {**_ROUTER, "mlp.experts.gate_up_proj": "E 2X H", "mlp.experts.down_proj": "E H X"}

_LLAMA_LAYER: Shapes = {**_ATTENTION, **_NORMS, **_MLP}
_LLAMA = Family(_TOP, _LLAMA_LAYER, flagged={"attention_bias": _ATTENTION_BIASES, "mlp_bias": _MLP_BIASES})
_MISTRAL = Family(_TOP, _LLAMA_LAYER)
_QWEN2 = Family(_TOP, {**_LLAMA_LAYER, **_biases(*_QKV, of=_ATTENTION)})
_QWEN3 = Family(_TOP, {**_LLAMA_LAYER, **_HEAD_NORMS}, flagged={"attention_bias": _ATTENTION_BIASES})
_GEMMA2 = Family(_TOP, {**_LLAMA_LAYER, **_FEEDFORWARD_NORMS}, flagged={"attention_bias": _ATTENTION_BIASES})
_GEMMA3 = Family(
    _TOP, {**_LLAMA_LAYER, **_FEEDFORWARD_NORMS, **_HEAD_NORMS}, flagged={"attention_bias": _ATTENTION_BIASES}
)
_OLMO2 = Family(
    _TOP,
    {
        **_ATTENTION,
        "self_attn.q_norm.weight": "Q",
        "self_attn.k_norm.weight": "K",
        "post_attention_layernorm.weight": "H",
        "post_feedforward_layernorm.weight": "H",
        **_MLP,
    },
    flagged={"attention_bias": _ATTENTION_BIASES},
)
_PHI = Family(
    {**_EMBEDDING, "final_layernorm.weight": "H", "final_layernorm.bias": "H"},
    _with_biases(
        {
            "input_layernorm.weight": "H",
            "self_attn.q_proj.weight": "Q H",
            "self_attn.k_proj.weight": "K H",
            "self_attn.v_proj.weight": "K H",
            "self_attn.dense.weight": "H Q",
            "mlp.fc1.weight": "I H",
            "mlp.fc2.weight": "H I",
        }
    ),
    head={"lm_head.weight": "V H", "lm_head.bias": "V"},
)
_PHI3 = Family(
    _TOP,
    {
        **_NORMS,
        "self_attn.qkv_proj.weight": "Q+2K H",
        "self_attn.o_proj.weight": "H Q",
        "mlp.gate_up_proj.weight": "2I H",
        "mlp.down_proj.weight": "H I",
    },
)
_MIXTRAL = Family(
    _TOP,
    {**_ATTENTION, **_NORMS},
    mlps=(
        {
            **_ROUTER,
            "mlp.experts.{}.w1.weight": "X H",
            "mlp.experts.{}.w2.weight": "H X",
            "mlp.experts.{}.w3.weight": "X H",
        },
        _FUSED_EXPERTS,
    ),
)
_QWEN3_MOE = Family(
    _TOP,
    {**_ATTENTION, **_NORMS, **_HEAD_NORMS},
    mlps=(
        {
            **_ROUTER,
            "mlp.experts.{}.gate_proj.weight": "X H",
            "mlp.experts.{}.up_proj.weight": "X H",
            "mlp.experts.{}.down_proj.weight": "H X",
        },
        _FUSED_EXPERTS,
        _MLP,
    ),
    flagged={"attention_bias": _ATTENTION_BIASES},
    expert_width="moe_intermediate_size",
)
_GPT_OSS = Family(
    _TOP,
    {
        **_ATTENTION,
        **_NORMS,
        "self_attn.sinks": "N",
        "mlp.router.weight": "E H",
        "mlp.router.bias": "E",
        "mlp.experts.gate_up_proj": "E H 2X",
        "mlp.experts.gate_up_proj_bias": "E 2X",
        "mlp.experts.down_proj": "E X H",
        "mlp.experts.down_proj_bias": "E H",
    },
    flagged={"attention_bias": _ATTENTION_BIASES},
)
_OPT_MATRICES: Shapes = {
    "self_attn.q_proj.weight": "H H",
    "self_attn.k_proj.weight": "H H",
    "self_attn.v_proj.weight": "H H",
    "self_attn.out_proj.weight": "H H",
    "fc1.weight": "I H",
    "fc2.weight": "H I",
}
_OPT_NORMS: Shapes = {"self_attn_layer_norm.weight": "H", "final_layer_norm.weight": "H"}
_OPT = Family(
    {"embed_tokens.weight": "V W", "embed_positions.weight": "P+2 H"},
    _OPT_MATRICES,
    flagged={
        "enable_bias": _biases(*(name.removesuffix(".weight") for name in _OPT_MATRICES), of=_OPT_MATRICES),
        "layer_norm_elementwise_affine": _with_biases(_OPT_NORMS),
    },
    head={"lm_head.weight": "V W"},
    width="ffn_dim",
    equal_heads=True,
)
_GPT2 = Family(
    {"wte.weight": "V H", "wpe.weight": "P H", "ln_f.weight": "H", "ln_f.bias": "H"},
    {
        **_with_biases({"ln_1.weight": "H", "ln_2.weight": "H"}),
        "attn.c_attn.weight": "H 3H",
        "attn.c_attn.bias": "3H",
        "attn.c_proj.weight": "H H",
        "attn.c_proj.bias": "H",
        "mlp.c_fc.weight": "H I",
        "mlp.c_fc.bias": "I",
        "mlp.c_proj.weight": "I H",
        "mlp.c_proj.bias": "H",
    },
    layers="h",
    embedding="wte.weight",
    width="n_inner",
    equal_heads=True,
)
_GPT_NEOX = Family(
    {"embed_in.weight": "V H", "final_layer_norm.weight": "H", "final_layer_norm.bias": "H"},
    {
        **_with_biases({**_NORMS, "mlp.dense_h_to_4h.weight": "I H", "mlp.dense_4h_to_h.weight": "H I"}),
        "attention.query_key_value.weight": "3H H",
        "attention.dense.weight": "H H",
    },
    flagged={"attention_bias": {"attention.query_key_value.bias": "3H", "attention.dense.bias": "H"}},
    embedding="embed_in.weight",
    equal_heads=True,
)

FAMILIES: Mapping[str, Family] = {
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "gpt2": _GPT2,
    "gpt_neox": _GPT_NEOX,
    "gpt_oss": _GPT_OSS,
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "mixtral": _MIXTRAL,
    "olmo2": _OLMO2,
    "opt": _OPT,
    "phi": _PHI,
    "phi3": _PHI3,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3_MOE,
}
