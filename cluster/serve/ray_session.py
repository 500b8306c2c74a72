"""Starts Ray and Serve, or joins the Ray cluster that RAY_ADDRESS names, and ends what it started."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from alignedserve.cluster.runtime_dir import temp_dir
from alignedserve.cluster.serve import haproxy, haproxy_exec
from alignedserve.config import Config
from alignedserve.config_sources import from_tree
from alignedserve.errors import AlignedServeError, ConfigError
from alignedserve.gateway.serve import ray_private, serve_ports
from alignedserve.memory import usable_cores
from alignedserve.proc_stat import is_alive

GRPC_SERVICERS = ["alignedserve.proto.inference_pb2_grpc.add_InferenceServicer_to_server"]
OBJECT_STORE_BYTES = 80 << 20  # the least that Ray takes; nothing of ours goes through it
LOOPBACK = "127.0.0.1"
OLD_SESSION_S = 24 * 3600.0

# Set before Ray is imported, and inherited by the processes that it starts.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_worker_niceness": "0",  # at Ray's default of 15, workers get a thirtieth of another process's CPU time
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.3",  # a proxy is replaced after the third failed check
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "2",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",  # a proxy that starts on a busy machine is not ended meanwhile
}
# For replicas only. Handles in this process, which has no event loop, use their router's loop.
REPLICA_ENVIRONMENT = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}


class RaySession:
    """`owned` tells whether this session starts and ends Ray. All methods block.

    `start`, `deploy`, `drain` and `stop` are called by one thread; the others by any, but not after `stop` has begun.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._address = os.environ.get("RAY_ADDRESS", "").strip()
        self.owned = self._address in ("", "local")
        self.app_name = config.cluster.name
        self._folder = temp_dir() / "ray"
        self._started = False
        self._deployed = False
        self._serve_ran = False
        self._session_dir: Path | None = None
        self._haproxy: haproxy.HaProxyFolder | None = None
        self.note = ""  # what the user should know about the start

    @property
    def logs_dir(self) -> str:
        """The folder of the logs of Ray and of the processes in it."""
        return str(self._session_dir / "logs") if self._session_dir else ""

    def start(self) -> None:
        """Start or join Ray. Raises AlignedServeError if that fails."""
        for name, value in (ENVIRONMENT | self._proxy_environment()).items():
            os.environ.setdefault(name, value)
        if self.owned:
            os.environ.pop("RAY_ADDRESS", None)
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # or Ray writes one to the home folder
            self._clean_sessions()
        import ray
        import ray.serve

        for name, value in REPLICA_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        logging.getLogger("ray").setLevel(logging.ERROR)
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
        try:
            if self.owned:
                ray_private.leave_out_services()
                ray_private.stay_on_loopback()
                ray_private.own_process_groups()
                ray_private.set_worker_setup(serve_ports.set_up_worker)
                os.environ[serve_ports.GRPC_HOST] = self._grpc_host()
                options = common | {
                    "address": "local",
                    "include_dashboard": False,
                    "object_store_memory": OBJECT_STORE_BYTES,
                    **ray_private.init_options(LOOPBACK, self._folder),
                }
                _twice(lambda: ray.init(**options), ray.shutdown)
            else:
                ray.init(address=self._address, **common)
        except Exception as error:  # Ray raises a dozen types, from ConnectionError to plain Exception
            doing = (
                "Ray cannot be started"
                if self.owned
                else f"the Ray cluster at RAY_ADDRESS={self._address} cannot be joined"
            )
            raise AlignedServeError(f"{doing}: {_reason(error)}{_busy()}") from error
        self._started = True
        with contextlib.suppress(Exception):  # only for telling where logs are
            self._session_dir = ray_private.session_dir()

    def _proxy_environment(self) -> dict[str, str]:
        """Variables that select Serve's proxy. A Ray cluster that is joined has its own."""
        if not self.owned or not haproxy.wanted(self._config):
            return {}
        self._haproxy = haproxy.prepare(self._config)
        if self._haproxy is None:
            self.note = "HAProxy does not run on this machine: Serve's Python proxy, which is slower, is used instead"
            os.environ.pop("RAY_SERVE_ENABLE_HA_PROXY", None)
            return {}
        environment = self._haproxy.environment(self._config)
        for name in haproxy.OURS:
            os.environ[name] = environment[name]  # overrides existing values
        return environment

    def deploy(self) -> None:
        """Start Serve if it does not run, and deploy the application. Returns when its replicas are up."""
        from ray import serve

        from alignedserve.config_sources import to_tree

        try:
            self._serve_ran = not self.owned and ray_private.serve_runs()
            self._refuse_taken_name(serve)
            _twice(lambda: self._start_serve(serve), lambda: None)
            logging.getLogger("ray.serve").setLevel(logging.ERROR)
            self._deployed = True
            serve.run(
                self.build(to_tree(self._config)),
                name=self.app_name,
                route_prefix=self._config.gateway.route_prefix,
                blocking=False,
            )
        except AlignedServeError:
            raise
        except Exception as error:  # as above
            reason = _replica_reason(self.app_name) or _reason(error)
            raise AlignedServeError(f"the application could not be deployed: {reason}{_busy()}") from error

    def _start_serve(self, serve: Any) -> None:
        serve.start(
            http_options={"host": self._serve_host(), "port": self._config.gateway.port},
            grpc_options={"port": self._config.gateway.grpc_port, "grpc_servicer_functions": GRPC_SERVICERS},
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )

    def _serve_host(self) -> str:
        host = self._config.gateway.host
        return host if self._haproxy is None else haproxy.serve_host(host)

    def _grpc_host(self) -> str:
        """The host on which Serve's own gRPC ports listen: loopback if HAProxy is in front of them."""
        host = self._config.gateway.host
        if self._haproxy is not None:
            return LOOPBACK
        return f"[{host or '::'}]" if ":" in host or not host else host

    @staticmethod
    def build(tree: dict[str, Any]) -> Any:
        """The Serve application. Tests (`support.fake_serve`) replace it."""
        from alignedserve.cluster.app import application

        return application(from_tree(tree), wait_ready=False)

    def progress(self, timeout_s: float = 1.0) -> dict[str, Any] | None:
        """The supervisor's progress; None if it does not answer. The call also tells it that this command ends it."""
        return self._ask("progress", timeout_s, os.getpid(), socket.gethostname())

    def drain(self, grace_s: float) -> dict[str, Any] | None:
        """Make gateways refuse new requests and finish the open ones within `grace_s` seconds.

        Returns None if the supervisor does not answer. Call it again until `drained` is true; `open` is the number of
        requests left.
        """
        return self._ask("drain", 5.0, grace_s)

    def _ask(self, method: str, timeout_s: float, *arguments: Any) -> dict[str, Any] | None:
        if not self._deployed:
            return None
        from ray import serve

        try:
            handle = serve.get_deployment_handle("Supervisor", self.app_name)
            said: dict[str, Any] = getattr(handle, method).remote(*arguments).result(timeout_s=timeout_s)
        except Exception:  # it is not up yet, or has ended: the caller decides how long to wait
            return None
        return said

    def url(self) -> str:
        """The URL of the HTTP API."""
        from alignedserve.cluster.app import http_url

        return http_url(self._config)

    def live_url(self) -> str:
        """The URL where `/live`, `/health` and `/metrics` answer however many clients connect; "" without HAProxy."""
        if self._haproxy is None:
            return ""
        front = urlsplit(self.url())
        return front._replace(netloc=f"{front.netloc.rpartition(':')[0]}:{os.environ[haproxy_exec.LIVE]}").geturl()

    def dead_part(self) -> str:
        """The name of a process of Ray itself that was started here and has ended; "" if there is none.

        Without its raylet or GCS a cluster goes on serving for a while, but cannot replace processes.
        """
        if not self.owned or not self._started:
            return ""
        with contextlib.suppress(Exception):  # Ray may be on its way out
            return next(iter(ray_private.dead_processes()), "")
        return ""

    def is_alive(self) -> bool:
        """Whether the application is still deployed."""
        import ray
        from ray import serve

        try:
            if not self._started or not ray.is_initialized():  # `serve.status` would start Ray
                return False
            return self.app_name in serve.status().applications
        except Exception:  # whatever the cause, Serve does not answer
            return False

    def stop(self) -> None:
        """End the application, and Serve and Ray if they were started here."""
        if not self._started:
            return
        import ray
        from ray import serve

        if self._deployed:
            with contextlib.suppress(Exception):  # go on with the rest, whatever fails
                serve.delete(self.app_name)
            with contextlib.suppress(Exception):
                if self.owned or not (self._serve_ran or serve.status().applications):
                    serve.shutdown()
        with contextlib.suppress(Exception):
            ray.shutdown()

    def close(self) -> None:
        """Remove the files of HAProxy, which has ended."""
        if self._haproxy is not None:
            self._haproxy.remove()
            self._haproxy = None

    def forget_session(self) -> None:
        """Remove Ray's session folder, after a run without errors."""
        if self.owned and self._session_dir is not None:
            shutil.rmtree(self._session_dir, ignore_errors=True)

    def _refuse_taken_name(self, serve: Any) -> None:
        if not self.owned and self.app_name in serve.status().applications:
            raise ConfigError(
                f"the Ray cluster already runs an application named {self.app_name!r}; set cluster.name to another name"
            )

    def _clean_sessions(self) -> None:
        """Remove folders of sessions that ended over a day ago. A session's name ends in the pid that started it."""
        for session in self._folder.glob("session_*_*"):
            pid = session.name.rpartition("_")[2]
            with contextlib.suppress(OSError):
                old = time.time() - session.stat().st_mtime > OLD_SESSION_S
                if session.is_dir() and not session.is_symlink() and pid.isdigit() and old and not is_alive(int(pid)):
                    shutil.rmtree(session, ignore_errors=True)


