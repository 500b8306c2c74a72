"""Keeps one node's fork server running."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from alignedserve.cluster.launch import fork_client
from alignedserve.cluster.launch.environment import role_environment
from alignedserve.cluster.launch.fork_server import UNSUITABLE
from alignedserve.cluster.launch.processes import is_stopped
from alignedserve.cluster.supervisor.plan import SPARE, SPARED_ROLES
from alignedserve.control.runtime import ROLES, RoleSettings

logger = logging.getLogger(__name__)

LOOK_S = 0.5
PAUSE_S = 1.0  # between two servers
MODULES = (
    "alignedserve.cluster.launch.actors",
    "alignedserve.cluster.launch.spare",
    *map(ROLES.module, SPARED_ROLES),
)


class ForkKeeper:
    """Starts the fork server of this process's node, and another one when it has ended or is stopped."""

    def __init__(self, path: str, environment: Mapping[str, str], modules: Sequence[str] = MODULES) -> None:
        self.path = path  # of its socket
        self._environment = dict(environment)
        self._modules = modules
        self._server: subprocess.Popen[bytes] | None = None  # None until `start`
        self._changing = threading.Lock()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of the server that was started last."""
        return None if self._server is None else self._server.pid

    @property
    def command(self) -> str:
        """What runs Python on this node by way of the fork server, as Ray's `py_executable`."""
        return shlex.join([sys.executable, "-S", "-E", fork_client.__file__, self.path])

    def start(self) -> None:
        """Start the server, unless it has been started."""
        with self._changing:
            if self._server is None:
                self._server = self._start()
                threading.Thread(target=self._keep, name="fork server", daemon=True).start()

    def close(self) -> None:
        """End the server. Its children stay."""
        with self._changing:
            self._closed = True
            if self._server is not None:
                self._server.kill()
                self._server.wait()
        Path(self.path).unlink(missing_ok=True)

    def _start(self) -> subprocess.Popen[bytes]:
        # Its stdin closes when this process ends. Ray kills the process group of a worker that has ended, so the server
        # has its own: its children shall stay.
        command = [sys.executable, "-m", "alignedserve.cluster.launch.fork_server", self.path, *self._modules]
        return subprocess.Popen(command, env=self._environment, stdin=subprocess.PIPE, start_new_session=True)

    def _keep(self) -> None:
        assert self._server is not None
        while (status := self._wait()) != UNSUITABLE:
            time.sleep(PAUSE_S)
            with self._changing:
                if self._closed:
                    return
                logger.warning("the fork server has ended (status %d): starting another", status)
                self._server = self._start()
        logger.warning("the instances of this node start without a fork server")

    def _wait(self) -> int:
        """The server's exit status."""
        assert self._server is not None
        while True:
            try:
                return self._server.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                if is_stopped(self._server.pid):
                    self._server.kill()


def fork_environment(settings: RoleSettings) -> dict[str, str]:
    """Variables of the fork server that a node agent with these settings starts, as an instance's on this node."""
    environment = {**os.environ, **role_environment(RoleSettings(**{**settings.to_dict(), "role": SPARE}))}
    environment.pop("MALLOC_ARENA_MAX", None)  # the node agent's own
    return environment | {
        "OPENBLAS_NUM_THREADS": "1",  # NumPy would start threads when it is imported
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # to look for GPUs must not initialise CUDA
        "RAY_worker_niceness": "0",  # Ray adds its niceness to that of the parent, which has it already
    }
