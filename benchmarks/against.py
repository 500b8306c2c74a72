"""Two or more endpoints under the same load of a tool of another project, by turns; a page with tables and plots.

    pip install guidellm          # or aiperf
    python benchmarks/against.py --tokenizer MODEL --streams 1 4 16 --rounds 3 --out against \
        --endpoint ours=http://127.0.0.1:8000 --endpoint vllm=http://127.0.0.1:8001

Any server of OpenAI's API will do: ours, vLLM, SGLang, TGI, llama.cpp. In each round every endpoint gets each load
once, and the order turns from round to round, since a machine's speed drifts. `--endpoint NAME=URL` asks the server
for its model; `NAME=URL,MODEL` names it. `--key NAME=VARIABLE` takes an API key from a variable of the environment.
Results are written as they come to OUT/runs.jsonl, and a run with the same
options goes on with what lacks. OUT/index.html is the page. The first endpoint is what the others are compared with.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import shlex
import statistics
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from load_tools import FIGURES, TOOLS, Endpoint, Figures, Load, ToolError, run_load

from alignedserve.errors import ConfigError
from alignedserve.simulator.report import plots

PLOTTED = ("output_tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p99_ms")
ASK_S = 30.0
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #1b1b1b }
svg { max-width: 100%; height: auto } table { border-collapse: collapse } pre { white-space: pre-wrap }
td, th { padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: right }
td:first-child, th:first-child { text-align: left }
"""

Run = dict[str, Any]  # endpoint, tool, load, round, at, figures


def model_of(url: str, key: str) -> str:
    """The first model that a server has. Raises ToolError."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        asked = urllib.request.Request(f"{url}/v1/models", headers=headers)
        with urllib.request.urlopen(asked, timeout=ASK_S) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        words = f"{url}/v1/models does not tell a model ({error}); name one: --endpoint NAME={url},MODEL"
        raise ToolError(words) from error


def endpoints_of(options: argparse.Namespace) -> dict[str, Endpoint]:
    found: dict[str, Endpoint] = {}
    keys = keys_of(options.key)
    tokenizer = Path(options.tokenizer)
    named = str(tokenizer.resolve()) if tokenizer.is_dir() else options.tokenizer
    for given in options.endpoint:
        name, _, rest = given.partition("=")
        url, _, model = rest.partition(",")
        if not name or not url:
            raise ToolError(f"--endpoint is NAME=URL or NAME=URL,MODEL, not {given!r}")
        if name in found:
            raise ToolError(f"two endpoints are named {name!r}")
        url = url.rstrip("/").removesuffix("/v1")
        key = keys.pop(name, "")
        found[name] = Endpoint(url, model or model_of(url, key), named, key)
    if keys:
        raise ToolError(f"--key names no endpoint: {', '.join(keys)}")
    return found


def keys_of(given: Sequence[str]) -> dict[str, str]:
    """The keys by the endpoints' names."""
    keys = {}
    for one in given:
        name, _, variable = one.partition("=")
        if not variable or not os.environ.get(variable):
            raise ToolError(f"--key is NAME=VARIABLE, where VARIABLE of the environment has the key, not {one!r}")
        keys[name] = os.environ[variable]
    return keys


def shown(to: Endpoint) -> dict[str, str]:
    """An endpoint without its key."""
    return {name: value for name, value in asdict(to).items() if name != "key"}


def known_runs(file: Path) -> list[Run]:
    """What an earlier start has written; a line that it could not finish is removed from the file."""
    if not file.exists():
        return []
    whole = [line for line in file.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    file.write_text("".join(whole), encoding="utf-8")
    return [json.loads(line) for line in whole]


def key_of(run: Run) -> str:
    return json.dumps([run["endpoint"], run["to"], run["tool"], run["load"], run["round"]], sort_keys=True)


def measure(options: argparse.Namespace, endpoints: dict[str, Endpoint]) -> list[Run]:
    """Every run that is asked for, those of an earlier start included."""
    file = options.out / "runs.jsonl"
    known = {key_of(run): run for run in known_runs(file)}
    names, runs = list(endpoints), list[Run]()
    for number in range(options.rounds):
        turned = names[number % len(names) :] + names[: number % len(names)]
        for streams in options.streams:
            load = Load(streams, options.requests, options.prompt_tokens, options.output_tokens, seed=number + 1)
            for name in turned:
                run: Run = {"endpoint": name, "to": shown(endpoints[name]), "tool": options.tool,
                            "load": asdict(load), "round": number}  # fmt: skip
                if key_of(run) in known:
                    runs.append(known[key_of(run)])
                    continue
                folder = options.out / f"{name}-{streams}-{number}"
                figures = run_load(options.tool, shlex.split(options.command), endpoints[name], load, folder)
                run |= {"at": time.strftime("%Y-%m-%dT%H:%M:%S"), "figures": figures}
                with file.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(run) + "\n")
                runs.append(run)
                print(f"round {number + 1}, {streams} streams, {name}: {in_words(figures)}", flush=True)
    return runs


