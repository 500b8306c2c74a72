"""Traces that are described in a word instead of a file: `mix:short=0.95,requests=2000`."""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace
from typing import Any, TypeVar

from alignedserve.errors import ConfigError
from alignedserve.simulator.traces.fields import MAX_TOKENS

MOST_REQUESTS = 10_000_000
Made = TypeVar("Made")


def is_of(prefix: str, source: str) -> bool:
    return source.startswith(prefix) or source == prefix.rstrip(":")


def parsed(default: Made, prefix: str, source: str) -> Made:
    """`default` with the values that `source` gives, as numbers. Raises ConfigError for other keys and texts."""
    known = {entry.name: type(getattr(default, entry.name)) for entry in fields(default) if entry.init}  # type: ignore[arg-type]
    given: dict[str, Any] = {}
    for part in filter(None, source.removeprefix(prefix).removeprefix(prefix.rstrip(":")).split(",")):
        name, _, text = part.partition("=")
        if name not in known:
            raise ConfigError(f"{source}: unknown key {name!r}; the keys are {', '.join(known)}")
        try:
            given[name] = known[name](text)
        except ValueError:
            wanted = "a number" if known[name] is float else "a whole number, such as 1000"
            raise ConfigError(f"{source}: {name}={text!r} is not {wanted}") from None
    return replace(default, **given)  # type: ignore[type-var]


def check_range(source: str, made: object, *names: str) -> None:
    """Raises ConfigError unless `NAME_min` and `NAME_max` are token counts, the first no more than the second."""
    for name in names:
        low, high = getattr(made, f"{name}_min"), getattr(made, f"{name}_max")
        if not 1 <= low <= high:
            raise ConfigError(f"{source}: {name}_min ({low}) must be at least 1, {name}_max ({high}) no less")
        if high >= MAX_TOKENS:
            raise ConfigError(f"{source}: {name}_max must be less than {MAX_TOKENS} tokens")


def described(made: object, prefix: str, without: tuple[str, ...] = ()) -> dict[str, object]:
    """Source, format and hash of a trace with these values."""
    name = prefix.rstrip(":")
    keys = {each.name: getattr(made, each.name) for each in fields(made) if each.init and each.name not in without}  # type: ignore[arg-type]
    spec = prefix + ",".join(f"{key}={value}" for key, value in keys.items())
    return {"source": spec, "format": name, "sha256": hashlib.sha256(spec.encode()).hexdigest(), name: keys}
