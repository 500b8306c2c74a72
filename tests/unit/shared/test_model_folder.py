"""What is known of a model before any heavy import: its files, its settings, its refusal."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from alignedserve.cluster.launch.preflight import check_ranks, model_note
from alignedserve.config_sources import from_arguments
from alignedserve.errors import ConfigError, ModelError, UnsupportedModelError
from alignedserve.model import resolve_model, unserved_generation_keys


@pytest.mark.parametrize(
    ("generation", "keys"),
    [
        ({"temperature": 0.6, "no_repeat_ngram_size": 3, "num_beams": 1, "suppress_tokens": [5]}, []),
        ({"num_beams": 3, "sequence_bias": [[[5], 1.0]]}, ["num_beams", "sequence_bias"]),
        ({"typical_p": 0.9, "eta_cutoff": None}, ["typical_p"]),
        ({"min_new_tokens": 4, "guidance_scale": 1.5}, ["guidance_scale"]),
    ],
)
def test_wishes_that_are_not_followed_are_named(generation: dict[str, Any], keys: list[str], tmp_path: Path) -> None:
    assert unserved_generation_keys(generation) == keys
    (tmp_path / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    note = model_note(tmp_path)
    assert all(key in note for key in keys)
    assert bool(note) == bool(keys)


def test_a_folder_without_wishes_or_with_broken_ones_has_no_note(tmp_path: Path) -> None:
    assert model_note(tmp_path) == ""
    (tmp_path / "generation_config.json").write_text("[1", encoding="utf-8")
    assert model_note(tmp_path) == ""


@pytest.mark.parametrize("trusted", [False, True])
def test_of_a_name_on_a_hub_code_is_fetched_only_where_it_is_trusted(
    trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("org/name", trusted) == tmp_path
    assert asked["name"] == "org/name"
    assert ("*.py" in asked["allow_patterns"]) is trusted
    assert "*.bin" not in asked["allow_patterns"]
    assert "consolidated*" in asked["ignore_patterns"]


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(name: str, **options: Any) -> str:
        raise OSError("no route to host\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelError, match=r"cannot be downloaded: no route to host$"):
        resolve_model("org/name")


@pytest.mark.parametrize(
    ("model_type", "degrees", "refused"),
    [
        ("stablelm", {"decode": {"tensor_parallel": 2}}, True),
        ("stablelm", {"decode": {"pipeline_parallel": 2}}, False),
        ("opt", {"prefill": {"tensor_parallel": 2}}, False),
        ("llama", {"cluster": {"tensor_parallel": 2}}, False),
    ],
)
def test_a_model_without_a_plan_is_shared_by_layers_only(
    model_type: str, degrees: dict[str, Any], refused: bool, tmp_path: Path
) -> None:
    """Told before anything starts."""
    shape = {"num_attention_heads": 4, "num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 99}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **shape}))
    config = from_arguments({"model": {"path": str(tmp_path)}, **degrees})
    with pytest.raises(UnsupportedModelError, match=r"stablelm.*--decode-pp") if refused else nullcontext():
        check_ranks(config, tmp_path)


@pytest.mark.parametrize(
    ("shape", "degrees", "refused"),
    [
        (
            {"model_type": "granite", "num_hidden_layers": 4},
            {"prefill": {"pipeline_parallel": 5}},
            "4 layers: 5 stages",
        ),
        ({"model_type": "granite", "num_hidden_layers": 4}, {"prefill": {"pipeline_parallel": 4}}, ""),
        ({"model_type": "qwen2_moe", "num_experts": 60}, {"decode": {"expert_parallel": 7}}, "60 experts: 7 ranks"),
        ({"model_type": "qwen2_moe"}, {"decode": {"expert_parallel": 7}}, "60 experts"),  # the default of its class
        ({"model_type": "glm4_moe", "n_routed_experts": 6}, {"decode": {"expert_parallel": 4}}, "6 experts"),
        ({"model_type": "granitemoe", "num_local_experts": 6}, {"decode": {"expert_parallel": 3}}, ""),
        ({"model_type": "cohere"}, {"decode": {"expert_parallel": 2}}, "has no experts"),
        ({"model_type": "cohere", "num_attention_heads": 6}, {"decode": {"tensor_parallel": 4}}, "6 query heads"),
        (
            {"model_type": "own", "num_hidden_layers": 2, "auto_map": {}},
            {"decode": {"pipeline_parallel": 3}},
            "2 layers",
        ),
        ({"model_type": "own", "auto_map": {}}, {"cluster": {"tensor_parallel": 3}}, ""),  # not known here
        ({"model_type": "gpt_bigcode"}, {"decode": {"tensor_parallel": 2}}, ""),
        ({"model_type": "gpt_bigcode", "multi_query": False}, {"decode": {"pipeline_parallel": 2}}, ""),
        (
            {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 2}},
            {"decode": {"pipeline_parallel": 3}},
            "2 layers",
        ),
    ],
)
def test_degrees_of_any_model_type_are_checked_before_anything_starts(
    shape: dict[str, Any], degrees: dict[str, Any], refused: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = from_arguments({"model": {"path": str(tmp_path)}, **degrees})
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        check_ranks(config, tmp_path)


def test_packed_products_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_bigcode", "multi_query": False}))
    config = from_arguments({"model": {"path": str(tmp_path)}, "prefill": {"tensor_parallel": 2}})
    with pytest.raises(UnsupportedModelError, match=r"gpt_bigcode.*head by head.*--prefill-pp"):
        check_ranks(config, tmp_path)


def test_the_plan_of_the_language_model_within_another_counts(tmp_path: Path) -> None:
    shape = {"model_type": "moss_transcribe_diarize", "text_config": {"model_type": "qwen3", "num_attention_heads": 4}}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    check_ranks(from_arguments({"model": {"path": str(tmp_path)}, "cluster": {"tensor_parallel": 2}}), tmp_path)
