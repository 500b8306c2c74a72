"""Generates the configuration page: every section and key, from the configuration classes."""

from __future__ import annotations

from dataclasses import Field, fields
from functools import cache
from typing import Any, get_type_hints

from markdown_text import NOTICE, code, plain, table

from alignedserve.cluster.cli.main import SERVE_FLAGS, SERVE_SWITCHES
from alignedserve.config import SECTIONS
from alignedserve.config_sources import ENV_PREFIX, known_keys

ABOUT = {
    "model": "The model.",
    "cluster": "Number and placement of instances.",
    "kv_pool": "The host-memory KV pool.",
    "prefill": "Prefill instances, and the candidate buffers in their memory.",
    "decode": "Decode instances.",
    "scheduler": "Batches and admission.",
    "gateway": "HTTP, gRPC, limits and draining.",
    "supervisor": "Starting, watching and replacing processes.",
    "engine": "Computing the model.",
    "traces": "OpenTelemetry traces; [which variables](../operations/traces.md) say where they go.",
    "log": "Logs.",
}
HEAD = f"""\
# Configuration

{NOTICE}

Later sources win:

1. the defaults below,
2. a YAML file of sections and keys (`--config FILE`; under Ray Serve the `args` of the application),
3. the environment: `{ENV_PREFIX}SECTION__KEY`, for example `{ENV_PREFIX}SCHEDULER__POLICY=fcfs`,
4. flags: `--set SECTION.KEY=VALUE` for every key, and the short flags listed below.

```yaml
model:
  path: ./my-model
cluster:
  decode: 2
```

An unknown key, a value of the wrong type, or a value outside its limits is an error at the start. The error names the
key, its source and, for an unknown key, the nearest known key. `alignedserve config` prints the resulting
configuration, each key with its meaning.
"""


@cache
def described() -> frozenset[str]:
    return frozenset(known_keys())


def page() -> str:
    lines = [HEAD]
    for name, make in SECTIONS.items():
        hints = get_type_hints(make)
        lines += [f"## {name}", "", ABOUT.get(name, ""), ""]
        lines += table(
            ("key", "default", "values", "meaning"),
            (_row(name, key, hints[key.name]) for key in fields(make())),
        )
    return "\n".join(lines)


def _row(section: str, key: Field[Any], kind: type) -> tuple[str, str, str, str]:
    name = f"{section}.{key.name}"
    flag = _flag(name)
    meaning = plain(key.metadata["doc"]) + (f" ({code(flag)})" if flag else "")
    return f'<span id="{name}"></span>{code(key.name)}', _default(key.default), _values(key, kind), meaning


def _default(value: Any) -> str:
    if isinstance(value, bool):
        return code(str(value).lower())
    return code(f"{value:g}" if isinstance(value, float) else str(value)) if value != "" else "empty"


def _values(key: Field[Any], kind: type) -> str:
    """The choices, or the type and its limits."""
    if choices := key.metadata["choices"]:
        return ", ".join(map(code, choices))
    if kind is bool:
        return "`true`, `false`"
    word = {int: "whole number", float: "number", str: "text"}[kind]
    low, high = key.metadata["low"], key.metadata["high"]
    if low is None and high is None:
        return word
    if high is None:
        return f"{word}, at least {low:,.10g}"
    return f"{word}, {low:,.10g} to {high:,.10g}"


def _flag(name: str) -> str:
    """The short flag that sets a key; empty if there is none."""
    for flag, (key, _) in SERVE_FLAGS.items():
        if key == name:
            return flag
    return next((flag for flag, (key, _, _) in SERVE_SWITCHES.items() if key == name), "")
