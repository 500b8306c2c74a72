"""Load tools of other projects: their command lines, and the figures of their reports in one form.

Only Python's own library, as `against.py` and the programs of `tests/clients` use it. Both tools ask for
`output_tokens` tokens (`ignore_eos`), keep `streams` requests in flight, and stream.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Figures = dict[str, float]  # the names are those of FIGURES
FIGURES = {
    "requests": "requests answered",
    "failed": "requests failed",
    "prompt_tokens": "prompt tokens",
    "output_tokens": "output tokens",
    "output_tokens_per_s": "output tokens/s",
    "ttft_mean_ms": "TTFT, mean, ms",
    "ttft_p50_ms": "TTFT, P50, ms",
    "ttft_p99_ms": "TTFT, P99, ms",
    "itl_mean_ms": "inter-token time, mean, ms",
    "itl_p99_ms": "inter-token time, P99, ms",
    "latency_p99_ms": "latency, P99, ms",
}
RUN_S = 3600.0  # a run that takes longer has failed


class ToolError(Exception):
    """A tool did not run to its end, or its report has not what is read here."""


@dataclass(frozen=True, slots=True)
class Load:
    """`streams` requests are in flight until `requests` are answered. Lengths are in tokens of the tokenizer."""

    streams: int = 4
    requests: int = 32
    prompt_tokens: int = 64
    output_tokens: int = 32
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server of OpenAI's API. `tokenizer`: a folder or a model's name, which the tool makes prompts with. `key`: of
    the API; the tools take it as an argument, which other users of this machine can see.
    """

    url: str
    model: str
    tokenizer: str
    key: str = field(default="", repr=False)


def guidellm_words(to: Endpoint, load: Load, folder: Path) -> list[str]:
    target = f"kind=openai_http,target={to.url},model={to.model}" + (f",api_key={to.key}" if to.key else "")
    data = f"kind=synthetic_text,prompt_tokens={load.prompt_tokens},output_tokens={load.output_tokens}"
    return [
        "run",
        "--disable-console",
        *("--backend", target),
        *("--profile", f"kind=concurrent,streams={load.streams}"),
        *("--constraint", f"kind=max_requests,count={load.requests}"),
        *("--data", data),
        *("--tokenizer", f"kind=huggingface_auto,model={to.tokenizer}"),
        *("--seed", f"kind=static,value={load.seed}"),
        *("--output", f"kind=json,path={folder / 'report.json'}"),
    ]


def guidellm_figures(folder: Path) -> Figures:
    (run,) = json.loads((folder / "report.json").read_text(encoding="utf-8"))["benchmarks"]
    metrics = run["metrics"]
    totals = metrics["request_totals"]

    def of(name: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = metrics[name]["successful"]
        return found

    ttft, itl, latency = of("time_to_first_token_ms"), of("inter_token_latency_ms"), of("request_latency")
    return {
        "requests": totals["successful"],
        "failed": totals["errored"],
        "prompt_tokens": round(of("prompt_token_count")["total_sum"]),  # sums are means times counts
        "output_tokens": round(of("output_token_count")["total_sum"]),
        "output_tokens_per_s": of("output_tokens_per_second")["mean"],
        "ttft_mean_ms": ttft["mean"],
        "ttft_p50_ms": ttft["percentiles"]["p50"],
        "ttft_p99_ms": ttft["percentiles"]["p99"],
        "itl_mean_ms": itl["mean"],
        "itl_p99_ms": itl["percentiles"]["p99"],
        "latency_p99_ms": 1e3 * latency["percentiles"]["p99"],
    }


def aiperf_words(to: Endpoint, load: Load, folder: Path) -> list[str]:
    return [
        "profile",
        *("--model", to.model, "--url", to.url, "--tokenizer", to.tokenizer),
        *(("--api-key", to.key) if to.key else ()),
        *("--endpoint-type", "chat", "--streaming", "--use-server-token-count"),
        *("--concurrency", str(load.streams), "--request-count", str(load.requests)),
        *("--isl", str(load.prompt_tokens), "--isl-stddev", "0"),
        *("--osl", str(load.output_tokens), "--osl-stddev", "0"),
        *("--extra-inputs", "ignore_eos:true", "--extra-inputs", f"min_tokens:{load.output_tokens}"),
        *("--random-seed", str(load.seed), "--ui-type", "none", "--no-gpu-telemetry", "--no-server-metrics"),
        *("--output-artifact-dir", str(folder)),
    ]


def aiperf_figures(folder: Path) -> Figures:
    (file,) = folder.rglob("profile_export_aiperf.json")
    report = json.loads(file.read_text(encoding="utf-8"))
    ttft, itl, latency = (report[name] for name in ("time_to_first_token", "inter_token_latency", "request_latency"))
    return {
        "requests": report["request_count"]["avg"],
        "failed": (report.get("error_request_count") or {"avg": 0})["avg"],
        "prompt_tokens": report["total_isl"]["avg"],
        "output_tokens": report["total_osl"]["avg"],
        "output_tokens_per_s": report["output_token_throughput"]["avg"],
        "ttft_mean_ms": ttft["avg"],
        "ttft_p50_ms": ttft["p50"],
        "ttft_p99_ms": ttft["p99"],
        "itl_mean_ms": itl["avg"],
        "itl_p99_ms": itl["p99"],
        "latency_p99_ms": latency["p99"],
    }


@dataclass(frozen=True, slots=True)
class Tool:
    """`words`: the arguments of its command, which writes its report into a folder; `figures` reads that."""

    words: Callable[[Endpoint, Load, Path], list[str]]
    figures: Callable[[Path], Figures]


TOOLS = {"guidellm": Tool(guidellm_words, guidellm_figures), "aiperf": Tool(aiperf_words, aiperf_figures)}


def run_load(name: str, command: Sequence[str], to: Endpoint, load: Load, folder: Path) -> Figures:
    """The figures of one run of a tool, which `command` starts. Its files are in `folder`. Raises ToolError."""
    folder = folder.resolve()
    return run_tool(name, [*command, *TOOLS[name].words(to, load, folder)], folder)


def run_tool(name: str, command: Sequence[str], folder: Path) -> Figures:
    """Run a whole command of a tool in the new folder `folder`, where it writes its report. Raises ToolError."""
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped
    folder.mkdir(parents=True)
    log = folder / "output.log"
    try:
        with log.open("wb") as output:
            done = subprocess.run(
                command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=RUN_S,
                check=False,
            )  # fmt: skip
    except FileNotFoundError as error:
        raise ToolError(f"{command[0]} is not installed: pip install {name}, or --command PATH") from error
    except subprocess.TimeoutExpired as error:
        raise ToolError(f"{name} had not ended after {RUN_S:g} s, see {log}") from error
    if done.returncode:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:])
        raise ToolError(f"{name} ended with {done.returncode}, see {log}:\n{tail}")
    try:
        found = TOOLS[name].figures(folder)
        return {key: float(found[key]) for key in FIGURES}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ToolError(f"the report of {name} in {folder} cannot be read: {error!r}") from error