def in_words(figures: Figures) -> str:
    return ", ".join(f"{FIGURES[key]} {figures[key]:.4g}" for key in ("failed", *PLOTTED))


def of(runs: Sequence[Run], endpoint: str, streams: int, figure: str) -> list[float]:
    """One value a round, in order of rounds."""
    return [
        run["figures"][figure]
        for run in sorted(runs, key=lambda run: int(run["round"]))
        if (run["endpoint"], run["load"]["streams"]) == (endpoint, streams)
    ]


def ratio(runs: Sequence[Run], endpoint: str, first: str, streams: int, figure: str) -> float | None:
    """Median over the rounds of the endpoint's value over the first's in the same round."""
    pairs = zip(of(runs, endpoint, streams, figure), of(runs, first, streams, figure), strict=True)
    ratios = [value / base for value, base in pairs if base]
    return statistics.median(ratios) if ratios else None


def table(runs: Sequence[Run], names: Sequence[str], streams: int) -> str:
    """A row for each figure: medians with the least and the most, and ratios to the first endpoint."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    head += "".join(f"<th>{html.escape(name)} / {html.escape(names[0])}</th>" for name in names[1:])
    rows = []
    for figure, label in FIGURES.items():
        cells = []
        for name in names:
            values = of(runs, name, streams, figure)
            spread = f" ({min(values):.4g} to {max(values):.4g})" if len(values) > 1 else ""
            cells.append(f"{statistics.median(values):.4g}{spread}")
        found = [ratio(runs, name, names[0], streams, figure) for name in names[1:]]
        cells += ["" if value is None else f"{value:.3f}" for value in found]
        rows.append(f"<tr><td>{label}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f"<table><tr><th></th>{head}</tr>{''.join(rows)}</table>"


def page(options: argparse.Namespace, endpoints: dict[str, Endpoint], runs: Sequence[Run]) -> str:
    names = list(endpoints)
    sections = []
    for figure in PLOTTED:
        series = {
            name: [(float(streams), statistics.median(of(runs, name, streams, figure))) for streams in options.streams]
            for name in names
        }
        sections.append(f"<h2>{FIGURES[figure]}</h2>" + plots.lines(series, "requests in flight", FIGURES[figure]))
    sections += [f"<h2>{streams} in flight</h2>" + table(runs, names, streams) for streams in options.streams]
    listed = "".join(
        f"<li>{html.escape(name)}: {html.escape(to.model)} at {html.escape(to.url)}</li>"
        for name, to in endpoints.items()
    )
    text = (
        f"{options.tool}, {options.rounds} rounds of {options.requests} requests by turns, prompts of "
        f"{options.prompt_tokens} tokens and answers of {options.output_tokens}. Tables and plots show medians over "
        "the rounds, tables the least and the most, too; a ratio is the median of the rounds' ratios."
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{" and ".join(map(html.escape, names))}'
        f"</title><style>{STYLE}</style></head><body>\n<h1>{' and '.join(map(html.escape, names))}</h1>"
        f"<ul>{listed}</ul><p>{text}</p><pre>{html.escape(shlex.join(sys.argv))}</pre>"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def at_least_one(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return number


def options_of(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", action="append", required=True, metavar="NAME=URL[,MODEL]", help="two or more")
    parser.add_argument("--key", action="append", default=[], metavar="NAME=VARIABLE", help="an endpoint's API key")
    parser.add_argument("--tool", choices=list(TOOLS), default="guidellm")
    parser.add_argument("--command", default="", help="what starts the tool, by default its name")
    parser.add_argument("--tokenizer", required=True, help="a folder or a model's name; it makes the prompts")
    parser.add_argument("--streams", type=at_least_one, nargs="+", default=[1, 4, 16], help="requests in flight")
    parser.add_argument("--requests", type=int, default=64, help="of each run")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    options = parser.parse_args(words)
    options.command = options.command or options.tool
    return options


def main(words: Sequence[str] | None = None) -> int:
    options = options_of(words)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        plots.check_matplotlib()
        endpoints = endpoints_of(options)
        runs = measure(options, endpoints)
    except (ToolError, ConfigError) as error:
        print(f"against: error: {error}", file=sys.stderr)
        return 1
    file = options.out / "index.html"
    file.write_text(page(options, endpoints, runs), encoding="utf-8")
    failed = sum(run["figures"]["failed"] for run in runs)
    print(f"{file}: {len(runs)} runs, {failed:g} requests failed")
    return 0 if not failed else 1


if __name__ == "__main__":
    sys.exit(main())
