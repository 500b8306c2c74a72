"""A one-node Ray cluster, started by `ray start --head` on free ports, and the `serve` command."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from alignedserve.cluster.serve import haproxy
from alignedserve.cluster.serve.ray_session import ENVIRONMENT
from alignedserve.config_sources import from_tree

DEPLOYED_WITHIN_S = 120.0
STARTED_WITHIN_S = 60.0
ENDS_WITHIN_S = 20.0
STEADY_ANSWERS = 8  # 0.1 s apart, because HAProxy changes to another configuration in steps


class RayHead:
    """`with RayHead() as head: head.deploy(config)`. Nothing is left running after it.

    `proxy`: which of Serve's proxies is in front.
    """

    def __init__(self, *, proxy: str = "haproxy") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="as-ray-", dir="/tmp"))  # the paths of sockets must be short
        self.runtime = self.folder / "run"
        self.runtime.mkdir(mode=0o700)
        self.port, self.grpc_port, self._gcs_port, self._dashboard_port, *self._others = haproxy.free_ports(8)
        self._proxy_folder: haproxy.HaProxyFolder | None = None
        self.deployed: dict[str, Any] = {}  # the configuration that was deployed last
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "ALIGNEDSERVE_"))},
            **ENVIRONMENT,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "ALIGNEDSERVE_RUNTIME_DIR": str(self.runtime),
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
            "RAY_SERVE_ENABLE_HA_PROXY": "0",
        }
        if proxy == "haproxy":
            config = from_tree({"gateway": {"host": "127.0.0.1", "port": self.port, "grpc_port": self.grpc_port}})
            self._proxy_folder = haproxy.prepare(config)
            assert self._proxy_folder is not None, "HAProxy does not run here"
            self._environment |= self._proxy_folder.environment(config)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a command that uses this cluster."""
        return self._environment | {
            "RAY_ADDRESS": f"127.0.0.1:{self._gcs_port}",
            "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{self._dashboard_port}",
        }

    def __enter__(self) -> Self:
        client, agent, agent_grpc, environments = self._others
        ports = {
            "--port": self._gcs_port,
            "--dashboard-port": self._dashboard_port,
            "--ray-client-server-port": client,
            "--dashboard-agent-listen-port": agent,
            "--dashboard-agent-grpc-port": agent_grpc,
            "--runtime-env-agent-port": environments,
            "--min-worker-port": 0,
            "--max-worker-port": 0,
        }
        options = {"--node-ip-address": "127.0.0.1", "--temp-dir": str(self.folder / "ray")}
        options |= {"--num-cpus": "2", "--object-store-memory": str(80 << 20), "--include-log-monitor": "false"}
        words = [word for name, value in {**ports, **options}.items() for word in (name, str(value))]
        with (self.folder / "start.log").open("wb") as log:
            self._process = subprocess.Popen(
                [_command("ray"), "start", "--head", "--block", "--disable-usage-stats", *words],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._environment,
                start_new_session=True,
            )
        try:
            self._wait_started()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        try:
            if process is not None:
                with contextlib.suppress(subprocess.SubprocessError):
                    self.serve("shutdown", "-y", timeout_s=60.0)
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(ENDS_WITHIN_S)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        finally:
            if self._proxy_folder is not None:
                self._proxy_folder.remove()
            if error is None:
                shutil.rmtree(self.folder, ignore_errors=True)

    def command(self, *words: str, timeout_s: float = DEPLOYED_WITHIN_S) -> subprocess.CompletedProcess[str]:
        """Run a command of this installation with the cluster's environment."""
        return subprocess.run(
            [_command(words[0]), *words[1:]],
            capture_output=True,
            text=True,
            env=self.environment,
            cwd=self.folder,
            timeout=timeout_s,
            check=False,
        )

    def serve(self, *words: str, timeout_s: float = DEPLOYED_WITHIN_S) -> subprocess.CompletedProcess[str]:
        """`serve …`. `deploy`, `status` and `shutdown` use Ray's dashboard."""
        return self.command("serve", *words, timeout_s=timeout_s)

    def alignedserve(self, *words: str, timeout_s: float = DEPLOYED_WITHIN_S) -> subprocess.CompletedProcess[str]:
        """`alignedserve …`."""
        arguments = [sys.executable, "-m", "alignedserve.cluster.cli.main", *words]
        return subprocess.run(
            arguments, capture_output=True, text=True, env=self.environment, timeout=timeout_s, check=False
        )

    def adapt(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of a Serve config with this cluster's ports."""
        adapted = json.loads(json.dumps(config))
        adapted["http_options"] = {"host": "127.0.0.1", "port": self.port}
        adapted.setdefault("grpc_options", {})["port"] = self.grpc_port
        return dict(adapted)

    def deploy(self, config: Mapping[str, Any], *, by_command: bool = False) -> None:
        """Deploy, and wait until every application runs. Raises RuntimeError with the reason of a failure.

        `by_command`: use `serve deploy`, which takes ten seconds of CPU time to start. Else send its request to Ray's
        dashboard, as KubeRay's operator does.
        """
        self.deployed = copy.deepcopy(dict(config))
        if by_command:
            file = self.folder / "serve.yaml"
            file.write_text(yaml.safe_dump(self.adapt(config)))
            done = self.serve("deploy", str(file))
            if done.returncode:
                raise RuntimeError(f"`serve deploy` failed: {done.stdout}{done.stderr}")
        else:
            self.apply(config)
        self.wait_running()

    def wait_running(self, timeout_s: float = DEPLOYED_WITHIN_S) -> None:
        """Wait until every application runs in its newest configuration, and the proxy knows its route."""
        deadline = time.monotonic() + timeout_s
        answered = 0
        while True:
            applications = self.applications()
            states = {name: entry["status"] for name, entry in applications.items()}
            if failed := [entry for entry in applications.values() if entry["status"] == "DEPLOY_FAILED"]:
                raise RuntimeError(str(failed[0]["message"]))
            running = bool(states) and set(states.values()) == {"RUNNING"}
            answered = answered + 1 if running and all(map(self._answers, applications.values())) else 0
            if answered == STEADY_ANSWERS:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"not running within {timeout_s:g} s: {applications}")
            time.sleep(0.1)

    def _answers(self, application: Mapping[str, Any]) -> bool:
        """Serve reports an application as running before its proxy knows it."""
        route = str(application["route_prefix"]).rstrip("/")
        try:
            with urllib.request.urlopen(f"{self.url}{route}/live", timeout=30.0) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def applications(self) -> dict[str, Any]:
        """The status of each application, from the API that `serve status` uses."""
        return dict(json.loads(self._dashboard("GET"))["applications"])

    def apply(self, config: Mapping[str, Any]) -> None:
        """Send the request of `serve deploy` without a process, which takes many seconds on a busy machine."""
        self._dashboard("PUT", json.dumps(self.adapt(config)).encode())

    def _dashboard(self, method: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._dashboard_port}/api/serve/applications/",
            headers={"Authorization": f"Bearer {self._environment['RAY_AUTH_TOKEN']}"},
            method=method,
            data=body,
        )
        with urllib.request.urlopen(request, timeout=60.0) as answer:
            return bytes(answer.read())

    def _wait_started(self) -> None:
        deadline = time.monotonic() + STARTED_WITHIN_S
        while True:
            assert self._process is not None
            if self._process.poll() is not None:
                raise RuntimeError(f"`ray start` ended: {(self.folder / 'start.log').read_text()}")
            with contextlib.suppress(urllib.error.URLError, OSError):
                self.applications()
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"Ray's dashboard does not answer: {(self.folder / 'start.log').read_text()}")
            time.sleep(0.1)


def _command(name: str) -> str:
    """The program in the environment of this interpreter."""
    return str(Path(sys.executable).with_name(name))
