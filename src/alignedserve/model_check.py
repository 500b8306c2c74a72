"""Refuses a model folder that cannot work, within milliseconds, from its text files and the headers of its weights.

Neither torch nor transformers is imported. A valid model is never refused: if a check would need more than that, the
folder passes, and the engine decides when it loads the weights and tries the model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alignedserve import transformers_source
from alignedserve.errors import ModelError, UnsupportedModelError
from alignedserve.model import check_model_folder
from alignedserve.weights.files import is_pointer, is_there, read_json, read_tensors, weight_files
from alignedserve.weights.shapes import check_shapes

_GENERATION = "generation_config.json"
_TOKENIZER, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_EDGE_BYTES = 64
_JSON_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", type(None): "null"}


def check_model_files(folder: Path, trust_remote_code: bool = False) -> None:
    """Raises ModelError, which names the file, if the folder is broken, and UnsupportedModelError for a model that is
    not supported."""
    config = _check_config(folder, trust_remote_code)
    if is_there(folder / _GENERATION):
        read_json(folder / _GENERATION)
    if is_there(folder / _TOKENIZER):
        _check_tokenizer(folder)
    tensors = read_tensors(weight_files(folder, config))
    if not _is_read_otherwise(config, trust_remote_code):
        check_shapes(folder, config, tensors)


def check_if_here(folder: Path, trust_remote_code: bool = False) -> None:
    """Like `check_model_files`, for the files that this machine has. Only other nodes may have the rest."""
    if not is_here(folder / "config.json"):
        return
    config = _check_config(folder, trust_remote_code)
    if not all(is_here(file) for pattern in ("*.json", "*.safetensors") for file in folder.glob(pattern)):
        return
    try:
        files = weight_files(folder, config)
    except ModelError:  # it has no weights
        return
    if all(is_there(file) for file in files):
        check_model_files(folder, trust_remote_code)


def is_here(file: Path) -> bool:
    """Whether this machine has the file, and may read it."""
    return is_there(file) and os.access(file, os.R_OK) and not is_pointer(file)


def _check_config(folder: Path, trust_remote_code: bool) -> dict[str, Any]:
    config = check_model_folder(folder)
    if not _is_read_otherwise(config, trust_remote_code):
        _check_model_type(folder, config)
        _check_types(folder, config)
    return config


def _is_read_otherwise(config: Mapping[str, Any], trust_remote_code: bool) -> bool:
    """Whether transformers builds the model from its own code or other files instead of this configuration."""
    return bool((trust_remote_code and config.get("auto_map")) or config.get("configuration_files"))


def _check_model_type(folder: Path, config: Mapping[str, Any]) -> None:
    model_type = config["model_type"]
    if not transformers_source.is_known(model_type):
        own = config.get("auto_map")
        way_out = (
            "the model's own code runs only with --trust-remote-code" if own else "correct it, or update transformers"
        )
        raise UnsupportedModelError(
            f"{folder / 'config.json'}: transformers {transformers_source.version()} does not know model_type "
            f"{model_type!r}; {way_out}"
        )
    reasons = {
        "transformers has no causal language model for it": not transformers_source.has_causal_lm(model_type),
        "its attention does not go through transformers' attention interface": not (
            transformers_source.uses_attention_interface(model_type)
        ),
        "it is an encoder-decoder": config.get("is_encoder_decoder") is True,
        f"its weights are quantised ({_quantisation(config)})": _quantisation(config),
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        raise UnsupportedModelError(f"model_type {model_type!r} is not supported: {reason} ({folder / 'config.json'})")


def _check_types(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelError for a value whose type transformers refuses."""
    source = transformers_source.config_source(config["model_type"])
    for key, types in (source.types if source else {}).items():
        if key in config and type(config[key]) not in (types | {int} if float in types else types):
            asked = " or ".join(sorted(_JSON_NAMES[kind] for kind in types))
            raise ModelError(f"{folder / 'config.json'}: {key} must be {asked}, not {config[key]!r:.60}; correct it")


def _quantisation(config: Mapping[str, Any]) -> str | None:
    found = config.get("quantization_config")
    return str(found.get("quant_method")) if isinstance(found, dict) and found else None


def _check_tokenizer(folder: Path) -> None:
    """Raises ModelError if `tokenizer.json` is truncated. It may have many MiB, so it is not parsed here."""
    file = folder / _TOKENIZER
    try:
        with file.open("rb") as stream:
            begin = stream.read(_EDGE_BYTES)
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - _EDGE_BYTES))
            end = stream.read()
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    if is_pointer(file) or begin.lstrip()[:1] != b"{" or end.rstrip()[-1:] != b"}":
        read_json(file)  # raises the exact error, or accepts a file that only looks broken
    if is_there(folder / _TOKENIZER_CONFIG):
        read_json(folder / _TOKENIZER_CONFIG)
