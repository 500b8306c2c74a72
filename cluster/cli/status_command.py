"""`alignedserve status`: lists the processes of a cluster. It asks a gateway over HTTP, without joining Ray."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from alignedserve.cluster.records import Record, fetch_status, operator_key, read_records
from alignedserve.errors import AuthenticationError, ConfigError, UnavailableError

Answer = TypeVar("Answer")

COLUMNS = ("role", "id", "pid", "node", "address", "state", "holds")


def show_status(url: str | None, *, as_json: bool, api_key_file: str | None = None) -> int:
    """Print the processes of the cluster at `url`, or of this user's newest that answers. Raises UnavailableError."""
    where, status = ask_newest(url, api_key_file, fetch_status)
    roles = status.get("roles")
    if not isinstance(roles, list):
        raise UnavailableError(f"{where} does not list processes: it is not a gateway of AlignedServe")
    if as_json:
        json.dump(status, sys.stdout)
        sys.stdout.write("\n")
        return 0
    print(f"{where}: {status.get('state', 'unknown')}")
    for line in table(COLUMNS, [[str(role.get(column, "")) for column in COLUMNS] for role in roles]):
        print(line)
    if (restart := status.get("restart", {})).get("failure"):
        print(f"the rolling restart has stopped: {restart['failure']}")
    elif restart.get("doing"):
        print(f"a rolling restart is under way: {restart['doing']}")
    for problem in status.get("missing", ()):
        print(f"not ready: {problem}")
    for problem in status.get("degraded", ()):
        print(f"degraded: {problem}")
    return 0


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Left-aligned columns."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]


def ask_newest(
    url: str | None, api_key_file: str | None, fetch: Callable[..., Answer], *, only: bool = False
) -> tuple[str, Answer]:
    """A cluster's URL and the result of `fetch(url, api_key=…)`: of `url`, or of this user's newest that answers.

    With `only`, the URL must be given if this user runs several clusters. Raises AuthenticationError, ConfigError and
    UnavailableError.
    """
    records = read_records()
    if only and url is None and len(records) > 1:
        urls = ", ".join(record.url for record in records)
        raise ConfigError(f"several clusters of this user are running: choose one with --url ({urls})")
    if url is not None:
        url = url if "://" in url else f"http://{url}"
        return url, fetch(url, api_key=operator_key(api_key_file, record_of(url)))
    problems = []
    for record in records:
        try:
            return record.url, fetch(record.url, api_key=operator_key(api_key_file, record))
        except (UnavailableError, AuthenticationError) as error:
            problems.append(error)
    if problems:
        if isinstance(problems[0], AuthenticationError):
            raise problems[0]
        raise UnavailableError(f"a cluster of this user is running, but does not answer: {problems[0].message}")
    raise UnavailableError("no cluster of this user is running; start one with `alignedserve serve`, or give --url")


def record_of(url: str) -> Record | None:
    """The record of the cluster at `url`, if this user runs it."""
    return next((record for record in read_records() if same_url(record, url)), None)


def same_url(record: Record, url: str) -> bool:
    """Whether `url` is the URL of the record's cluster."""
    return record.url.rstrip("/") == url.rstrip("/").replace("//localhost", "//127.0.0.1")
