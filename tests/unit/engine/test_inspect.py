"""What is read from a model folder, and which models are refused before their weights are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from alignedserve.engine.model.inspect import inspect_model
from alignedserve.errors import ModelError, UnsupportedModelError
from alignedserve.testing.models import KINDS, MAX_POSITIONS, VOCAB_SIZE, make_model


def config_folder(folder: Path, model_type: str, raw: dict[str, Any] | None = None, **values: Any) -> Path:
    """A folder with a configuration of `model_type` and one small tensor, enough for inspection."""
    config = AutoConfig.for_model(model_type, **values).to_dict() if raw is None else raw
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, default=str))
    save_file({"weight": torch.zeros(4, 3)}, folder / "model.safetensors")
    return folder


def edit(file: Path, **values: Any) -> None:
    raw = json.loads(file.read_text()) if file.exists() else {}
    raw.update(values)
    file.write_text(json.dumps(raw))


@pytest.mark.parametrize("kind", ["mixtral", "granitemoe", "qwen2_moe", "granite"])
def test_the_bytes_of_experts_are_known_whatever_files_name_them(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    widths = dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 48)
    default = AutoConfig.for_model(kind)
    counts = {key: 4 for key in ("num_local_experts", "num_experts") if hasattr(default, key)}
    config = AutoConfig.for_model(kind, vocab_size=VOCAB_SIZE, **sizes, **widths, **counts)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    of_each = 3 * 32 * 48  # gate, up and down
    expected = 2 * 4 * of_each * 4 if counts else 0
    assert inspect_model("m", tmp_path, "float32", "cpu").expert_bytes == expected


@pytest.mark.parametrize("kind", KINDS)
def test_shape_of_every_kind(kind: str, tmp_path: Path) -> None:
    info = inspect_model("name", make_model(kind, tmp_path, seed=0), "auto", "cpu")
    grouped = kind not in ("opt", "gpt2", "gpt_neox")
    assert (info.layers, info.kv_heads, info.head_dim) == (3, 2 if grouped else 4, 16)
    assert (info.vocab_size, info.max_positions, info.dtype) == (VOCAB_SIZE, MAX_POSITIONS, "float32")
    assert info.eos_token_ids == (VOCAB_SIZE - 1,)
    assert info.generation_defaults == {}
    assert type(info).from_json(info.to_json()) == info


def test_values_left_out_of_config_json_are_the_architectures_defaults(tmp_path: Path) -> None:
    info = inspect_model("m", config_folder(tmp_path, "llama", raw={"model_type": "llama"}), "auto", "cpu")
    default = AutoConfig.for_model("llama")
    assert info.layers == default.num_hidden_layers
    assert info.kv_heads == default.num_attention_heads
    assert info.head_dim == default.hidden_size // default.num_attention_heads
    assert info.max_positions == default.max_position_embeddings


def test_weight_bytes_count_elements_in_the_served_dtype(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, "llama")
    assert inspect_model("m", folder, "float32", "cpu").weight_bytes == 48
    assert inspect_model("m", folder, "bfloat16", "cpu").weight_bytes == 24


@pytest.mark.parametrize(
    ("stored", "device", "served"),
    [
        (torch.float32, "cpu", "float32"),
        (torch.bfloat16, "cpu", "float32"),
        (torch.float32, "cuda", "bfloat16"),
        (torch.float16, "cuda:0", "float16"),
        (torch.bfloat16, "cuda", "bfloat16"),
    ],
)
def test_dtype_auto(stored: torch.dtype, device: str, served: str, tmp_path: Path) -> None:
    assert inspect_model("m", make_model("llama", tmp_path, seed=0, dtype=stored), "auto", device).dtype == served


def test_end_tokens_are_all_of_the_generation_config_else_of_the_config(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path, seed=0, eos_token_id=7)
    edit(folder / "generation_config.json", eos_token_id=[9, 4])
    assert inspect_model("m", folder, "auto", "cpu").eos_token_ids == (4, 9)
    edit(folder / "config.json", eos_token_id=[1, 4])
    (folder / "generation_config.json").unlink()
    assert inspect_model("m", folder, "auto", "cpu").eos_token_ids == (1, 4)


@pytest.mark.parametrize(
    ("raw", "defaults"),
    [
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20},
            {"temperature": 0.6, "top_p": 0.9, "top_k": 20},
        ),
        ({"temperature": 0.7, "min_p": 0.05}, {"temperature": 0.7, "min_p": 0.05}),
        ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"do_sample": True, "temperature": None}, {}),
        ({"no_repeat_ngram_size": 3, "min_length": 0}, {"no_repeat_ngram_size": 3}),
        ({"min_new_tokens": 4, "min_length": 9}, {"min_new_tokens": 4, "min_length": 9}),
        ({"suppress_tokens": [3, 10**6], "begin_suppress_tokens": None}, {"suppress_tokens": [3]}),
        ({"forced_bos_token_id": 0}, {"forced_bos_token_id": [0]}),
        ({"forced_eos_token_id": [1, 2]}, {"forced_eos_token_id": [1, 2]}),
        ({"bad_words_ids": [[5], [6, 7]]}, {"bad_words_ids": [[5], [6, 7]]}),
    ],
)
def test_sampling_defaults(raw: dict[str, Any], defaults: dict[str, Any], tmp_path: Path) -> None:
    folder = config_folder(tmp_path, "llama")
    edit(folder / "generation_config.json", **raw)
    assert inspect_model("m", folder, "auto", "cpu").generation_defaults == defaults


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("temperature", -1.0),
        ("no_repeat_ngram_size", -1),
        ("min_length", "3"),
        ("suppress_tokens", [-1]),
        ("begin_suppress_tokens", 5),
        ("forced_eos_token_id", 10**6),
        ("bad_words_ids", [5]),
    ],
)
def test_sampling_default_out_of_range_is_named(key: str, wrong: Any, tmp_path: Path) -> None:
    folder = config_folder(tmp_path, "llama")
    edit(folder / "generation_config.json", **{key: wrong})
    with pytest.raises(ModelError, match=rf"generation_config\.json.*{key}"):
        inspect_model("m", folder, "auto", "cpu")


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 64,
    "long_factor": [2.0] * 64,
}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("falcon", {}, "attention interface"),
    ("bloom", {}, "attention interface"),
    ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantised .mxfp4"),
    ("deepseek_v3", {}, "wider than its value heads"),
    ("mpt", {}, "attention interface"),
    ("gptj", {}, "attention interface"),
    ("stablelm", {}, "attention interface"),
    ("bert", {}, "encoder"),
    ("roberta", {"is_decoder": True}, "encoder"),
    ("t5", {}, "no causal language model"),
    ("bart", {}, "encoder-decoder"),
    ("mamba", {}, "recurrent state"),
    ("jamba", {}, "recurrent state"),
    ("qwen3_next", {}, "recurrent state"),
    ("minimax", {}, "linear_attention"),
    ("llama4_text", {}, "chunked_attention"),
    ("gemma3n_text", {}, "share keys and values"),
    ("minicpm3", {}, "key heads and value heads differ"),
    ("gemma4_text", {}, "layers differ in head_dim"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "not causal"),
    ("gpt2", {"add_cross_attention": True}, "cross-attention"),
    ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised .gptq"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "longest position"),
    ("phi3", {"rope_parameters": LONGROPE, "hidden_size": 128, "num_attention_heads": 1}, "longest position"),
]


@pytest.mark.parametrize(
    ("model_type", "values", "reason"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_refused_by_configuration(model_type: str, values: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = config_folder(tmp_path, model_type, **values)
    with pytest.raises(UnsupportedModelError, match=reason) as raised:
        inspect_model("m", folder, "auto", "cpu")
    assert repr(model_type) in str(raised.value)


def test_old_style_rope_scaling_is_refused_too(tmp_path: Path) -> None:
    raw = {"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    with pytest.raises(UnsupportedModelError, match="longest position"):
        inspect_model("m", config_folder(tmp_path, "llama", raw=raw), "auto", "cpu")


def test_rope_scaling_that_depends_on_nothing_is_served(tmp_path: Path) -> None:
    folder = config_folder(
        tmp_path, "llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    )
    assert inspect_model("m", folder, "auto", "cpu").model_type == "llama"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "cannot be read"),
        ("[]", "is not a JSON object"),
        ("{}", "no model_type"),
        ('{"model_type": "no_such_architecture"}', "transformers cannot read"),
        ('{"model_type": "llama", "num_hidden_layers": 0}', "num_hidden_layers"),
        ('{"model_type": "llama", "num_attention_heads": 7}', "transformers cannot read|multiple"),
    ],
)
def test_broken_config_is_a_model_error(content: str, reason: str, tmp_path: Path) -> None:
    folder = config_folder(tmp_path, "llama")
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelError, match=reason):
        inspect_model("m", folder, "auto", "cpu")


def test_unknown_dtype_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="int8"):
        inspect_model("m", config_folder(tmp_path, "llama"), "int8", "cpu")


def test_truncated_header_is_a_model_error(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, "llama")
    (folder / "model.safetensors").write_bytes(b"\x80\x00")
    with pytest.raises(ModelError, match="not a readable safetensors"):
        inspect_model("m", folder, "auto", "cpu")


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, "llama")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled weights are not loaded"):
        inspect_model("m", folder, "auto", "cpu")


def test_weights_in_another_form_beside_them_are_not_counted(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, "llama")
    save_file({"weight": torch.zeros(100, 100)}, folder / "consolidated.safetensors")
    assert inspect_model("m", folder, "float32", "cpu").weight_bytes == 48


def test_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, "llama")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    with pytest.raises(ModelError, match="model-00002-of-00002"):
        inspect_model("m", folder, "auto", "cpu")
