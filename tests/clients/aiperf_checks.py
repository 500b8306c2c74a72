"""aiperf against this server: no request fails, and its figures are those of the server's own metrics.

`MODEL_FOLDER` has the tokenizer, `REQUEST_LOG` is the server's log, and `OUR_COMMAND` is `alignedserve`. transformers
is that of `FURTHER_PACKAGES`, a folder of packages.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

from checks import MODEL, check, main
from load_checks import PAGE, agreed, command, documented, documented_agrees, figures_agree
from load_tools import run_tool

SHARED, OWN, ANSWER = 256, 64, 16  # tokens
REQUESTS = 20


@check
def its_figures_are_the_servers(url: str) -> None:
    figures_agree(url, "aiperf")


@check
def the_documented_command_runs(url: str) -> None:
    documented_agrees(url, "aiperf")


def hub_name(folder: Path) -> str:
    """The model's tokenizer as a hub's cache has it, by the lines of the page."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if "models--local--tiny" in line]
    script = "\n".join(["set -e", *lines]).replace("MODEL", os.environ["MODEL_FOLDER"])
    subprocess.run(["bash", "-c", script], cwd=folder, check=True)
    os.environ.update(HF_HUB_CACHE=str(folder / "hub"), HF_HUB_OFFLINE="1")
    return "local/tiny"


@check
def a_request_log_is_replayed(url: str) -> None:
    """With the lengths of the log, and with what its prompts share."""
    log_of_all = Path(os.environ["REQUEST_LOG"])
    before = len(log_of_all.read_text(encoding="utf-8").splitlines())
    for number in range(REQUESTS):
        prompt = [7] * SHARED + [100 + number] * OWN
        body = {"model": MODEL, "prompt": prompt, "max_tokens": ANSWER, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers), timeout=60
        ) as answer:
            assert answer.status == 200
    folder = Path(tempfile.mkdtemp(prefix="trace-"))
    log, trace = folder / "log.jsonl", folder / "trace.jsonl"
    while len(newest := log_of_all.read_text(encoding="utf-8").splitlines()[before:]) < REQUESTS:
        time.sleep(0.1)
    log.write_text("\n".join(newest), encoding="utf-8")
    save = ("simulate", "--trace", str(log), "--rate", "4", "--save-trace", str(trace))
    subprocess.run([os.environ["OUR_COMMAND"], *save], check=True, timeout=60)
    words = documented(url, "aiperf", "mooncake", input_file=trace, tokenizer=hub_name(folder))
    found, grown = agreed(url, "aiperf", lambda out: run_tool("aiperf", [*command("aiperf"), *words], out))
    assert found["requests"] == REQUESTS
    assert found["output_tokens"] == REQUESTS * ANSWER
    assert abs(found["prompt_tokens"] / (REQUESTS * (SHARED + OWN)) - 1) < 0.1
    assert grown["cached_tokens"] > 0.8 * (REQUESTS - 1) * SHARED


if __name__ == "__main__":
    main()
