"""Keeps one node's fork server running."""

from __future__ import annotations

import logging
import os
import select
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from alignedserve.cluster.launch import fork_client
from alignedserve.cluster.launch.environment import role_environment
from alignedserve.cluster.launch.fork_server import NEW, UNSUITABLE
from alignedserve.cluster.launch.processes import is_stopped
from alignedserve.cluster.supervisor.plan import SPARE, SPARED_ROLES
from alignedserve.control.runtime import ROLES, RoleSettings
from alignedserve.ranks.forks import RANKS_VARIABLE
from alignedserve.transfer.wire import MAX_SOCKET_PATH_BYTES

logger = logging.getLogger(__name__)

LOOK_S = 0.5
PAUSE_S = 1.0  # between two servers; doubled while none gets ready
MOST_PAUSE_S = 60.0
READY_WITHIN_S = 120.0
READ_BYTES = 64
# With it Ray would end every fork whose fork server ends.
SUBREAPER = "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper"
MODULES = (
    "alignedserve.cluster.launch.actors",
    "alignedserve.cluster.launch.spare",
    *map(ROLES.module, SPARED_ROLES),
    "alignedserve.engine.parallel.rank_main",
)


class ForkKeeper:
    """Starts the fork server of this process's node, and another one when it has ended, is stopped, or is not ready in
    time.
    """

    def __init__(self, path: str, environment: Mapping[str, str], modules: Sequence[str] = MODULES) -> None:
        self.path = path  # of its socket
        self.ready = threading.Event()  # a server has been ready
        self.given_up = threading.Event()  # no server can fork here
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
        return shlex.join([sys.executable, "-I", "-S", fork_client.__file__, self.path])

    def start(self) -> None:
        """Start the server, unless it has been started."""
        with self._changing:
            if self._server is not None or self.given_up.is_set():
                return
            if why := self._impossible():
                logger.warning("the instances of this node start without a fork server: %s", why)
                self.given_up.set()
                return
            self._server = self._start()
            threading.Thread(target=self._keep, name="fork server", daemon=True).start()

    def wait_ready(self, timeout_s: float) -> bool:
        """Whether a server is, or was, ready."""
        until = time.monotonic() + timeout_s
        while not self.ready.wait(LOOK_S):
            if self.given_up.is_set() or time.monotonic() > until:
                return False
        return not self.given_up.is_set()

    def close(self) -> None:
        """End the server. Its children stay."""
        with self._changing:
            self._closed = True
            if self._server is not None:
                self._server.kill()
                self._server.wait()
        Path(self.path).unlink(missing_ok=True)

    def _impossible(self) -> str:
        if len(os.fsencode(self.path + NEW)) > MAX_SOCKET_PATH_BYTES:
            return f"the path of its socket would be too long: {self.path}"
        if self._environment.get(SUBREAPER, "").lower() in ("1", "true"):
            return f"{SUBREAPER} is set"
        return ""

    def _start(self) -> subprocess.Popen[bytes]:
        # Its stdin closes when this process ends. Ray kills the process group of a worker that has ended, so the server
        # has its own: its children shall stay.
        command = [sys.executable, "-P", "-m", "alignedserve.cluster.launch.fork_server", self.path, *self._modules]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=self._environment, stdin=pipe, stdout=pipe, start_new_session=True)

    def _keep(self) -> None:
        assert self._server is not None
        pause_s = PAUSE_S
        while True:
            was_ready = self._follow(self._server)
            status = self._server.wait()
            if status == UNSUITABLE:
                logger.warning("the instances of this node start without a fork server")
                self.given_up.set()
                return
            pause_s = PAUSE_S if was_ready else min(2 * pause_s, MOST_PAUSE_S)
            time.sleep(pause_s)
            with self._changing:
                if self._closed:
                    return
                logger.warning("the fork server has ended (status %d): starting another", status)
                try:
                    self._server = self._start()
                except OSError as error:  # its pid stays that of the last one, which has ended
                    logger.warning("the fork server cannot be started: %s", error)

    def _follow(self, server: subprocess.Popen[bytes]) -> bool:
        """Returns when the server has ended, if necessary because it is ended here: whether it was ready."""
        assert server.stdout is not None
        begun_s, ready = time.monotonic(), False
        while server.poll() is None:
            if ready:
                time.sleep(LOOK_S)
            elif select.select([server.stdout], [], [], LOOK_S)[0]:
                if not os.read(server.stdout.fileno(), READ_BYTES):
                    break  # it is about to end
                ready = True
                self.ready.set()
            late = not ready and time.monotonic() - begun_s > READY_WITHIN_S
            if late or is_stopped(server.pid) or (ready and not Path(self.path).exists()):
                server.kill()
                break
        server.stdout.close()
        return ready


def fork_environment(settings: RoleSettings) -> dict[str, str]:
    """Variables of the fork server that a node agent with these settings starts, as an instance's on this node."""
    environment = {**os.environ, **role_environment(RoleSettings(**{**settings.to_dict(), "role": SPARE}))}
    environment.pop("MALLOC_ARENA_MAX", None)  # the node agent's own
    environment.pop(RANKS_VARIABLE, None)  # of the processes that it forks, not its own
    return environment | {
        "OPENBLAS_NUM_THREADS": "1",  # NumPy would start threads when it is imported
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # Ray adds the paths of the application
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # to look for GPUs must not initialise CUDA
        "RAY_worker_niceness": "0",  # Ray adds its niceness to that of the parent, which has it already
    }
