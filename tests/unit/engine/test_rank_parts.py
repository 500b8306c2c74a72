"""A rank's part of a checkpoint is what one process reads, in the same precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from alignedserve.engine.model.cpu_linear import PackedLinear, pack_linears
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.parallel.sharded import ShardedModel
from alignedserve.ranks.degrees import Degrees, RankPlace
from alignedserve.testing.models import draw_weights
from alignedserve.testing.reference import greedy, load_reference, random_prompts
from support.ranks import generated_by_ranks

VOCAB_SIZE = 203
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 48,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
}
PRECISE = {  # of a model in bf16, in fp32
    "ernie4_5_moe": ("mlp.gate.weight", "moe_statics"),
    "glm4_moe": ("e_score_correction_bias",),
    "hunyuan_v1_moe": ("mlp.gate.wg.weight",),
}


def write(folder: Path, model_type: str, dtype: torch.dtype = torch.float32, **shape: Any) -> Path:
    config = AutoConfig.for_model(model_type, **shape)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw_weights(model, seed=61, std=0.15)
    model.config.dtype = dtype
    model.to(dtype).save_pretrained(folder)
    return folder


def check_generated(degrees: Degrees, folders: list[Path], scratch: Path) -> None:
    """Ranks generate what `transformers` does."""
    prompts = random_prompts((19, 5), VOCAB_SIZE, seed=62)
    found = generated_by_ranks(degrees, folders, prompts, 12, scratch)
    for folder in folders:
        reference = load_reference(folder)
        for prompt, answer in zip(prompts, found[folder.name], strict=True):
            assert answer == greedy(reference, prompt, 12, answer), folder.name


@pytest.mark.parametrize("degrees", [Degrees(2), Degrees(1, 2), Degrees(experts=2)])
@pytest.mark.parametrize("model_type", PRECISE)
def test_what_one_process_keeps_in_fp32_ranks_keep_too(model_type: str, degrees: Degrees, tmp_path: Path) -> None:
    folder = write(tmp_path, model_type, torch.bfloat16, **SHAPE, **EXPERTS)
    info = inspect_model(model_type, folder, "bfloat16", "cpu")
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    expected = {name: each.dtype for name, each in [*whole.named_parameters(), *whole.named_buffers()]}
    precise = [name for name in expected if any(word in name for word in PRECISE[model_type])]
    assert precise
    assert {expected[name] for name in precise} == {torch.float32}
    for rank in range(2):
        part = ShardedModel(info, RankPlace(rank, degrees), torch.device("cpu")).model
        found = {name: each.dtype for name, each in [*part.named_parameters(), *part.named_buffers()]}
        assert found == {name: expected[name] for name in found}
        assert {"embed" in name for name in found} == ({True, False} if degrees.stages == 1 or rank == 0 else {False})


def test_ranks_do_not_choose_a_kernel_for_what_all_of_them_compute(tmp_path: Path) -> None:
    """Each measures by itself, and experts are chosen by the last bit."""
    folder = write(tmp_path, "hunyuan_v1_moe", **SHAPE, **EXPERTS)
    info = inspect_model("hunyuan_v1_moe", folder, "float32", "cpu")
    part = ShardedModel(info, RankPlace(0, Degrees(2)), torch.device("cpu"))
    routers = [name for name, each in part.model.named_modules() if each in part.shared]
    assert routers == [f"model.layers.{layer}.mlp.gate.wg" for layer in range(3)]
    every = {(each.weight.shape, each.weight.dtype): True for each in part.model.modules() if hasattr(each, "weight")}
    assert pack_linears(part.model, every, part.shared) > 0
    for name, module in part.model.named_modules():
        assert isinstance(module, PackedLinear) != (name in routers) or not hasattr(module, "in_features"), name


@pytest.mark.parametrize(
    "degrees", [Degrees(2), *(pytest.param(each, marks=pytest.mark.slow) for each in (Degrees(4), Degrees(1, 2)))]
)
def test_a_language_model_within_another_and_norms_of_each_head(degrees: Degrees, tmp_path: Path) -> None:
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 28
    }  # fmt: skip
    folders = [
        write(
            tmp_path / "gemma3", "gemma3", text_config={**SHAPE, "query_pre_attn_scalar": 16, "sliding_window": 24},
            vision_config=vision,
        ),
        write(tmp_path / "cohere", "cohere", **SHAPE, use_qk_norm=True),
    ]  # fmt: skip
    check_generated(degrees, folders, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [Degrees(experts=2), Degrees(2), Degrees(1, 2)])
def test_mixtures_with_precise_routers_give_the_same_tokens(degrees: Degrees, tmp_path: Path) -> None:
    folders = [write(tmp_path / model_type, model_type, **SHAPE, **EXPERTS) for model_type in PRECISE]
    check_generated(degrees, folders, tmp_path)
