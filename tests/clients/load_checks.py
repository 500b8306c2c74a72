"""What the checks of load tools share: a run of the tool, and the server's metrics before and after it."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path

from checks import MODEL

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from load_tools import Endpoint, Figures, Load, run_load, run_tool  # noqa: E402

os.environ["TOKENIZERS_PARALLELISM"] = "false"
TRIES = 3
PAGE = ROOT / "docs/operations/load.md"
LOAD = Load(streams=4, requests=24, prompt_tokens=64, output_tokens=24)
COUNTED = {
    "requests": "gateway_requests_total",
    "prompt_tokens": "gateway_prompt_tokens_total",
    "output_tokens": "gateway_output_tokens_total",
    "ttft_s": "gateway_ttft_seconds_sum",
    "ttfts": "gateway_ttft_seconds_count",
    "cached_tokens": "prefix_cache_hit_tokens_total",
}


def endpoint(url: str) -> Endpoint:
    return Endpoint(url, MODEL, os.environ["MODEL_FOLDER"])


def counted(url: str) -> Figures:
    """The server's own counts and sums."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = {
        key: re.findall(rf"^alignedserve_{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        for key, name in COUNTED.items()
    }
    return {key: sum(map(float, values)) for key, values in found.items()}


def command(tool: str) -> list[str]:
    """Starts the tool in this environment, with further packages behind its own."""
    further = os.environ["FURTHER_PACKAGES"]
    start = f"import sys; sys.path.append({further!r}); from importlib.metadata import entry_points; "
    start += f"(found,) = entry_points(group='console_scripts', name={tool!r}); sys.argv[0] = {tool!r}; found.load()()"
    return [sys.executable, "-c", start]


def documented(url: str, tool: str, containing: str = "", **others: str | Path) -> list[str]:
    """The tool's command on the page of load tools, for this server and model. `others`: values of its options."""
    text = PAGE.read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if re.match(rf"{tool} (run|profile|--model) .*{containing}", line)]
    line = line.replace("http://127.0.0.1:8000", url).replace("=MODEL", f"={os.environ['MODEL_FOLDER']}")
    words = [{"MODEL": os.environ["MODEL_FOLDER"]}.get(word, word) for word in shlex.split(line)[1:]]
    for name, value in others.items():
        words[words.index(f"--{name.replace('_', '-')}") + 1] = str(value)
    return words


def agreed(url: str, tool: str, run: Callable[[Path], Figures]) -> tuple[Figures, Figures]:
    """The figures of a run, and what the server has counted meanwhile, which is the same.

    guidellm 0.8.1 at times reports one finished request too few (63 of 64, none incomplete). Then it runs again.
    """
    for _ in range(TRIES):
        before = counted(url)
        found = run(Path(tempfile.mkdtemp(prefix=f"{tool}-")))
        grown = {key: value - before[key] for key, value in counted(url).items()}
        print(json.dumps({"tool": found, "server": grown}))
        assert found["failed"] == 0
        if found["requests"] != grown["requests"] - 1:
            break
    for key in ("requests", "prompt_tokens", "output_tokens"):
        assert found[key] == grown[key], f"{key}: {found} {grown}"
    server_ms = 1e3 * grown["ttft_s"] / grown["ttfts"]
    # The tool's own processes and the front add to it; on a busy machine as much again.
    assert server_ms - 1 <= found["ttft_mean_ms"] <= 2 * server_ms + 500
    return found, grown


def figures_agree(url: str, tool: str) -> None:
    found, _ = agreed(url, tool, lambda folder: run_load(tool, command(tool), endpoint(url), LOAD, folder))
    assert found["requests"] == LOAD.requests
    assert found["output_tokens"] == LOAD.requests * LOAD.output_tokens


def documented_agrees(url: str, tool: str) -> None:
    """The example of the page: 64 requests of 64 tokens."""
    words = documented(url, tool, "concurren")
    found, _ = agreed(url, tool, lambda folder: run_tool(tool, [*command(tool), *words], folder))
    assert (found["requests"], found["output_tokens"]) == (64, 64 * 64)
