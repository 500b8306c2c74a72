"""`alignedserve doctor --live`: the measured rates of a running cluster's channels, and a recount of its stores."""

from __future__ import annotations

import json
import sys
from typing import Any

from alignedserve.cluster.cli.status_command import ask_newest, table
from alignedserve.cluster.records import fetch_json, fetch_metrics
from alignedserve.control.samples import samples
from alignedserve.errors import UnavailableError

INTEGRITY_PATH = "/alignedserve/integrity"
TIMEOUT_S = 20.0
CHANNEL_HEADER = ("source", "destination", "channel", "copies", "failed", "bytes", "seconds", "GB/s")
_MOVED = {f"alignedserve_transfer_{what}_total": what for what in ("copies", "failed", "bytes", "busy_seconds")}
HEADER = ("", "store", "instance", "what was found")


def check_live(url: str | None, *, as_json: bool, api_key_file: str | None = None) -> int:
    """Print one line per channel and per store. Returns 0 if all stores and states are consistent, else 1.

    Raises UnavailableError if no gateway answers.
    """
    where, found = ask_newest(url, api_key_file, _fetch)
    books = found.get("books")
    if not isinstance(books, list):
        message = found.get("error", {}).get("message", "it is not a gateway of AlignedServe")
        raise UnavailableError(f"{where} did not check its stores: {message}")
    found["channels"] = busy_channels(fetch_metrics(where, TIMEOUT_S))
    if as_json:
        json.dump(found, sys.stdout)
        sys.stdout.write("\n")
    else:
        rows = [["WRONG" if b["problem"] else "sound", b["store"], b["instance"], _finding(b)] for b in books]
        moved = [[str(channel[column]) for column in CHANNEL_HEADER] for channel in found["channels"]]
        print("\n".join([f"{where}:", *table(CHANNEL_HEADER, moved), "", *table(HEADER, rows)]))
    return 1 if any(book["problem"] for book in books) else 0


def busy_channels(metrics: str) -> list[dict[str, Any]]:
    """Each channel of the cluster with its rate: bytes copied divided by the seconds in which it was copying."""
    found: dict[tuple[str, ...], dict[str, float]] = {}
    for sample in samples(metrics, *_MOVED):
        key = tuple(sample.labels[name] for name in ("source", "destination", "channel"))
        found.setdefault(key, {})[_MOVED[sample.name]] = sample.value
    return [
        {
            "source": source,
            "destination": destination,
            "channel": channel,
            "copies": int(sums.get("copies", 0)),
            "failed": int(sums.get("failed", 0)),
            "bytes": int(sums.get("bytes", 0)),
            "seconds": round(sums.get("busy_seconds", 0.0), 3),
            "GB/s": _gigabytes(sums.get("bytes", 0.0), sums.get("busy_seconds", 0.0)),
        }
        for (source, destination, channel), sums in sorted(found.items())
    ]


def _gigabytes(moved_bytes: float, busy_s: float) -> float | str:
    """GB per second; "" if the channel has copied nothing."""
    return float(f"{moved_bytes / busy_s / 1e9:.3g}") if moved_bytes and busy_s else ""


def _fetch(url: str, *, api_key: str) -> dict[str, Any]:
    return fetch_json(url.rstrip("/") + INTEGRITY_PATH, TIMEOUT_S, api_key=api_key)


def _finding(book: dict[str, Any]) -> str:
    if book["problem"]:
        return str(book["problem"])
    if "capacity_blocks" not in book:
        return "consistent"
    parts = " + ".join(f"{book[f'{state}_blocks']} {state}" for state in ("free", "owned", "cached"))
    return f"{book['capacity_blocks']} blocks = {parts}"
