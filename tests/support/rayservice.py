"""Runs the Serve configuration of a RayService as KubeRay's operator does, on a separate machine.

`deploy` runs this file as a program on a machine (`namespaces`). So the ports of the manifest are free, and every
process of the program ends with the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from support.namespaces import Machine

DASHBOARD = "http://127.0.0.1:8265"
TOKEN = "0123456789abcdef" * 4
STARTED_S, SERVING_S, ANSWER_S = 90.0, 150.0, 60.0
HAPROXY_FILES = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "state",
}
"""Paths of HAProxy's files: a container has its own /tmp, which tests on one machine would share."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """The deployment, and the requests to it. `resources`: Ray's resources of this machine; `prompts`: token ids."""

    serve_config: dict[str, Any]
    environment: dict[str, str]
    resources: dict[str, float]
    prompts: list[list[int]]
    new_tokens: int
    model: str
    api_key: str
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Observed:
    """The results: `tokens` of each prompt over HTTP, `statuses` of `paths`, the output of `wait-idle`, and PSS."""

    applications: dict[str, str]
    tokens: list[list[int]]
    grpc_tokens: list[int]
    refused: int
    statuses: dict[str, int]
    idle: str
    resident_mib: float


def deploy(deployment: Deployment, timeout_s: float) -> Observed:
    """Raises AssertionError with the output of the program if it failed."""
    with Machine("rayservice") as machine:
        done = subprocess.run(
            machine.inside(sys.executable, "-m", __name__),
            input=json.dumps(asdict(deployment)),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return Observed(**json.loads(done.stdout.splitlines()[-1]))


def _main() -> None:
    deployment = Deployment(**json.load(sys.stdin))
    with tempfile.TemporaryDirectory(prefix="as-rs-") as folder:
        observed = _run(deployment, Path(folder))
        print(json.dumps(asdict(observed)), flush=True)


def _run(deployment: Deployment, folder: Path) -> Observed:
    files = {name: str(folder / file) for name, file in HAPROXY_FILES.items()}
    own = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "ALIGNEDSERVE_RUNTIME_DIR": str(folder / "run"),
    }
    os.environ.update(deployment.environment | files | own)
    resources = {name: amount for name, amount in deployment.resources.items() if name != "CPU"}
    # Like KubeRay: the container's process is `ray start` in the foreground, and its parameters are flags.
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        *("--disable-usage-stats", "--object-store-memory=134217728", f"--temp-dir={folder / 'ray'}"),
        *(f"--num-cpus={int(deployment.resources['CPU'])}", f"--resources={json.dumps(resources)}"),
    ]
    log = folder / "ray-start.log"
    with log.open("wb") as output:
        ray = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        return _serve(deployment)
    except BaseException:
        print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
        for file in sorted(folder.glob("ray/session_*/logs/**/*")):
            if file.suffix in (".log", ".err", ".out") and file.stat().st_size and "alignedserve" in str(file):
                print(f"== {file}\n{file.read_text(errors='replace')[-3000:]}", file=sys.stderr)
        raise
    finally:
        ray.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            ray.wait(20.0)


def _serve(deployment: Deployment) -> Observed:
    config = deployment.serve_config
    url = f"http://127.0.0.1:{config['http_options']['port']}"
    _until(lambda: _status(f"{DASHBOARD}/api/gcs_healthz") == 200, STARTED_S, "the head is not ready")
    _request(f"{DASHBOARD}/api/serve/applications/", config, method="PUT")
    _until(lambda: set(_applications().values()) == {"RUNNING"}, SERVING_S, "the application does not run")
    _until(lambda: _status(f"{url}/health") == 200, SERVING_S, "the cluster does not serve")
    body = {"model": deployment.model, "max_tokens": deployment.new_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    keys = {"authorization": f"Bearer {deployment.api_key}"}
    answers = [
        _request(f"{url}/v1/completions", body | {"prompt": prompt}, headers=keys) for prompt in deployment.prompts
    ]
    refused = _status(f"{url}/v1/models")
    return Observed(
        applications=_applications(),
        tokens=[answer["choices"][0]["token_ids"] for answer in answers],
        grpc_tokens=_over_grpc(deployment, int(config["grpc_options"]["port"])),
        refused=refused,
        statuses={path: _status(f"http://127.0.0.1{path}") for path in deployment.paths},
        idle=_wait_idle(),
        resident_mib=_resident_mib(),
    )


def _over_grpc(deployment: Deployment, port: int) -> list[int]:
    from alignedserve.client import Client

    with Client(f"127.0.0.1:{port}", timeout_s=ANSWER_S, api_key=deployment.api_key) as client:
        answer = client.generate(
            prompt_token_ids=deployment.prompts[0], max_tokens=deployment.new_tokens, temperature=0, ignore_eos=True
        )
    return list(answer.token_ids)


def _wait_idle() -> str:
    command = [sys.executable, "-m", "alignedserve.cluster.cli.main", "wait-idle", "--timeout", "10"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout


def _resident_mib() -> float:
    """The memory of all processes of this machine. Shared pages count once, page cache and unmapped memfd do not."""
    total = 0
    for rollup in Path("/proc").glob("[0-9]*/smaps_rollup"):
        with contextlib.suppress(OSError):
            total += sum(int(line.split()[1]) for line in rollup.read_text().splitlines() if line.startswith("Pss:"))
    return total / 1024


def _applications() -> dict[str, str]:
    try:
        said = _request(f"{DASHBOARD}/api/serve/applications/")
    except (OSError, ValueError):
        return {"": "UNKNOWN"}
    return {name: entry["status"] for name, entry in said["applications"].items()}


def _request(url: str, body: Any = None, method: str | None = None, headers: Mapping[str, str] | None = None) -> Any:
    sent = {"authorization": f"Bearer {TOKEN}"} | dict(headers or {})
    request = urllib.request.Request(url, method=method, headers=sent)
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def _status(url: str) -> int:
    """The HTTP status of a GET without a token or key; 0 if there is no answer."""
    try:
        with urllib.request.urlopen(url, timeout=5.0) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def _until(reached: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < deadline, f"{otherwise} within {timeout_s:g} s"
        time.sleep(0.2)


if __name__ == "__main__":
    _main()