def _replica_reason(app_name: str) -> str:
    """Why a replica could not start: the last line of the traceback that Serve keeps; "" if there is none."""
    from ray import serve

    with contextlib.suppress(Exception):
        for deployment in serve.status().applications[app_name].deployments.values():
            lines = [line.strip() for line in deployment.message.splitlines() if line.strip()]
            found = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b.*: ", line)]
            if found:
                return re.sub(r"^[\w.]*\.", "", re.sub(r"\x1b\[[0-9;]*m", "", found[-1]))
    return ""


def _reason(error: BaseException) -> str:
    """A readable line of an error. Ray's errors contain a coloured traceback, whose last line has the cause."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    traced = any(line.startswith(("Traceback", "File ")) for line in lines)
    return lines[-1] if traced else lines[0]


def _twice(begin: Callable[[], object], clear_up: Callable[[], object]) -> None:
    """Call `begin`, and once more if it timed out: on a busy machine Ray's processes may exceed Ray's fixed limits."""
    try:
        begin()
    except Exception as error:  # Ray raises a dozen types
        if not any(sign in str(error) for sign in ("timed out", "died", "unavailable")):
            raise
        clear_up()
        begin()


def _busy() -> str:
    load, cores = os.getloadavg()[0], usable_cores()
    if load < 2 * cores:
        return ""
    return f" (this machine is busy: its load is {load:.0f} on {cores} cores; try again when it is lower)"
