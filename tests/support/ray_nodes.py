"""A Ray cluster of several machines (`namespaces`), set up as a user would, and the Serve application on it.

Ray's traffic carries its token (RAY_AUTH_MODE=token), which is read from a file of this user. Processes end with their
machine; `ray stop` would also end those of other clusters.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import yaml

from alignedserve.cluster.serve.ray_session import ENVIRONMENT, GRPC_SERVICERS, OBJECT_STORE_BYTES
from alignedserve.errors import AccountingError
from support.namespaces import Machine, Switch

GCS_PORT, HTTP_PORT, GRPC_PORT = 6379, 8000, 9000
HEAD = "head"  # a resource that the first machine has
# Ray declares a silent machine dead after about 10 s instead of 30 s. A busy machine is not silent for so long.
HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
}
_RAY = (sys.executable, "-m", "ray.scripts.scripts")
_SERVE = (sys.executable, "-m", "ray.serve.scripts")
_POLL_S = 0.1
RAY_WITHIN_S, READY_WITHIN_S = 90.0, 120.0
_ANSWER = "answer: "  # Ray may print other lines before and after it
_ALIVE = """
import json, ray
ray.init(address="auto", log_to_driver=False)
answer = [[n["NodeManagerHostname"], n["NodeID"]] for n in ray.nodes() if n["Alive"]]
"""
_STORES = """
import json, ray
from ray._private import internal_api
ray.init(address="auto", log_to_driver=False)
answer = {}
for node in ray.nodes():
    if node["Alive"]:
        stats = internal_api.node_stats(node["NodeManagerAddress"], node["NodeManagerPort"]).store_stats
        answer[node["NodeManagerHostname"]] = stats.cumulative_created_bytes
"""


class RayNodes:
    """`with RayNodes([{}, {"decode_node": 8}]) as nodes:` starts a head and another machine with these resources.

    `environment` is added to the environment of every started process.
    """

    def __init__(self, resources: Sequence[Mapping[str, float]], environment: Mapping[str, str] | None = None) -> None:
        self._resources = [dict(each) for each in resources]
        self._resources[0][HEAD] = 100
        self.folder = Path(tempfile.mkdtemp(prefix="as-", dir="/tmp"))  # short, because sockets are in it
        self._token = self.folder / "token"
        self._token.touch(mode=0o600)
        self._token.write_text(secrets.token_hex(32))
        others = ("RAY_", "ALIGNEDSERVE_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self._token)}
        self.environment = {**inherited, **ENVIRONMENT, **HEALTH_CHECKS, **own, **(environment or {})}
        self.switch = Switch(len(resources))
        self._forwarders = 0

    def __enter__(self) -> Self:
        try:
            self.switch.__enter__()
            for number in range(len(self.machines)):
                self.start_ray(number)
            self.wait(lambda: len(self.alive()) == len(self.machines), "not every machine has joined Ray")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Power all machines off."""
        self.switch.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def machines(self) -> Sequence[Machine]:
        return self.switch.machines

    @property
    def head(self) -> Machine:
        return self.machines[0]

    def _environment_of(self, number: int) -> dict[str, str]:
        runtime = self.folder / f"run-{number}"
        runtime.mkdir(mode=0o700, exist_ok=True)
        return {**self.environment, "ALIGNEDSERVE_RUNTIME_DIR": str(runtime)}

    def log(self, number: int) -> str:
        """The output of `ray start` on a machine."""
        return (self.folder / f"ray-{number}.log").read_text(errors="replace")

    def join(self, resources: Mapping[str, float]) -> int:
        """Start another machine that joins Ray. Returns its number once Ray counts it."""
        machine = self.switch.add()
        self._resources.append(dict(resources))
        self.start_ray(len(self.machines) - 1)
        self.wait(lambda: machine.name in self.alive(), f"{machine.name} has not joined Ray")
        return len(self.machines) - 1

    def start_ray(self, number: int) -> None:
        """Run `ray start` on a machine. Returns when the head can be joined, and at once for others."""
        machine = self.machines[number]
        place = ["--head", "--port", str(GCS_PORT), "--include-dashboard", "false"]
        if number:
            place = ["--address", f"{self.head.address}:{GCS_PORT}"]
        command = [*_RAY, "start", "--block", "--disable-usage-stats", *place]
        command += ["--node-ip-address", machine.address, "--temp-dir", str(self.folder / f"ray-{number}")]
        command += ["--object-store-memory", str(OBJECT_STORE_BYTES), "--num-cpus", "2"]
        command += ["--resources", json.dumps(self._resources[number])]
        process = machine.start(command, self._environment_of(number), self.folder / f"ray-{number}.log")
        if number == 0:
            started = "Ray runtime started"
            self.wait(lambda: started in self.log(0) or process.poll() is not None, "Ray's head is not up")
            if process.poll() is not None:
                raise RuntimeError(f"`ray start --head` ended:\n{self.log(0)}")

    def shut_down(self, number: int) -> None:
        """Send SIGTERM to `ray start`, as systemd or Kubernetes does: it drains the machine, then ends Ray on it."""
        for pid in self.machines[number].pids(_RAY[-1]).values():
            os.kill(pid, signal.SIGTERM)

    def kill(self, number: int) -> None:
        """Power the machine off: all its processes end at once. It may be started again."""
        for pid in self.machines[number].pids().values():
            os.kill(pid, 9)

    def alive(self) -> dict[str, str]:
        """The ids of the nodes that Ray counts as alive: {host name: id}."""
        return dict(self._ask(_ALIVE))

    def object_store_bytes(self) -> dict[str, int]:
        """The bytes ever put into Ray's object store, or moved by it, on each live machine."""
        return dict(self._ask(_STORES))

    def _ask(self, script: str) -> Any:
        """Run a script on the head. Returns its `answer`."""
        environment = self._environment_of(0) | {"RAY_ADDRESS": f"{self.head.address}:{GCS_PORT}"}
        script += f"print({_ANSWER!r} + json.dumps(answer), flush=True)\n"
        said = self.head.run(sys.executable, "-c", script, environment=environment)
        return json.loads(next(line for line in said.splitlines() if line.startswith(_ANSWER)).removeprefix(_ANSWER))

    def wait(self, condition: Callable[[], bool], trouble: str, timeout_s: float = RAY_WITHIN_S) -> float:
        """Wait until the condition holds. Returns the seconds that it took. Raises TimeoutError."""
        begun = time.monotonic()
        while not condition():
            if time.monotonic() - begun > timeout_s:
                raise TimeoutError(f"{trouble} within {timeout_s:g} s")
            time.sleep(_POLL_S)
        return time.monotonic() - begun

    def forward(self, port: int, number: int = 0) -> str:
        """The path of a Unix socket that forwards to a port of the machine."""
        self._forwarders += 1
        path = self.folder / f"port-{self._forwarders}.sock"
        self.machines[number].forward(port, path, self.environment)
        self.wait(path.exists, f"no socket forwards to port {port}")
        return str(path)


