"""`alignedserve status`: what runs, asked of a gateway over HTTP, without joining Ray."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from alignedserve.cluster.records import fetch_status, read_records
from alignedserve.errors import UnavailableError

COLUMNS = ("role", "id", "pid", "node", "address", "state", "holds")


def show_status(url: str | None, *, as_json: bool) -> int:
    """Print the roles of the cluster at `url`, or of this user's newest that answers. Raises UnavailableError."""
    where, status = _ask(url)
    roles = status.get("roles")
    if not isinstance(roles, list):
        raise UnavailableError(f"{where} does not say which roles run: it is not a gateway of AlignedServe")
    if as_json:
        json.dump({"roles": roles}, sys.stdout)
        sys.stdout.write("\n")
        return 0
    print(f"{where}: {status.get('state', 'unknown')}")
    for line in table(COLUMNS, [[str(role.get(column, "")) for column in COLUMNS] for role in roles]):
        print(line)
    for problem in (*status.get("missing", ()), *status.get("degraded", ())):
        print(f"not ready: {problem}")
    return 0


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Left-aligned columns."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]


def _ask(url: str | None) -> tuple[str, dict[str, Any]]:
    if url is not None:
        url = url if "://" in url else f"http://{url}"
        return url, fetch_status(url)
    records = read_records()
    problems = []
    for record in records:
        try:
            status = fetch_status(record.url)
        except UnavailableError as error:
            problems.append(error.message)
            continue
        return record.url, status
    if problems:
        raise UnavailableError(f"a cluster of this user runs, but does not answer: {problems[0]}")
    raise UnavailableError("no cluster of this user is running; start one with `alignedserve serve`, or give --url")
