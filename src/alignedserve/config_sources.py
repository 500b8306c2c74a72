"""Reads the configuration from a YAML file, the environment and flags. Unknown keys are refused."""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from alignedserve.config import SECTIONS, Config
from alignedserve.errors import ConfigError, UnknownKeyError

ENV_PREFIX = "ALIGNEDSERVE_"
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", re.ASCII)  # YAML 1.1 reads 1e-3 as a string

Tree = dict[str, dict[str, Any]]


def load(
    file: str | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    settings_of: Callable[[str], Mapping[str, Any]] | None = None,
) -> Config:
    """Merge the sources and build the configuration.

    `flags` maps "section.key" to a value; None means that the flag was not given. `settings_of` returns the keys that a
    policy fixes, by the policy's name. Raises ConfigError, which names the key and its source, also if a key
    contradicts the policy.
    """
    tree: Tree = {}
    if file:
        _merge_tree(tree, _read_yaml(file), file, _meant_in_yaml)
    _merge_environment(tree, os.environ if environ is None else environ)
    for name, value in (flags or {}).items():
        if value is not None:
            _put(tree, name, value, "a flag")
    if settings_of is not None:
        policy = tree.get("scheduler", {}).get("policy", Config().scheduler.policy)
        _fix(tree, policy, settings_of(policy))
    return from_tree(tree)


def from_tree(tree: Mapping[str, Mapping[str, Any]]) -> Config:
    """Build the configuration from nested plain values, as `to_tree` returns them. Raises ConfigError."""
    checked: Tree = {}
    _merge_tree(checked, tree, "the configuration")
    return Config(**{name: section(**checked.get(name, {})) for name, section in SECTIONS.items()})


def from_arguments(
    arguments: Mapping[str, Any], settings_of: Callable[[str], Mapping[str, Any]] | None = None
) -> Config:
    """Build the configuration from an application's arguments.

    They are sections with keys, as in YAML (`args:` of a Serve config), or `section.key` with a value or its text
    (`serve run … model.path=tiny`). `settings_of` is the same as in `load`. Raises ConfigError, which names the key.
    """
    tree: Tree = {}
    sections = {name: value for name, value in arguments.items() if "." not in str(name)}
    _merge_tree(tree, sections, "the application's arguments", _meant_in_yaml)
    for name, value in arguments.items():
        if "." in str(name):
            said = value_of(name, value, "the application's arguments") if isinstance(value, str) else value
            _put(tree, name, said, "the application's arguments")
    if settings_of is not None:
        policy = tree.get("scheduler", {}).get("policy", Config().scheduler.policy)
        _fix(tree, policy, settings_of(policy))
    return from_tree(tree)


def to_tree(config: Config) -> Tree:
    return asdict(config)


def to_yaml(config: Config, *, docs: bool = True) -> str:
    """The configuration as YAML; with `docs`, each key has its line of documentation."""
    lines = []
    for section in fields(config):
        lines.append(f"{section.name}:")
        value = getattr(config, section.name)
        for key in fields(value):
            text = yaml.safe_dump(getattr(value, key.name), default_flow_style=True).strip().removesuffix("...").strip()
            comment = f"  # {key.metadata['doc']}" if docs else ""
            lines.append(f"  {key.name}: {text}{comment}")
    return "\n".join(lines) + "\n"


def known_keys() -> list[str]:
    return [f"{name}.{key.name}" for name, section in SECTIONS.items() for key in fields(section())]


def _read_yaml(file: str) -> Mapping[str, Any]:
    try:
        raw = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read configuration file {file}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # not UTF-8, an invalid date, nested too deeply
        raise ConfigError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from error
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{file} must contain sections (model:, cluster:, …), not {type(raw).__name__}")
    return raw


def _meant_in_yaml(name: str, value: Any, origin: str) -> Any:
    """Reads a value as YAML 1.2 does: `1e-3` of a float key is a number, `off` of a choice key is a word."""
    if isinstance(value, bool) and _kind(name, origin) is str:
        word = "on" if value else "off"
        return word if word in _choices(name) else value
    if isinstance(value, str) and _EXPONENT.fullmatch(value) and _kind(name, origin) is float:
        return float(value)
    return value


