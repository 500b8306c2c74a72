"""Flags and keys of other servers for features that are missing here. They are refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alignedserve.errors import ConfigError, UnknownKeyError

REFUSED_FLAGS = {
    "--data-parallel-size": "data parallelism inside an instance (use --prefill and --decode)",
    "--enable-expert-parallel": "another name (use --decode-ep N)",
    "--enable-prefix-caching": "no flag (the prefix cache is on; see --no-prefix-cache)",
    "--no-enable-prefix-caching": "another name (use --no-prefix-cache)",
    "--disable-radix-cache": "another name (use --no-prefix-cache)",
    "--enable-lora": "LoRA adapters",
    "--lora-modules": "LoRA adapters",
    "--quantization": "quantised weights",
    "--kv-cache-dtype": "a quantised KV cache",
    "--speculative-config": "speculative decoding",
    "--speculative-model": "speculative decoding",
    "--guided-decoding-backend": "structured output",
    "--enable-auto-tool-choice": "no flag (tools work where the model has a format for them)",
    "--tool-call-parser": "another name (use --tool-parser)",
    "--limit-mm-per-prompt": "images, audio and video",
    "--api-key": "an API key on the command line, where every local user can read it (use --api-key-file)",
    "--swap-space": "swap space (kv_pool.size_gib is the pool in host memory)",
    "--cpu-offload-gb": "weights in host memory",
}


def refuse_unsupported(options: Mapping[str, Any]) -> None:
    """Raises ConfigError for the first given flag of a missing feature."""
    for flag, feature in REFUSED_FLAGS.items():
        if options.get(flag.removeprefix("--").replace("-", "_")) is not None:
            raise ConfigError(f"{flag} is not supported: it needs {feature}")


def explain_unknown_key(error: UnknownKeyError) -> ConfigError:
    """The same error, or an error that names the missing feature that the key asks for."""
    key = error.message.split("'")[1] if "'" in error.message else ""
    name = key.rpartition(".")[2].replace("-", "_")
    for flag, feature in REFUSED_FLAGS.items():
        if flag.removeprefix("--").replace("-", "_") == name:
            return ConfigError(f"configuration key {key!r} is not supported: it needs {feature}")
    return error
