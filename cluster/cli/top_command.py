"""`alignedserve top`: the live page's figures in a terminal, also over ssh; `--once --json` for scripts."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from alignedserve.cluster.cli.operate import add_url
from alignedserve.cluster.cli.status_command import ask_newest
from alignedserve.errors import AuthenticationError, UnavailableError

ANSWERS_WITHIN_S = 10.0
AGAIN_S = 1.0
STRIP = " ▁▂▃▄▅▆▇█"
MOST_EVENTS = 8
MOST_CHANNELS = 6
MOST_SLOWEST = 5

Json = dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    add_url(parser, "newest")
    parser.add_argument("--once", action="store_true", help="print one state, over the first two seconds, and end")
    parser.add_argument("--json", action="store_true", help="print states as JSON, one a line")


def run(given: argparse.Namespace) -> int:
    """Show states until Ctrl-C; with `--once` one. Raises AuthenticationError and UnavailableError."""

    def fetch(address: str, *, api_key: str) -> tuple[str, Iterator[Json]]:
        return api_key, feed(address, api_key=api_key)

    url, (api_key, states) = ask_newest(given.url, given.api_key_file, fetch)
    if given.once:
        states = iter([second(states)])
    if given.json:
        for state in states if given.once else lasting(url, api_key, states, _warn):
            print(json.dumps(state), flush=True)
        return 0
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    if given.once:
        console.print(screen(url, next(states)))
        return 0
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        for state in lasting(url, api_key, states, lambda text: live.update(Text(text), refresh=True)):
            live.update(screen(url, state), refresh=True)
    return 0


def feed(url: str, *, api_key: str = "", answers_within_s: float = ANSWERS_WITHIN_S) -> Iterator[Json]:
    """The states of the cluster, one each second. Raises UnavailableError, also when the stream ends."""
    request = urllib.request.Request(url.rstrip("/") + "/dashboard/feed")
    if api_key:
        request.add_header("authorization", f"Bearer {api_key}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        stream = opener.open(request, timeout=answers_within_s)
    except urllib.error.HTTPError as error:
        if error.code == AuthenticationError.http_status:
            raise AuthenticationError(f"{url} asks for an API key: give --api-key-file FILE") from error
        what = "has no live page (gateway.dashboard)" if error.code == 404 else _answer(error)
        raise UnavailableError(f"{url} {what}") from error
    except (OSError, http.client.HTTPException) as error:
        raise UnavailableError(f"{url} does not answer: {error}") from error
    return _states(url, stream)


def _answer(error: urllib.error.HTTPError) -> str:
    """Its status and, of a gateway, the reason."""
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        return f"answered with HTTP {error.code}: {json.loads(error.read())['error']['message']}"
    return f"answered with HTTP {error.code}"


def second(states: Iterator[Json]) -> Json:
    """The second state: rates need two."""
    next(states)
    return next(states)


def lasting(url: str, api_key: str, states: Iterator[Json], tell: Callable[[str], None]) -> Iterator[Json]:
    """The states for ever: a gateway may end, and HAProxy leads to another. `tell` gets what went wrong, once."""
    told = ""
    while True:
        try:
            for state in states:
                told = ""
                yield state
        except UnavailableError as error:
            if error.message != told:
                tell(f"{error.message}; trying again")
            told = error.message
        time.sleep(AGAIN_S)
        states = again(url, api_key)


def _warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def again(url: str, api_key: str) -> Iterator[Json]:
    """The feed of a cluster that may not answer yet, which it says when it is read."""
    yield from feed(url, api_key=api_key)


def _states(url: str, stream: Any) -> Iterator[Json]:
    try:
        with stream:
            for line in stream:
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
    except (OSError, http.client.HTTPException) as error:  # a gateway that is killed cuts its stream off
        raise UnavailableError(f"{url} does not answer any more: {error}") from error
    raise UnavailableError(f"{url} has ended the stream")


# ---- the screen


def screen(url: str, state: Json) -> Any:
    """A state, drawn with Rich."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [Text(line) for line in _head(url, state)]
    parts += [_waiting(state["waiting"]), _instances(state), _stores(state), _channels(state["channels"])]
    parts += [_slowest(state["slowest"]), _events(state["events"])]
    return Group(*(part for part in parts if part is not None))


