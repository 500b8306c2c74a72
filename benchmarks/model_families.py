"""Every causal language model of transformers, small and random: are its tokens right with several ranks?

Each family gets a model of three layers with random weights. What ranks generate greedily is compared with what
transformers generates, for each of the degrees (`tp`: tensor parallel, `pp`: stages, `ep`: ranks that share experts).
A family is refused, or right at a degree, or wrong; a wrong one ends the program with 1. Processes compute over Gloo.

    PYTHONPATH=tests python benchmarks/model_families.py --json families.json
    PYTHONPATH=tests python benchmarks/model_families.py llama granitemoe
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from alignedserve.engine.model.inspect import inspect_model
from alignedserve.errors import AlignedServeError
from alignedserve.ranks.degrees import Degrees
from alignedserve.testing.models import draw_weights
from alignedserve.testing.reference import greedy, load_reference
from support.ranks import generated_by_ranks

DEGREES = {
    "tp2": Degrees(2), "tp4": Degrees(4), "pp2": Degrees(1, 2), "tp2pp2": Degrees(2, 2), "ep2": Degrees(experts=2),
}  # fmt: skip
VOCABULARY = 203  # which no number of ranks divides
# Under all the names that families have for them.
SHAPE: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_key_value_groups", "multi_query_group_num"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 256),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    "head_dim": 16,
    "v_head_dim": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "rotary_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "sliding_window": 24,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": VOCABULARY - 1,
}
PROMPTS = [[(37 * at + 11 * number) % 200 + 1 for number in range(n)] for at, n in enumerate((31, 9, 18))]
TOKENS = 10
MOST_PARAMETERS = 30_000_000


class NotBuiltError(Exception):
    """No small model of this family could be made here."""


def small_config(kind: str) -> PretrainedConfig:
    text = AutoConfig.for_model(kind).get_text_config(decoder=True)
    if text.model_type != kind:
        raise NotBuiltError(f"its language model is {text.model_type}")
    known = {key: value for key, value in SHAPE.items() if hasattr(text, key) or key in text.attribute_map}
    if kinds := getattr(text, "layer_types", None):
        known["layer_types"] = (list(dict.fromkeys(kinds)) * 3)[:3]
    if kinds := getattr(text, "mlp_layer_types", None):
        known["mlp_layer_types"] = [*kinds[:1], *kinds[-2:]]
    config: PretrainedConfig = type(text)(**known)
    return config


def build(kind: str, folder: Path) -> None:
    """Raises NotBuiltError."""
    try:
        config = small_config(kind)
        with torch.device("meta"):
            size = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
        if size > MOST_PARAMETERS:
            raise ValueError(f"it still has {size} parameters")
        torch.manual_seed(5)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        draw_weights(model, seed=5, std=0.15)
        model.save_pretrained(folder)
    except NotBuiltError:
        raise
    except Exception as error:  # configurations refuse shapes in many ways
        raise NotBuiltError(f"{type(error).__name__}: {' '.join(str(error).split())[:150]}") from error


def tried(kind: str, folder: Path) -> dict[str, str]:
    """`ok`, `wrong` or the reason of a refusal, for each degree; or why the family was not tried at all."""
    model = folder / kind
    try:
        build(kind, model)
        inspect_model(kind, model, "float32", "cpu")
        reference = load_reference(model)
    except NotBuiltError as error:
        return {"not built": str(error)}
    except AlignedServeError as error:
        return {"refused": error.message}
    found = {}
    right = [greedy(reference, prompt, TOKENS) for prompt in PROMPTS]
    mixture = "experts" in (model / "config.json").read_text()
    for name, degrees in DEGREES.items():
        if degrees.experts > 1 and not mixture:
            continue
        (work := folder / f"{kind}-{name}").mkdir()
        try:
            answers = generated_by_ranks(degrees, [model], PROMPTS, TOKENS, work)[kind]
        except Exception as error:  # of a rank's process
            found[name] = " ".join(str(error).strip().splitlines()[-1].split())[:250]
        else:
            found[name] = "ok" if answers == right else "wrong"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="MODEL_TYPE", help="default: all that transformers has")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in given.kinds or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
            found[kind] = tried(kind, Path(folder))
            print(f"{kind}: {found[kind]}", flush=True)
    right = [kind for kind, each in found.items() if all(each.get(name) == "ok" for name in list(DEGREES)[:4])]
    print(f"right with tensor parallel ranks and stages: {len(right)}: {', '.join(right)}")
    shared = [kind for kind, each in found.items() if each.get("ep2") == "ok"]
    print(f"right with ranks that share experts: {len(shared)}: {', '.join(shared)}")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any("wrong" in each.values() for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
