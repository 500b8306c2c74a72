"""`alignedserve doctor --live`: every process of a running cluster recounts its stores and books."""

from __future__ import annotations

import json
import sys
from typing import Any

from alignedserve.cluster.records import fetch_json
from alignedserve.cluster.status_command import ask_newest, table
from alignedserve.errors import UnavailableError

INTEGRITY_PATH = "/alignedserve/integrity"
TIMEOUT_S = 20.0
HEADER = ("", "store", "instance", "what was found")


def check_live(url: str | None, *, as_json: bool, api_key_file: str | None = None) -> int:
    """One line a store; 0 where everything adds up, else 1. Raises UnavailableError where nobody can be asked."""
    where, found = ask_newest(url, api_key_file, _fetch)
    books = found.get("books")
    if not isinstance(books, list):
        message = found.get("error", {}).get("message", "it is not a gateway of AlignedServe")
        raise UnavailableError(f"{where} does not say whether its books add up: {message}")
    if as_json:
        json.dump(found, sys.stdout)
        sys.stdout.write("\n")
    else:
        rows = [["WRONG" if b["problem"] else "sound", b["store"], b["instance"], _finding(b)] for b in books]
        print("\n".join([f"{where}:", *table(HEADER, rows)]))
    return 1 if any(book["problem"] for book in books) else 0


def _fetch(url: str, *, api_key: str) -> dict[str, Any]:
    return fetch_json(url.rstrip("/") + INTEGRITY_PATH, TIMEOUT_S, api_key=api_key)


def _finding(book: dict[str, Any]) -> str:
    if book["problem"]:
        return str(book["problem"])
    if "capacity_blocks" not in book:
        return "adds up"
    parts = " + ".join(f"{book[f'{state}_blocks']} {state}" for state in ("free", "owned", "cached"))
    return f"{book['capacity_blocks']} blocks = {parts}"
