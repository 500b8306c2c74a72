"""What every role must know about a model, and the checks that need no torch.

`--model` names the shipped model (`tiny`), a local folder, or `ORG/NAME` on a model hub.
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
from alignedserve.weights.files import is_there, read_json

SHIPPED_MODELS = ("tiny",)

HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.bpe")
HUB_FILES_NOT_READ = ("*/*", "consolidated*")  # copies of the weights in other formats

# Keys of generation_config.json that change the output of `generate` and that a request here cannot set.
UNSERVED_GENERATION_KEYS = (
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "guidance_scale",
    "num_beams",
    "sequence_bias",
    "typical_p",
)

# Their attention does not go through transformers' attention interface, or needs a feature that no backend here has.
# Without a refusal, each would silently give wrong tokens.
UNSUPPORTED_MODEL_TYPES = {
    "falcon": "its attention does not go through transformers' attention interface",
    "bloom": "its attention does not go through transformers' attention interface",
    "deepseek_v2": "its key heads are wider than its value heads",
    "deepseek_v3": "its key heads are wider than its value heads",
}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model's shape and limits. `eos_token_ids` are all its end tokens (config and generation_config).

    `heads` (query heads), `hidden_size` and `mlp_width` (of all experts of a token together) are used to estimate
    memory; 0 means unknown. Of `weight_bytes`, `expert_bytes` are of all experts, and `tied_bytes` of an embedding that
    is the head, too. `weights` names what KV depends on beside the shape (`weights_identity`).
    `generation_defaults` are the sampling options of generation_config, which the values in a
    request override.
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
    generation_defaults: dict[str, Any]
    weight_bytes: int
    expert_bytes: int = 0
    tied_bytes: int = 0
    heads: int = 0
    hidden_size: int = 0
    mlp_width: int = 0
    weights: str = ""

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
    """The local folder of `model`. For a name on a hub, weights, text files and trusted code are downloaded.

    Raises ModelError if the folder does not exist or the hub cannot be reached.
    """
    if model in SHIPPED_MODELS:
        return Path(str(resources.files("alignedserve"))) / "models" / model
    path = Path(model).expanduser()
    if os.path.isdir(path):  # also False if a parent folder cannot be entered
        return path.resolve()
    looks_local = model.startswith((".", "/", "~")) or model.count("/") != 1
    if looks_local or os.path.exists(path):
        raise ModelError(
            f"model folder {model!r} does not exist, is not a folder, or cannot be entered; give a folder, ORG/NAME or "
            "'tiny'"
        )
    from huggingface_hub import snapshot_download

    try:
        wanted = [*HUB_FILES, "*.py"] if trust_remote_code else list(HUB_FILES)
        return Path(snapshot_download(model, allow_patterns=wanted, ignore_patterns=list(HUB_FILES_NOT_READ)))
    except Exception as error:  # the hub client raises a dozen unrelated types
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"model {model!r} is not a local folder and cannot be downloaded: {reason}") from error


def unserved_generation_keys(generation: Mapping[str, Any]) -> list[str]:
    """The keys of a generation_config.json that would change answers, but are not applied here."""
    off: tuple[Any, ...] = (None, [], 0, 1, 1.0, {}, False)
    return [key for key in UNSERVED_GENERATION_KEYS if generation.get(key) not in off]


def check_model_folder(path: Path) -> dict[str, Any]:
    """Read `config.json`, and refuse a model that cannot be served before any process is started.

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
    """The parsed `config.json` of a model folder. Raises ModelError if it is missing or has no model_type."""
    config_file = path / "config.json"
    if not is_there(config_file):
        raise ModelError(f"{path} is not a model folder: it has no config.json")
    config = read_json(config_file)
    if not isinstance(config.get("model_type"), str):
        raise ModelError(
            f"{config_file} has no model_type, which names the architecture; give a folder as transformers' "
            "save_pretrained writes it"
        )
    return config


def batch_dependent_rotary(config: dict[str, Any]) -> str | None:
    """Why the model's rotary embedding makes answers depend on other requests; None if it does not."""
    for kind in sorted(rotary_types(config)):
        if kind == "longrope" or "dynamic" in kind:
            return f"its rotary embedding ({kind!r}) depends on the longest position in the batch, so on other requests"
    return None


def rotary_types(parameters: Any) -> set[str]:
    """Every `rope_type` in a configuration, at any depth. There may be one for each type of layer."""
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
