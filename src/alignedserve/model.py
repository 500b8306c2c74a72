"""What every role must know of a model, and the checks that need no torch.

`--model` names the model that ships (`tiny`), a local folder, or `ORG/NAME` on a model hub.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from alignedserve.errors import ModelError, UnsupportedModelError
from alignedserve.geometry import KvGeometry
from alignedserve.weight_files import is_there, read_json

SHIPPED_MODELS = ("tiny",)

HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.bpe")
HUB_FILES_NOT_READ = ("*/*", "consolidated*")  # the same weights again, in other formats

# Keys of generation_config.json that change what `generate` writes and that no request here can ask for.
UNSERVED_GENERATION_KEYS = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "guidance_scale",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "num_beams",
    "sequence_bias",
    "suppress_tokens",
    "typical_p",
)
TOKEN_KEYS = ("forced_bos_token_id", "forced_eos_token_id")  # 0 and 1 are tokens, not "off"

# Their attention does not go through transformers' attention interface, or has a feature that no backend here has:
# run all the same, each gives wrong tokens without a word.
UNSUPPORTED_MODEL_TYPES = {
    "falcon": "its attention does not go through transformers' attention interface",
    "bloom": "its attention does not go through transformers' attention interface",
    "deepseek_v2": "its key heads are wider than its value heads",
    "deepseek_v3": "its key heads are wider than its value heads",
}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model's shape and limits. `eos_token_ids` are all its end tokens (config and generation_config).

    `heads` of queries, `hidden_size`, and `mlp_width`, of all experts of a token together, are for estimates of memory;
    0: not known.

    `generation_defaults` are generation_config's sampling values, which a request's own override.
    """

    name: str
    path: str
    model_type: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, float]
    weight_bytes: int
    heads: int = 0
    hidden_size: int = 0
    mlp_width: int = 0

    def geometry(self, block_size: int) -> KvGeometry:
        return KvGeometry(self.name, self.dtype, self.layers, self.kv_heads, self.head_dim, block_size)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ModelInfo:
        raw = json.loads(text)
        raw["eos_token_ids"] = tuple(raw["eos_token_ids"])
        return cls(**raw)


def resolve_model(model: str, trust_remote_code: bool = False) -> Path:
    """The local folder of `model`; of a name on a hub, safetensors, texts and trusted code are fetched.

    Raises ModelError where there is no such folder or the hub cannot be reached.
    """
    if model in SHIPPED_MODELS:
        return Path(str(resources.files("alignedserve"))) / "models" / model
    path = Path(model).expanduser()
    if os.path.isdir(path):  # False also where a folder above it may not be entered
        return path.resolve()
    looks_local = model.startswith((".", "/", "~")) or model.count("/") != 1
    if looks_local or os.path.exists(path):
        raise ModelError(
            f"model folder {model!r} does not exist (or is no folder, or none that you may enter); give a folder, "
            "ORG/NAME or 'tiny'"
        )
    from huggingface_hub import snapshot_download

    try:
        wanted = [*HUB_FILES, "*.py"] if trust_remote_code else list(HUB_FILES)
        return Path(snapshot_download(model, allow_patterns=wanted, ignore_patterns=list(HUB_FILES_NOT_READ)))
    except Exception as error:  # the hub client raises a dozen unrelated types
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"model {model!r} is no local folder and cannot be fetched from the hub: {reason}") from error


def unserved_generation_keys(generation: Mapping[str, Any]) -> list[str]:
    """Those of a generation_config.json that would change answers, and that are not applied here."""
    off: tuple[Any, ...] = (None, [], 0, 1, 1.0, {}, False)
    return [
        key
        for key in UNSERVED_GENERATION_KEYS
        if (generation.get(key) is not None if key in TOKEN_KEYS else generation.get(key) not in off)
    ]


def check_model_folder(path: Path) -> dict[str, Any]:
    """Read `config.json` and refuse what cannot be served, before anything heavy is started.

    Returns the parsed configuration. Raises ModelError for a missing or broken folder, UnsupportedModelError for an
    architecture that would give wrong tokens.
    """
    config = read_config(path)
    model_type = config["model_type"]
    if model_type in UNSUPPORTED_MODEL_TYPES:
        reason = UNSUPPORTED_MODEL_TYPES[model_type]
        raise UnsupportedModelError(f"model_type {model_type!r} is not supported: {reason}")
    if rotary := batch_dependent_rotary(config):
        raise UnsupportedModelError(f"model_type {model_type!r} is not supported: {rotary}")
    return config


def read_config(path: Path) -> dict[str, Any]:
    """The `config.json` of a model folder, which names a model_type. Raises ModelError where there is none."""
    config_file = path / "config.json"
    if not is_there(config_file):
        raise ModelError(f"{path} has no config.json: it is not a model folder")
    config = read_json(config_file)
    if not isinstance(config.get("model_type"), str):
        raise ModelError(
            f"{config_file} names no model_type, which says what the model is; give a folder as transformers' "
            "save_pretrained writes it"
        )
    return config


def batch_dependent_rotary(config: dict[str, Any]) -> str | None:
    """Why a model with such rotary embeddings is refused; None where a request's result is its own."""
    for kind in sorted(rotary_types(config)):
        if kind == "longrope" or "dynamic" in kind:
            return f"its rotary embedding ({kind!r}) depends on the longest position in the batch, on other requests"
    return None


def rotary_types(parameters: Any) -> set[str]:
    """Every `rope_type` in a configuration, which may hold one for each type of layer, at any depth."""
    if not isinstance(parameters, dict):
        return set()
    found: set[str] = set()
    for key, value in parameters.items():
        if key in ("rope_scaling", "rope_parameters") and isinstance(value, dict):
            found |= _named_types(value)
        else:
            found |= rotary_types(value)
    return found


def _named_types(parameters: dict[str, Any]) -> set[str]:
    kinds = {str(parameters[key]) for key in ("rope_type", "type") if parameters.get(key)}
    return kinds.union(*(_named_types(value) for value in parameters.values() if isinstance(value, dict)))
