"""Small random models of every supported architecture, written as checkpoints that `transformers` can load.

Weights are drawn with a standard deviation near 0.15 and embeddings are untied: default initialisation repeats one
token and hides errors. `make_model` writes `config.json`, `model.safetensors` and `generation_config.json`;
`make_tokenizer` adds a byte-level BPE `tokenizer.json` for tests that need text.
"""

from __future__ import annotations

import json
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

VOCAB_SIZE = 512
MAX_POSITIONS = 512

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
}
_MULTI_HEAD = {key: value for key, value in _SHAPE.items() if key != "num_key_value_heads"}
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "router_aux_loss_coef": 0.0}

# kind -> (model_type, configuration)
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("opt", {**_MULTI_HEAD, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "llama": ("llama", _SHAPE),
    "qwen2": ("qwen2", _SHAPE),
    "qwen3": ("qwen3", {**_SHAPE, "head_dim": 16}),
    "mistral": ("mistral", {**_SHAPE, "sliding_window": 24}),
    "gemma2": ("gemma2", {**_SHAPE, "head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 24}),
    "gemma3": (
        "gemma3_text",
        {**_SHAPE, "head_dim": 16, "sliding_window": 24, "layer_types": _SLIDING, "query_pre_attn_scalar": 24},
    ),
    "phi": ("phi", _SHAPE),
    "phi3": ("phi3", _SHAPE),
    "mixtral": ("mixtral", {**_SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("qwen3_moe", {**_SHAPE, "head_dim": 16, "num_experts": 4, **_MOE}),
    "gpt2": (
        "gpt2",
        {
            "vocab_size": VOCAB_SIZE,
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "n_inner": 96,
            "n_positions": MAX_POSITIONS,
            "tie_word_embeddings": False,
        },
    ),
    "gpt_neox": ("gpt_neox", _MULTI_HEAD),
    "olmo2": ("olmo2", _SHAPE),
    "gpt_oss": (
        "gpt_oss",
        {**_SHAPE, "head_dim": 16, "sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}

KINDS: tuple[str, ...] = tuple(_CONFIGS)
"""The fifteen architectures that must match `transformers` token for token."""

_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}


def make_model(
    kind: str,
    folder: str | Path,
    *,
    seed: int,
    std: float = 0.15,
    dtype: torch.dtype = torch.float32,
    eos_token_id: int | list[int] | None = None,
    generation: dict[str, Any] | None = None,
    max_shard_size: str = "50GB",
    **overrides: Any,
) -> Path:
    """Write a random model of `kind` (one of KINDS) to `folder` and return the folder.

    `overrides` are configuration keys, under their usual names (`hidden_size`, `num_attention_heads`,
    `num_key_value_heads`, `head_dim`, `num_hidden_layers`, ...); gpt2 takes them under these names too, and a kind
    without grouped heads ignores `num_key_value_heads` and `head_dim`. One end token in the vocabulary occurs about
    as often as any other token unless `eos_token_id` names others. `generation` is added to `generation_config.json`.
    Weights larger than `max_shard_size` are split into shards. The same arguments give the same weights.
    """
    eos = overrides.get("vocab_size", VOCAB_SIZE) - 1 if eos_token_id is None else eos_token_id
    config = _build_config(kind, {"bos_token_id": 0, "pad_token_id": 0, "eos_token_id": eos, **overrides})
    config.dtype = dtype
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # parameters that keep their mean, such as the sinks of gpt_oss
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw_weights(model, seed=seed, std=std)
    values = {"bos_token_id": 0, "eos_token_id": eos, "pad_token_id": 0, **(generation or {})}
    model.generation_config = GenerationConfig(**values)
    path = Path(folder)
    model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    return path


def draw_weights(model: PreTrainedModel, *, seed: int, std: float) -> None:
    """Draw every parameter from normal(0, std); one-dimensional ones (norms, biases) keep their mean."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.empty(parameter.shape).normal_(0.0, std, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise)
            else:
                parameter.add_(noise)


def make_tokenizer(folder: str | Path, *, vocab_size: int = 400) -> Path:
    """Write a byte-level BPE `tokenizer.json` (ids below `vocab_size`, any text round-trips) and its config.

    `<s>` is 0, `</s>` is 1. A model needs at least this `vocab_size` to accept every id. Returns the folder.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < 258:
        raise ValueError("a byte-level vocabulary needs 256 bytes and 2 special tokens")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([make_tokenizer.__doc__ or "", draw_weights.__doc__ or ""] * 4, trainer)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "pad_token": "<s>",
                "model_max_length": MAX_POSITIONS,
                "clean_up_tokenization_spaces": False,
            }
        ),
        encoding="utf-8",
    )
    return path


def _build_config(kind: str, overrides: dict[str, Any]) -> Any:
    if kind not in _CONFIGS:
        raise ValueError(f"unknown kind {kind!r}; choose one of: {', '.join(KINDS)}")
    model_type, base = _CONFIGS[kind]
    values = dict(base)
    if kind == "gpt2":
        overrides = {_GPT2_NAMES.get(key, key): value for key, value in overrides.items()}
    grouped = "num_key_value_heads" in base
    for key, value in overrides.items():
        if not grouped and key in ("num_key_value_heads", "head_dim"):
            continue
        values[key] = value
    if kind == "opt":
        values["ffn_dim"] = values.pop("intermediate_size", values["ffn_dim"])
        values["word_embed_proj_dim"] = values["hidden_size"]
    if "layer_types" in base and "layer_types" not in overrides:
        values["layer_types"] = list(islice(cycle(base["layer_types"]), values["num_hidden_layers"]))
    return AutoConfig.for_model(model_type, **values)
