"""Every command of the documentation's shell blocks is run as it stands there, or named here with the reason why not.

Ports and ids apart, nothing is changed. Commands run in a folder that has the files which they name, page by page in
their order, against a server of the model that ships. `alignedserve serve …` itself is started until it is healthy.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from alignedserve.cluster.cli.serve_process import ServeProcess
from alignedserve.model import resolve_model
from support.docs_pages import LASTING, ROOT, blocks, commands, name_of
from support.pace import slowness

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900 * slowness())]

COMMAND_S = 300.0
SCRIPTS = Path(sys.executable).parent
# What begins so is not run here.
ELSEWHERE = {
    "make ": "`make test` is what runs this; the others are for developers, and take long",
    "pip install": "installs packages",
    "python3 -m venv": "installs packages",
    "python benchmarks/": "benchmarks are run by hand",
    "benchmarks/": "benchmarks are run by hand",
    "docker ": "there is no Docker here",
    "kind ": "there is no Kubernetes here: test_kuberay.py checks the manifests",
    "helm ": "there is no Kubernetes here",
    "kubectl ": "there is no Kubernetes here",
    "(umask 077; openssl rand -hex 24 > keys)": "for Kubernetes",
    "vllm ": "vLLM is not installed",
    "export ANTHROPIC_": "for Claude Code, which docs/agents.md says was tried by hand",
    "claude": "the same",
    "guidellm ": "tests/clients runs it",
    "aiperf ": "tests/clients runs it",
    "lm_eval ": "tests/clients runs it, with tasks of its own",
    "ray ": "test_ray_places.py, test_nodes.py and test_serve_apps.py start Ray themselves",
    "serve ": "test_serve_apps.py deploys with Ray Serve",
    "set -a; . deploy/ray.env": "for Ray on several nodes: test_nodes.py",
    "export RAY_": "for Ray on several nodes: test_nodes.py",
    'curl http://127.0.0.1:8000/v1/completions -H "Authorization': "for Kubernetes",
    "alignedserve serve --model Qwen/": "no hub can be reached",
    "alignedserve serve --model /models/": "for GPUs",
}
STARTS_ITS_OWN = ("alignedserve run-batch", "alignedserve profile")
SILENT = ("install ", "alignedserve cache drop", "mkdir ", "printf ", "ln ", "export ")
FOREVER = {"alignedserve top ": "alignedserve top --once "}  # what ends at Ctrl-C only, and what is run instead


@dataclass
class Place:
    """The folder in which commands run, and the server that they find; it is started again after its stop."""

    folder: Path
    environment: dict[str, str]
    server: ServeProcess | None = None

    def running(self) -> ServeProcess:
        if self.server is None:
            log, store = str(self.folder / "requests.jsonl"), str(self.folder / "store")
            files = ("--request-log", log, "--batches-folder", store)
            self.server = ServeProcess(*files, environment=self.environment, folder=self.folder)
            self.server.__enter__()
        return self.server

    def stop(self) -> None:
        if self.server is not None:
            assert self.server.stop() == 0
            self.server = None

    def after(self, command: str) -> None:
        """It is where it was before, unless the command stops it."""
        if self.server is None:
            return
        if command.startswith("alignedserve stop"):
            assert self.server.process.wait(10.0) == 0
            self.server = None
        else:
            assert self.server.process.poll() is None, f"{command} has ended the server"

    def as_run(self, command: str) -> str:
        """The command with the server's port and a request's id. The server ends for one that starts a cluster."""
        if command.startswith(STARTS_ITS_OWN) and "--url" not in command:
            self.stop()
            return command
        server = self.running()
        for written, run in FOREVER.items():
            command = re.sub(rf"^{written}(?!--once)", run, command + " ")
        answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 2})
        command = re.sub(r"^(alignedserve explain) \S+", rf"\1 {answer['id']}", command)
        command = re.sub(r"^curl ", "curl --fail-with-body ", command)
        return re.sub(r"(127\.0\.0\.1|localhost):8000", f"127.0.0.1:{server.port}", command).strip()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("docs")
    model = resolve_model("tiny")
    (folder / "path/to").mkdir(parents=True)
    for name in ("my-model", "m", "path/to/model"):
        (folder / name).symlink_to(model)
    messages = [{"role": "system", "content": "Answer what is asked, in one sentence. " * 8}]
    (folder / "support.json").write_text(json.dumps(messages))
    (folder / "introduction.txt").write_text("This is a list of all functions of the module. " * 8)
    (folder / "prompts.jsonl").write_text(json.dumps({"name": "many", "messages": messages}) + "\n")
    shutil.copy(ROOT / "scheduler/cost/data/a100-opt-13b.json", folder / "this-machine.json")  # until `profile` runs
    (folder / "nodes.toml").write_text("nodes = 4\n")
    row = {"timestamp": 0, "input_length": 1500, "output_length": 6, "hash_ids": [1, 2, 3]}
    (folder / "mooncake_trace.jsonl").write_text("".join(json.dumps({**row, "timestamp": n}) + "\n" for n in range(40)))
    (configuration,) = (
        text for page in LASTING for language, text in blocks(page) if language == "yaml" and "# cluster.yaml" in text
    )
    (folder / "cluster.yaml").write_text(configuration)
    lines = (json.dumps(batch_line(number)) + "\n" for number in range(8))
    text = "".join(lines)
    for name in ("lines.jsonl", "IN"):
        (folder / name).write_text(text)
    keys = folder / "keys"
    keys.touch(mode=0o600)
    keys.write_text("sk-docs\n")
    environment = {
        "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}",
        "ALIGNEDSERVE_RUNTIME_DIR": str(folder / "run"),
        "ALIGNEDSERVE_KV_POOL__SIZE_GIB": "0.2",
    }
    made = Place(folder, environment)
    made.running().post("/v1/completions", {"prompt": "This is the first of the log.", "max_tokens": 20})
    yield made
    made.stop()


def batch_line(number: int) -> dict[str, object]:
    body = {"prompt": f"Item {number}", "max_tokens": 4}
    return {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}


def reason_of(command: str) -> str:
    """Why it is not run here; "" if it is."""
    return next((why for begins, why in ELSEWHERE.items() if command.startswith(begins)), "")


def run_here(page: Path) -> list[str]:
    return [command for command in commands(page) if not reason_of(command)]


def serve_once(place: Place, command: str) -> None:
    """Start `alignedserve serve …` on free ports until it is healthy, and end it."""
    words = shlex.split(command, comments=True)
    given = dict(word.split("=", 1) for word in words[: words.index("alignedserve")])
    arguments = words[words.index("serve") + 1 :]
    if "--kv-disk-path" in arguments:  # a folder and a size that there are
        arguments[arguments.index("--kv-disk-path") + 1] = str(place.folder / "disk")
        arguments[arguments.index("--kv-disk-gib") + 1] = "0.1"
    runtime = {"ALIGNEDSERVE_RUNTIME_DIR": str(place.folder / "other-run")}
    place.stop()  # two servers at once would be more than a small machine has memory for
    with ServeProcess(*arguments, environment={**place.environment, **given, **runtime}, folder=place.folder) as server:
        assert server.stop(signal.SIGINT) == 0


@pytest.mark.parametrize("page", [page for page in LASTING if run_here(page)], ids=name_of)
def test_the_commands_of_a_page_run(page: Path, place: Place) -> None:
    for command in run_here(page):
        if re.match(r"(?:\w+=\S+ )*alignedserve serve( |$)", command):
            serve_once(place, command)
            continue
        environment = {**os.environ, **place.environment}
        # `run-batch` reads other lines than `simulate`.
        run = place.as_run(command.replace("requests.jsonl -o", "lines.jsonl -o"))
        done = subprocess.run(
            ["bash", "-euc", run], cwd=place.folder, env=environment, capture_output=True, text=True,
            timeout=COMMAND_S, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        place.after(command)
        lacking = run.startswith("alignedserve doctor") and "missing:" in done.stdout  # of this machine
        assert done.returncode == (1 if lacking else 0), f"{run}\n{done.stdout}\n{done.stderr}"
        assert done.stdout + done.stderr or run.startswith(SILENT), run


def test_what_is_not_run_is_in_the_documentation() -> None:
    written = [command for page in LASTING for command in commands(page)]
    unused = [begins for begins in ELSEWHERE if not any(command.startswith(begins) for command in written)]
    assert unused == []
    assert sum(not reason_of(command) for command in written) > 60
    assert (ROOT / "README.md") in LASTING