def _head(url: str, state: Json) -> list[str]:
    health, rates, requests = state["health"], state["rates"], state["requests"]
    problems = [f"missing: {name}" for name in health["missing"]] + health["degraded"]
    problems += [f"stale: {state['stale']}"] if state.get("stale") else []
    ttft, itl = rates["ttft_s"] or {}, rates["itl_s"] or {}
    lines = [
        f"{url}  {state['model']}  {health['state']}" + (f"  ({'; '.join(problems)})" if problems else ""),
        f"requests/s {_number(rates['requests_per_s'])}  tokens/s {_number(rates['output_tokens_per_s'])}"
        f"  TTFT P50 {_ms(ttft.get('p50'))} P99 {_ms(ttft.get('p99'))}"
        f"  between tokens P50 {_ms(itl.get('p50'))} P99 {_ms(itl.get('p99'))}"
        f"  bubble {_share(rates['bubble_share'])}",
        "  ".join(f"{name.replace('_', ' ')} {_text(count)}" for name, count in requests.items()),
    ]
    if cache := state["prefix_cache"]:
        hits, looked = _share(cache["hit_share"]), _number(cache["queried_tokens_per_s"])
        lines.append(f"prefix cache: {hits} of {looked} prompt tokens/s found")
    return lines


def _waiting(rows: Sequence[Sequence[int]] | None) -> Any:
    from rich.text import Text

    if rows is None:
        return Text("what waits in the pool is not known")
    if not rows:
        return Text("nothing waits in the pool")
    strip = bars([count for _, _, count in rows])
    return Text(f"waiting by prefix length: {rows[0][0]} {strip} {rows[-1][1]} tokens")


def bars(counts: Sequence[int]) -> str:
    """A character for each count, as high as its share of the largest."""
    most = max(counts, default=0)
    return "".join(STRIP[-(-count * (len(STRIP) - 1) // most)] if most else " " for count in counts)


def _table(*columns: str) -> Any:
    from rich.table import Table

    return Table(*columns, box=None, pad_edge=False, header_style="bold")


def _instances(state: Json) -> Any:
    table = _table("instance", "state", "running", "lengths", "spread", "candidates", "iterations/s", "blocks in use")
    for one in state["decode"]:
        lengths, waiting = one["lengths"] or (), one["candidates"]
        running = "-" if one["lengths"] is None else f"{len(lengths)}/{one['max_running']}"
        spread = f"{lengths[-1] / max(1, lengths[0]):.1f} x" if lengths else ""
        switch = " (switch)" if one["switching"] else ""
        table.add_row(
            one["id"],
            one["state"],
            f"{running}{switch}",
            f"{lengths[0]} to {lengths[-1]}" if lengths else "",
            spread,
            " + ".join(_candidates(waiting[kind]) for kind in ("batch", "requests")) if waiting else "-",
            _number(one["iterations_per_s"]),
            _used(one["cache"]),
        )
    for one in state["prefill"]:
        used = ", ".join(_used(buffer) for buffer in one["buffers"])
        pending = f"{_text(one['pending_tokens'])} tokens"
        table.add_row(one["id"], one["state"], pending, "", "", "", _number(one["passes_per_s"]), used)
    return table


def _candidates(lengths: Sequence[int]) -> str:
    """How many wait in a candidate buffer, and their prefix lengths."""
    return f"{len(lengths)} ({min(lengths)} to {max(lengths)})" if lengths else "0"


def _stores(state: Json) -> Any:
    table = _table("shard", "state", "free", "owned", "cached", "blocks", "pinned", "on disk")
    for one in state["pool"]:
        disk = one["disk"]
        on_disk = f"{_text(disk['cached'])}/{disk['capacity']}" if disk else ""
        counts = [_text(one[name]) for name in ("free", "owned", "cached", "capacity", "pinned")]
        table.add_row(one["id"], one["state"], *counts, on_disk)
    return table


def _channels(channels: Sequence[Json]) -> Any:
    table = _table("channel", "from", "to", "MB/s", "busy")
    for one in channels[:MOST_CHANNELS]:
        rate = _number(one["bytes_per_s"] / 1e6)
        table.add_row(one["channel"], one["source"], one["destination"], rate, _share(one["busy_share"]))
    return table if channels else None


def _slowest(requests: Sequence[Json]) -> Any:
    table = _table("slowest of late", "took", "tokens", "where", "outcome")
    for one in requests[:MOST_SLOWEST]:
        tokens = f"{_text(one['input_tokens'])} + {one['output_tokens']}"
        where = " ".join(filter(None, (one["prefill_id"], one["decode_id"])))
        table.add_row(one["request_id"], _ms(one["took_s"]), tokens, where, one["outcome"])
    return table if requests else None


def _events(events: Sequence[Json]) -> Any:
    from rich.text import Text

    table = _table("event", "")
    for event in events[-MOST_EVENTS:]:
        table.add_row(time.strftime("%H:%M:%S", time.localtime(event["unix_s"])), Text(event["text"]))
    return table if events else None


def _used(blocks: Json) -> str:
    return f"{_text(blocks['owned'])}/{_text(blocks['capacity'])}"


def _text(value: int | None) -> str:
    return "-" if value is None else str(value)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
