"""`alignedserve explain REQUEST_ID`: where a request's time went, in words, and what would help."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from alignedserve.cluster.cli.operate import add_url, admin_headers
from alignedserve.cluster.cli.status_command import ask_newest, table
from alignedserve.cluster.records import fetch_json
from alignedserve.errors import NotFoundError, UnavailableError

ANSWERS_WITHIN_S = 5.0
WIDTH = 40  # of a bar, in characters
COLUMNS = ("stage", "where", "from", "seconds", "")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request_id", help="the `id` of its answer, or of a chunk of its stream")
    add_url(parser, "newest")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")


def run(given: argparse.Namespace) -> int:
    """Raises NotFoundError if no gateway knows the request, UnavailableError if the cluster has no live page, and the
    errors of `fetch_json`.
    """
    path = f"/dashboard/requests?id={quote(given.request_id, safe='')}"  # an unknown request is no 404 there

    def fetch(url: str, *, api_key: str) -> dict[str, Any]:
        return fetch_json(url.rstrip("/") + path, ANSWERS_WITHIN_S, api_key=api_key, headers=admin_headers(url))

    url, answer = ask_newest(given.url, given.api_key_file, fetch)
    if isinstance(error := answer.get("error"), dict):
        off = error.get("code") == NotFoundError.code
        raise UnavailableError(f"{url} has no live page (gateway.dashboard)" if off else str(error.get("message")))
    if not given.request_id or not answer["requests"]:
        message = f"request {given.request_id[:200]!r} is not open, and not among those that ended of late"
        raise NotFoundError(message)
    (found,) = answer["requests"]
    if given.json:
        json.dump(found, sys.stdout)
        sys.stdout.write("\n")
        return 0
    for request in (found, *found["others"]):
        print("\n".join(described(request)))
    return 0


def described(request: Mapping[str, Any]) -> list[str]:
    """The lines for one request: what happened, a bar for each stage, and advice."""
    read = request["input_tokens"] is not None
    tokens = f"{request['input_tokens']} + {request['output_tokens']} tokens" if read else "not read"
    lines = [f"{request['request_id']}: {tokens}"]
    lines += [f"  {sentence}" for sentence in request["explanation"]]
    whole_s = max(request["took_s"], 1e-9)
    rows = []
    for bar in request["timeline"]:
        begin_s, end_s = bar["begin_s"], bar["end_s"]
        begin, end = (round(WIDTH * at_s / whole_s) for at_s in (begin_s, end_s))
        drawn = " " * begin + "█" * max(1, end - begin)
        rows.append([bar["stage"], bar["where"], f"{begin_s:.3f}", f"{end_s - begin_s:.3f}", drawn])
    lines += [f"  {line}" for line in table(COLUMNS, rows)] if rows else []
    return lines + [f"  What would help: {advice}" for advice in request["advice"]]