class ServedNodes:
    """The application of deploy/serve.yaml, deployed with `serve run` on the head. Its gateway is on the head, and its
    supervisor on the machine with the resource `supervisor`.

    `tree`: the sections of the configuration. `http` calls the head's proxy; `grpc_address` is its gRPC address.
    """

    def __init__(self, nodes: RayNodes, tree: Mapping[str, Any], *, supervisor: str = HEAD) -> None:
        self.nodes, self._tree = nodes, tree
        self._places = {"Gateway": HEAD, "Supervisor": supervisor}
        self.grpc_address = ""

    def _application(self) -> dict[str, Any]:
        options = {name: {"num_cpus": 0, "resources": {place: 0.001}} for name, place in self._places.items()}
        return {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": HTTP_PORT},
            "grpc_options": {"port": GRPC_PORT, "grpc_servicer_functions": GRPC_SERVICERS},
            "logging_config": {"log_level": "WARNING", "enable_access_log": False},
            "applications": [
                {
                    "name": "default",
                    "route_prefix": "/",
                    "import_path": "alignedserve.cluster.app:build",
                    "args": dict(self._tree),
                    "deployments": [{"name": name, "ray_actor_options": options[name]} for name in options],
                }
            ],
        }

    def __enter__(self) -> Self:
        nodes = self.nodes
        file = nodes.folder / "serve.yaml"
        file.write_text(yaml.safe_dump(self._application()))
        address = f"{nodes.head.address}:{GCS_PORT}"
        environment = nodes._environment_of(0)
        self._process = nodes.head.start(
            [*_SERVE, "run", "--address", address, str(file)], environment, nodes.folder / "serve.log"
        )
        self.http = httpx.Client(
            transport=httpx.HTTPTransport(uds=nodes.forward(HTTP_PORT)), base_url="http://head", timeout=60.0
        )
        try:
            self.grpc_address = f"unix:{nodes.forward(GRPC_PORT)}"
            self.start_s = self.wait_ready()
        except BaseException:
            self.http.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.http.close()

    @property
    def output(self) -> str:
        return (self.nodes.folder / "serve.log").read_text(errors="replace")

    def ready(self) -> bool:
        """Whether every expected role is ready."""
        try:
            health = self.http.get("/health", timeout=5.0)
        except httpx.TransportError:
            return False
        return health.status_code == 200 and health.json().get("missing") == []

    def wait_ready(self, timeout_s: float = READY_WITHIN_S) -> float:
        """Wait until `ready`. Returns the seconds. Raises TimeoutError with the missing roles."""
        try:
            return self.nodes.wait(self.ready, "the cluster is not ready", timeout_s)
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {self.output[-3000:]}") from None

    def status(self) -> dict[str, Any]:
        """The output of `alignedserve status --json`."""
        answer: dict[str, Any] = self.http.get("/alignedserve/status").raise_for_status().json()
        return answer

    def metrics(self) -> str:
        """The metrics of every role as Prometheus text."""
        return self.http.get("/metrics").raise_for_status().text

    def check_integrity(self) -> None:
        """All processes check their accounting. Raises AccountingError if a count does not match."""
        found = self.http.get("/alignedserve/integrity").raise_for_status().json()
        if not found["sound"]:
            raise AccountingError(f"{[book for book in found['books'] if book['problem']]}")
