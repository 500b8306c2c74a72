"""`--hardware FILE`: the simulated machine as TOML or JSON; every value has a default."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import get_type_hints

from alignedserve.errors import ConfigError
from alignedserve.simulator.hardware import Hardware

# For a cost model without hardware: an 8B model with grouped keys in bfloat16 on 96 GB.
FALLBACK = Hardware(kv_tokens=480_000, kv_bytes_per_token=131_072, pool_tokens=1_600_000)
_DOCS = {
    "kv_tokens": "KV capacity of a decode (or colocated) instance, in tokens",
    "kv_bytes_per_token": "bytes of KV of a token, all layers",
    "pool_tokens": "capacity of the host-memory KV pool of each node, in tokens",
    "block_size": "tokens in a block",
    "batch_buffer_share": "share of a prefill instance's memory for the candidate batch buffer",
    "requests_buffer_share": "share of a prefill instance's memory for the candidate request buffer",
    "pool_bandwidth": "bytes/s between the pool and an instance, each direction",
    "peer_bandwidth": "bytes/s between a prefill and a decode instance",
    "prefill_kv_tokens": "KV capacity of a prefill instance; 0: kv_tokens",
    "prefill_pool_bandwidth": "bytes/s between the pool and a prefill instance; 0: pool_bandwidth",
    "prefill_peer_bandwidth": "bytes/s of a prefill instance's link to its peers; 0: peer_bandwidth",
    "copy_latency_s": "latency of a copy before its first byte, in seconds",
    "nodes": "machines, each with its own shard of the pool; instance i is on node i modulo this number",
    "network_bandwidth": "bytes/s between one node and the others, each direction",
    "disk_tokens": "capacity of each node's disk for cached prefixes, in tokens; 0: not used",
    "disk_bandwidth": "bytes/s read from a node's disk",
    "disk_latency_s": "latency of a read from disk, in seconds",
    "collective_bandwidth": "bytes/s of one device's link in collectives and in the exchange of experts",
    "collective_latency_s": "latency of a collective, in seconds",
    "message_s": "duration of a control message, in seconds",
    "host_overhead_s": "seconds that an engine adds to every pass",
    "prefill_slowdown": "factor by which a prefill pass takes longer in a cluster than in the cost model",
    "prefill_slowdown_beside": "the same for a pass that begins while its machine's decode instance computes",
    "decode_slowdown": "factor by which a decode (or colocated) pass takes longer in a cluster",
    "decode_slowdown_beside": "the same for a pass that begins while its machine's prefill instance computes",
}
# Limits by key: far beyond any machine, but within what the stores' tables and a float can represent.
_MOST = {
    "nodes": 1024,
    "disk_latency_s": 3600,
    "block_size": 1 << 20,
    "batch_buffer_share": 1,
    "requests_buffer_share": 1,
    "copy_latency_s": 3600,
    "collective_latency_s": 3600,
    "message_s": 3600,
    "host_overhead_s": 3600,
    "prefill_slowdown": 1e6,
    "prefill_slowdown_beside": 1e6,
    "decode_slowdown": 1e6,
    "decode_slowdown_beside": 1e6,
}
_MOST_OF_ANY = 10**18
_MOST_BLOCKS = 1 << 24  # of one store: each is a table entry
_POSITIVE = (
    "kv_tokens",
    "kv_bytes_per_token",
    "pool_tokens",
    "block_size",
    "pool_bandwidth",
    "peer_bandwidth",
    "nodes",
    "network_bandwidth",
    "disk_bandwidth",
    "collective_bandwidth",
    "prefill_slowdown",
    "prefill_slowdown_beside",
    "decode_slowdown",
    "decode_slowdown_beside",
)


def default_hardware(of_cost_model: Mapping[str, float | int]) -> Hardware:
    """The hardware of a cost model; other values from `FALLBACK`.

    Their numbers of tokens are scaled to the same bytes if the KV of a token has another size.
    """
    names = {entry.name for entry in fields(Hardware)}
    known = {name: of_cost_model[name] for name in of_cost_model if name in names}
    if size := known.get("kv_bytes_per_token"):
        for name in ("kv_tokens", "pool_tokens"):
            known.setdefault(name, int(getattr(FALLBACK, name) * FALLBACK.kv_bytes_per_token // size))
    return with_values("the cost model", FALLBACK, known)


def read_hardware(file: str) -> Mapping[str, object]:
    """The values of a file, for `with_values`. Raises ConfigError that names the file."""
    path = Path(file).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the hardware file {file}: {getattr(error, 'strerror', error)}") from error
    try:
        raw = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
    except ValueError as error:  # of either parser; the message has line and column
        raise ConfigError(f"{file} is neither TOML nor JSON: {error}") from error
    except RecursionError:
        raise ConfigError(f"{file} is not a hardware file: it is nested too deeply") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{file} must be a mapping of keys to values")
    return raw


def template(hardware: Hardware, assumed: Collection[str] = ()) -> str:
    """A TOML file with these values, each with a comment that documents it. `assumed`: keys that are commented out."""
    lines = ["# Hardware of one cell. Omitted keys keep their defaults."]
    for entry in fields(Hardware):
        value = getattr(hardware, entry.name)
        shown = f"{value:_}" if isinstance(value, int) else repr(value)
        mark, why = ("# ", " (assumed: not known)") if entry.name in assumed else ("", "")
        lines.append(f"{mark}{entry.name} = {shown}  # {_DOCS[entry.name]}{why}")
    return "\n".join(lines) + "\n"


def _shown(value: object) -> str:
    return repr(value)[:40] if isinstance(value, str | int | float) else type(value).__name__


def with_values(origin: str, base: Hardware, raw: Mapping[str, object]) -> Hardware:
    """`base` with these values. Raises ConfigError that names `origin` and the key."""
    kinds = get_type_hints(Hardware)
    changes: dict[str, int | float] = {}
    for name, value in raw.items():
        if name not in kinds:
            raise ConfigError(f"{origin}: unknown key {name!r}; the keys are: {', '.join(kinds)}")
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or (isinstance(value, float) and math.isnan(value))
        ):
            raise ConfigError(f"{origin}: {name} must be a number, not {_shown(value)}")
        if value > (most := _MOST.get(name, _MOST_OF_ANY)):
            raise ConfigError(f"{origin}: {name} must be at most {most:,}")
        if value < 0 or (value == 0 and name in _POSITIVE):
            raise ConfigError(f"{origin}: {name} must be {'more than' if name in _POSITIVE else 'at least'} 0")
        if kinds[name] is int and not float(value).is_integer():
            raise ConfigError(f"{origin}: {name} must be a whole number, not {value!r}")
        changes[name] = kinds[name](value)
    hardware = replace(base, **changes)  # type: ignore[arg-type]  # by name, with their fields' types
    for role in ("prefill", "decode"):
        if getattr(hardware, f"{role}_slowdown_beside") < getattr(hardware, f"{role}_slowdown"):
            raise ConfigError(
                f"{origin}: {role}_slowdown_beside is below {role}_slowdown; set both: a neighbour speeds nothing up"
            )
    if hardware.batch_buffer_share + hardware.requests_buffer_share >= 1:
        raise ConfigError(f"{origin}: the shares of the two candidate buffers leave no memory for the prefill cache")
    for name in ("kv_tokens", "prefill_kv_tokens", "pool_tokens"):
        if getattr(hardware, name) // hardware.block_size > _MOST_BLOCKS:
            raise ConfigError(
                f"{origin}: {name} must be at most {_MOST_BLOCKS:,} blocks of {hardware.block_size} tokens"
            )
    return hardware
