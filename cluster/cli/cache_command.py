"""`alignedserve cache pin|list|drop`: orders to a running cluster about its prefix caches, sent to its gateway."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alignedserve.cluster.cli.operate import add_url, find_cluster
from alignedserve.cluster.cli.status_command import table
from alignedserve.errors import ConfigError, NotFoundError

PINNED_WITHIN_S = 600.0
DROPPED_WITHIN_S = 130.0  # two tries of the gateway
MIB = 1 << 20
FIELDS = ("name", "text", "messages", "tools", "chat_template_kwargs", "cache_salt")


def add_options(parser: argparse.ArgumentParser) -> None:
    orders = parser.add_subparsers(dest="order", metavar="ORDER", required=True)
    pin = orders.add_parser("pin", help="compute a prompt's beginning once, and keep it until it is dropped")
    pin.add_argument("name", nargs="?", help="the pin's name (not with --file)")
    meaning = "JSON objects with name, and text or messages, one a line; --tools and --cache-salt are for lines without"
    pin.add_argument("--file", metavar="FILE", help=meaning)
    pin.add_argument("--node", help="only in the shard of this node (default: in every shard)")
    pin.add_argument("--timeout", type=float, default=PINNED_WITHIN_S, metavar="S", help="maximum wait for each pin")
    _add_beginning(pin)
    found = orders.add_parser("list", help="list pins and sessions, and what the caches have")
    found.add_argument("--json", action="store_true", help="print JSON and nothing else")
    found.add_argument("--sessions", type=int, default=20, metavar="N", help="sessions of each shard (default 20)")
    drop = orders.add_parser("drop", help="end a pin, or remove what is cached")
    drop.add_argument("name", nargs="?", help="the pin's name")
    meaning = "remove everything that is cached of a beginning (--text, --messages) or of a salt (--cache-salt)"
    drop.add_argument("--all", action="store_true", help=meaning)
    _add_beginning(drop)
    for one in (pin, found, drop):
        add_url(one)


def run(given: argparse.Namespace) -> int:
    """Raises AlignedServeError with the cluster's reason if it refuses, ConfigError for unusable arguments."""
    if given.order == "pin":
        return pin(given)
    return show(given) if given.order == "list" else drop(given)


def pin(given: argparse.Namespace) -> int:
    """Pin one beginning, or all of a file in turn. Prints what each takes up."""
    if given.file is not None:
        if given.name or given.text is not None or given.messages is not None:
            raise ConfigError("--file has names and beginnings: give no others")
        shared = _beginning(given, needed=False)  # what a line does not say itself
        bodies = [{**shared, **one} for one in _of_file(given.file)]
    else:
        if not given.name:
            raise ConfigError("give the pin a name, or --file FILE")
        bodies = [{"name": given.name, **_beginning(given)}]
    cluster = find_cluster(given.url, given.api_key_file)
    for body in bodies:
        node = {"node": given.node} if given.node else {}
        done = cluster.order("cache/pin", {**body, **node}, timeout_s=given.timeout)
        for shard in done["shards"]:
            size = f"{shard['tokens']} tokens, {shard['blocks']} blocks, {shard['bytes'] / MIB:.1f} MiB"
            print(f"{done['name']}: {shard['shard']} holds {size}", flush=True)
    return 0


def show(given: argparse.Namespace) -> int:
    cluster = find_cluster(given.url, given.api_key_file)
    found = cluster.order("cache/list", {"sessions": given.sessions})
    if given.json:
        json.dump(found, sys.stdout)
        sys.stdout.write("\n")
        return 0
    for line in described(found["shards"]):
        print(line)
    return 0


def described(shards: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of `list`."""
    lines, rows = [], []
    for shard in shards:
        blocks, size = shard["blocks"], shard["block_bytes"]
        queried = shard["queried_tokens"]
        rate = f"{shard['hit_tokens'] / queried:.1%} of {queried} prompt tokens" if queried else "no prompts yet"
        counts = ", ".join(f"{name} {blocks[name]} ({blocks[name] * size / MIB:.1f} MiB)" for name in blocks)
        lines.append(f"{shard['shard']}: blocks: {counts}; found: {rate}; {shard['session_count']} sessions")
        for kind in ("pins", "sessions"):
            rows += [[shard["shard"], kind[:-1], *_cells(entry)] for entry in shard[kind]]
    header = ("shard", "kind", "name", "tokens", "blocks", "MiB", "hits", "last use", "ending")
    return [*lines, *(table(header, rows) if rows else [])]


def _cells(entry: Mapping[str, Any]) -> list[str]:
    idle = "never" if entry["idle_s"] is None else f"{entry['idle_s']:.0f} s ago"
    ending = entry.get("ending", "")
    if entry.get("expected_s"):
        ending += f", back after {entry['expected_s']:.1f} s"
    name = entry["name"] or entry.get("request_id", "")
    return [
        "".join(each if each.isprintable() else "?" for each in name),  # clients name sessions; this is a terminal
        str(entry["tokens"]),
        str(entry["blocks"]),
        f"{entry['bytes'] / MIB:.1f}",
        str(entry["hits"]),
        idle,
        ending,
    ]


def drop(given: argparse.Namespace) -> int:
    """Raises NotFoundError if there is no pin of this name."""
    if given.all == bool(given.name):
        raise ConfigError("give the name of a pin, or --all with --text, --messages or --cache-salt")
    cluster = find_cluster(given.url, given.api_key_file)
    body = {**({"all": True} if given.all else {"name": given.name}), **_beginning(given, needed=False)}
    done = cluster.order("cache/drop", body, timeout_s=DROPPED_WITHIN_S)
    if given.name and not done["pins"]:
        raise NotFoundError(f"no shard has a pin named {given.name!r}; `alignedserve cache list` shows all")
    print(f"pins ended: {', '.join(done['pins']) or 'none'}; blocks removed: {done['blocks']}")
    return 0


# ---- beginnings


def _add_beginning(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", help="the beginning of prompts of /v1/completions; @FILE: a file's content")
    parser.add_argument("--messages", metavar="JSON", help="the first messages of chats; @FILE: a file's content")
    parser.add_argument("--tools", metavar="JSON", help="the tools of these chats; @FILE: a file's content")
    parser.add_argument("--cache-salt", metavar="SALT", help="the cache_salt of these prompts")


def _beginning(given: argparse.Namespace, *, needed: bool = True) -> dict[str, Any]:
    if given.text is not None and given.messages is not None:
        raise ConfigError("give --text or --messages, not both")
    if needed and given.text is None and given.messages is None:
        raise ConfigError("give --text or --messages: what is to be pinned")
    body: dict[str, Any] = {} if given.cache_salt is None else {"cache_salt": given.cache_salt}
    if given.text is not None:
        body["text"] = _content(given.text, "--text")
    for name in ("messages", "tools"):
        if (value := getattr(given, name)) is not None:
            try:
                body[name] = json.loads(_content(value, f"--{name}"))
            except ValueError as error:
                raise ConfigError(f"--{name} is not JSON: {error}") from error
    return body


def _content(value: str, flag: str) -> str:
    if not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag}: {value[1:]} cannot be read: {error}") from error


def _of_file(path: str) -> list[dict[str, Any]]:
    """Raises ConfigError, which names the line."""
    from alignedserve.gateway.pinning.keeper import read_beginnings

    return [one.model_dump(include=set(FIELDS), exclude_none=True) for one in read_beginnings(path)]