def _merge_tree(
    tree: Tree,
    raw: Mapping[str, Any],
    origin: str,
    read: Callable[[str, Any, str], Any] = lambda name, value, origin: value,
) -> None:
    """Merges `raw` into `tree`. `read(key, value, origin)` converts a value for its key."""
    for section, keys in raw.items():
        if section not in SECTIONS:
            raise _unknown(str(section), list(SECTIONS), origin)
        if keys is None:
            continue
        if not isinstance(keys, Mapping):
            raise ConfigError(f"{section} in {origin} must contain keys, not {keys!r}")
        for key, value in keys.items():
            name = f"{section}.{key}"
            _put(tree, name, read(name, value, origin), origin)


def _fix(tree: Tree, policy: str, settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        section, _, key = name.partition(".")
        given = tree.get(section, {}).get(key, value)
        if given != value:
            raise ConfigError(
                f"policy {policy!r} needs {name} {value}, but it was set to {given}: remove one of the two settings"
            )
        _put(tree, name, value, f"policy {policy!r}")


def is_setting(variable: str) -> bool:
    """Whether an environment variable sets a configuration key."""
    return variable.startswith(ENV_PREFIX) and "__" in variable


def _merge_environment(tree: Tree, environ: Mapping[str, str]) -> None:
    for variable, text in sorted(environ.items()):
        if not is_setting(variable):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower().replace("__", ".", 1)
        _put(tree, name, value_of(name, text, variable), variable)


def value_of(name: str, text: str, origin: str) -> Any:
    """The value that `text` gives for the key `name`. Raises UnknownKeyError."""
    kind = _kind(name, origin)
    if kind is float:
        with contextlib.suppress(ValueError):
            return float(text)
    if text and kind is not str:  # a string such as 007 is kept as it is
        with contextlib.suppress(yaml.YAMLError, ValueError, RecursionError):
            return yaml.safe_load(text)
    return text


def _put(tree: Tree, name: str, value: Any, origin: str) -> None:
    section, _, key = name.partition(".")
    tree.setdefault(section, {})[key] = _typed(name, value, _kind(name, origin), origin)


def _kind(name: str, origin: str) -> type:
    """The type of a key. Raises UnknownKeyError."""
    if name not in known_keys():
        raise _unknown(name, known_keys(), origin)
    section, _, key = name.partition(".")
    kind: type = get_type_hints(SECTIONS[section])[key]
    return kind


def _choices(name: str) -> tuple[str, ...]:
    """The choices of a known key; empty if it has none."""
    choices: tuple[str, ...] = _metadata(name)["choices"]
    return choices


def _metadata(name: str) -> Mapping[str, Any]:
    """Documentation, choices and limits of a known key."""
    section, _, key = name.partition(".")
    return next(field.metadata for field in fields(SECTIONS[section]()) if field.name == key)


def _typed(name: str, value: Any, kind: type, origin: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # an int with hundreds of digits stays an int, and is refused
            value = float(value)
    if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if kind is bool and value in (0, 1):
        value = bool(value)
    if kind is str and value is None:
        value = ""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{name} must be {kind.__name__}, not {value!r} (from {origin}): {_metadata(name)['doc']}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} must be a finite number, not {value!r} (from {origin})")
    return value


def _unknown(name: str, known: list[str], origin: str) -> UnknownKeyError:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if not nearest and "." in name:
        last = {entry.rpartition(".")[2]: entry for entry in known}
        nearest = [last[match] for match in difflib.get_close_matches(name.rpartition(".")[2], last, n=1, cutoff=0.6)]
    hint = f"; the nearest is {nearest[0]!r}" if nearest else ""
    return UnknownKeyError(f"unknown configuration key {name!r} in {origin}{hint} (`alignedserve config` lists all)")
