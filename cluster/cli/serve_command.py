"""`alignedserve serve`: deploys the application, shows its progress, waits, and ends what it started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

from alignedserve import __version__
from alignedserve.cluster.cli.console import Console
from alignedserve.cluster.launch.descendants import Descendants
from alignedserve.cluster.launch.gpus import count_gpus
from alignedserve.cluster.launch.preflight import (
    check_api_keys,
    check_batches,
    check_channel,
    check_cost_model,
    check_machine,
    check_model,
    check_pinned_prompts,
    check_ports,
    check_request_log,
    check_tls,
    cost_model_note,
    model_note,
    open_door_note,
    policy_note,
)
from alignedserve.cluster.records import fetch_json, read_records
from alignedserve.cluster.runtime_dir import clean_stale, temp_dir
from alignedserve.cluster.serve.front_watch import FrontWatch
from alignedserve.cluster.serve.ray_session import RaySession
from alignedserve.cluster.serve.stopped_processes import StoppedWatch
from alignedserve.cluster.supervisor.plan import MODEL_ROLES, resolve_device
from alignedserve.config import Config
from alignedserve.errors import AlignedServeError, UnavailableError
from alignedserve.gateway.tracing.start import check_traces
from alignedserve.model import resolve_model
from alignedserve.scheduler.systems import FOLDER_VARIABLE

POLL_S = 0.1
LOOK_S = 0.5
WATCH_S = 5.0
ATTEND_S = 1.0
SILENCE_S = 10.0  # without an answer for this long, the supervisor is not asked again
NEWS_S = 1.5  # maximum age of a gateway's number of open requests, which comes with its heartbeats
DRAIN_LATE_S = 3.0  # a gateway that has not drained this long after its time is not waited for
KILL_SIGNALS = 3  # the first signal drains, the second ends open requests, the third kills all processes
ASKED_S = 2.0  # a call to Ray that is under way at the end is waited for this long
CLEAR_UP_S = 3.0
CLEAN_END_S = 20.0  # processes that have not ended after this time are killed
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def serve(config: Config) -> int:
    """Serve until a signal arrives. Returns the exit status. Raises ConfigError or ModelError before any start."""
    os.environ.setdefault(FOLDER_VARIABLE, str(Path.cwd()))
    folder = check_model(config)
    check_api_keys(config)
    check_request_log(config)
    check_batches(config)
    check_pinned_prompts(config)
    check_cost_model(config)
    check_traces(config.traces)
    check_tls()
    config = _absolute(config, folder)
    session = RaySession(config)
    if session.owned:
        check_machine(config)
        check_ports(config)
        if note := check_channel(config):
            print(note, file=sys.stderr)
        clean_stale()
    return _ServeCommand(config, session).run(str(folder))


def _absolute(config: Config, folder: Path) -> Config:
    """The configuration with absolute paths, because workers run in another folder, and with the downloaded model."""
    model = config.model
    if model.path != "tiny":
        name = config.served_model_name
        model = replace(model, path=str(folder), served_name=name)
    if model.chat_template:
        model = replace(model, chat_template=str(Path(model.chat_template).expanduser().resolve()))
    scheduler = config.scheduler
    if scheduler.cost_model and Path(scheduler.cost_model).expanduser().exists():
        scheduler = replace(scheduler, cost_model=str(Path(scheduler.cost_model).expanduser().resolve()))
    log = config.log
    if log.dir:
        log = replace(log, dir=str(Path(log.dir).expanduser().resolve()))
    gateway = config.gateway
    if gateway.api_key_file:
        gateway = replace(gateway, api_key_file=str(Path(gateway.api_key_file).expanduser().resolve()))
    if gateway.request_log:
        gateway = replace(gateway, request_log=str(Path(gateway.request_log).expanduser().resolve()))
    pool = config.kv_pool
    if pool.pinned_prompts:
        pool = replace(pool, pinned_prompts=str(Path(pool.pinned_prompts).expanduser().resolve()))
    if pool.disk_path:
        pool = replace(pool, disk_path=str(Path(pool.disk_path).expanduser().resolve()))
    batches = config.batches
    if batches.folder:
        batches = replace(batches, folder=str(Path(batches.folder).expanduser().resolve()))
    return replace(config, model=model, kv_pool=pool, scheduler=scheduler, log=log, gateway=gateway, batches=batches)


class _ServeCommand:
    """The main thread shows progress and waits. Other threads make blocking calls, so signals take effect at once.

    The thread that starts and stops Ray lives as long as the process, because the kernel ends Ray's own processes with
    the thread that started them (PR_SET_PDEATHSIG). Another thread asks Ray about the application: while Ray's GCS is
    stopped, such a call blocks for a minute.
    """

    def __init__(self, config: Config, session: RaySession) -> None:
        self._config = config
        self._session = session
        self._console = Console()
        self._descendants = Descendants()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self._stopping = threading.Event()
        self._signals = 0
        self._heard: SimpleQueue[int] = SimpleQueue()  # signals that have come, to be obeyed
        self._served = False
        self._nothing_open = True
        self._drained = threading.Event()
        self._failure: AlignedServeError | None = None
        self._broken = False  # whether Ray can no longer end processes
        self._asking = threading.Thread(target=self._ask, name="asking", daemon=True)
        self._front = threading.Thread(target=self._watch_front, name="front", daemon=True)  # once all roles are ready
        self._progress: dict[str, Any] | None = None  # the supervisor's last answer; None if it did not answer
        self._noted_s = 0.0  # when descendants were last noted (time.monotonic)
        self._gone = False  # whether Serve no longer has the application
        self._deployed = threading.Event()
        self._handle_signals_again = threading.Event()
        self._shown: dict[str, tuple[str, int]] = {}
        self._warned_s = 0.0  # of the last warning shown, by the supervisor's clock

    def run(self, folder: str) -> int:
        self._greet(folder)
        log = temp_dir() / f"serve-{os.getpid()}.log"
        self._console.divert(log)
        # Ray's workers import from this folder first, so it must not contain another `alignedserve`.
        os.chdir(temp_dir())
        self._handle_signals()
        threading.Thread(target=self._obey_signals, name="signals", daemon=True).start()
        self._worker.submit(self._start)
        threading.Thread(target=self._end_stopped, name="stopped", daemon=True).start()
        self._asking.start()
        try:
            if self._wait_ready():
                self._served = True
                self._announce()
                self._wait_for_end()
        except Exception as error:
            traceback.print_exc()
            self._failure = AlignedServeError(f"{type(error).__name__}: {error}")
        status = 1 if self._failure is not None else 0
        if self._failure is not None:
            self._console.error(self._failure.message)
            if self._session.logs_dir:
                self._console.line(f"logs: {self._session.logs_dir}")
        self._end()
        if status == 0:
            self._session.forget_session()
            log.unlink(missing_ok=True)
        return status

    # ---- start

    def _start(self) -> None:
        """Start Ray and deploy. Runs in `_worker`."""
        try:
            self._session.start()
            self._handle_signals_again.set()
            begun = "Ray is up" if self._session.owned else "joined the Ray cluster of RAY_ADDRESS"
            self._console.step(f"{begun}; starting the gateway and the supervisor")
            if self._session.note:
                self._console.line(self._session.note)
            if not self._stopping.is_set():
                self._session.deploy()
        except AlignedServeError as error:
            self._failure = error
        finally:
            self._deployed.set()

    def _wait_ready(self) -> bool:
        """Wait until the gateway answers that it can serve. False if the start failed or was interrupted."""
        while not self._stopping.is_set():
            if self._handle_signals_again.is_set():  # ray.init has replaced the signal handlers
                self._handle_signals_again.clear()
                self._handle_signals()
            if self._failure is not None:
                return False
            progress = self._progress
            if progress is not None and self._show(progress):
                if self._front.ident is None:
                    self._front.start()  # also while the deployment waits for HAProxy
                if self._deployed.is_set() and self._answers():
                    return True
            if self._has_ended():
                return False
            self._stopping.wait(POLL_S)
        return False

    def _show(self, progress: dict[str, Any]) -> bool:
        """Show the processes. Returns whether all are ready."""
        self._show_processes(progress)
        if progress["failure"] is not None:
            self._failure = AlignedServeError(progress["failure"]["message"])
        return progress["state"] in ("ready", "degraded")

    def _show_processes(self, progress: dict[str, Any]) -> None:
        """Show a line for each warning, and for each process that loads the model, is ready, or could not start."""
        for at_s, text in progress["warnings"]:
            if at_s > self._warned_s:
                self._warned_s = at_s
                self._console.step(text)
        for role in progress["roles"]:
            loads = role["state"] == "loading" and role["role"] in MODEL_ROLES
            if loads or role["state"] in ("ready", "failed"):
                label = f"{role['id']:<14} {role['state']}"
                if self._shown.get(role["id"]) != (label, role["pid"]):
                    self._shown[role["id"]] = (label, role["pid"])
                    self._console.step(f"{label}  pid {role['pid']}  {role['holds']}".rstrip())
                elif loads and role["holds"]:
                    self._console.passing(f"{label}  {role['holds']}")

    def _answers(self) -> bool:
        try:
            health = fetch_json(self._url() + "/health", 2.0)
        except UnavailableError:
            return False
        return health.get("missing") == []

    def _url(self) -> str:
        return self._session.url()

    @property
    def _at_once(self) -> bool:
        """Whether all processes are to be killed."""
        return self._signals >= KILL_SIGNALS

    # ---- running

    def _wait_for_end(self) -> None:
        """Wait for a signal, for `alignedserve stop`, until the application is gone, or until Ray is broken."""
        while not self._stopping.wait(LOOK_S):
            if (progress := self._progress) is not None:
                self._show_processes(progress)
            if self._has_ended():
                return

    def _ask(self) -> None:
        """Asks Ray about the application until the end begins. Runs in a thread of its own."""
        looked_s = 0.0
        try:
            while self._failure is None and not self._stopping.wait(ATTEND_S if self._served else POLL_S):
                self._progress = self._session.progress()
                if self._deployed.is_set() and time.monotonic() - looked_s >= WATCH_S:
                    looked_s = time.monotonic()
                    self._gone = not self._session.is_alive()
        except Exception as error:
            traceback.print_exc()
            self._failure = self._failure or AlignedServeError(f"{type(error).__name__}: {error}")

    def _has_ended(self) -> bool:
        """Whether the cluster must end: by `alignedserve stop`, or because Ray or the application has ended."""
        if part := self._session.dead_part():
            self._broken = True
            self._failure = AlignedServeError(
                f"{part}, a process of Ray itself, has ended: the cluster cannot replace processes any more"
            )
            return True
        if self._failure is not None:
            return True
        progress = self._progress
        if progress is not None and progress["stop"]:
            self._console.line("ending: `alignedserve stop` was given")
            return True
        if time.monotonic() - self._noted_s >= WATCH_S:
            self._noted_s = time.monotonic()
            self._descendants.note()  # once a raylet has ended, its orphans can no longer be found
        if self._gone and not self._stopping.is_set():
            self._failure = AlignedServeError("the application has ended: it was deleted, or Ray has ended")
            return True
        return False

    def _end_stopped(self) -> None:
        """Ends stopped processes. It has its own thread, because calls to a stopped Serve controller block."""
        watch = StoppedWatch(Descendants())
        while True:
            try:
                for line in watch.look():
                    self._console.line(line)
            except OSError as error:  # for example no free file descriptor: try again
                self._console.line(f"cannot look for stopped processes: {error.strerror}")
                time.sleep(WATCH_S)
            time.sleep(LOOK_S)

    def _watch_front(self) -> None:
        """Has HAProxy replaced if it lets nothing through. It has its own thread, because a probe may wait."""
        if not (url := self._session.live_url()):
            return
        watch = FrontWatch(url, self._gateway_ready, Descendants())
        while not self._stopping.wait(LOOK_S):
            with contextlib.suppress(OSError):  # for example no free file descriptor: try again
                if line := watch.look():
                    self._console.line(line)

    def _gateway_ready(self) -> bool | None:
        if (progress := self._progress) is None:
            return None
        return any(role["role"] == "gateway" and role["state"] == "ready" for role in progress["roles"])

    # ---- end

    def _end(self) -> None:
        """End everything that was started. All of it has ended when this returns."""
        self._stopping.set()
        if not self._broken:
            self._asking.join(ASKED_S)
        ending = None if self._broken else self._worker.submit(self._stop)
        if ending is not None:
            self._drained.wait(self._config.gateway.drain_s + DRAIN_LATE_S)
            self._wait_stopped(ending)
        if self._session.owned:
            self._descendants.note()
            self._descendants.end(0.0 if self._at_once or self._broken else CLEAR_UP_S)
            read_records()  # removes records and sockets of clusters that have ended
        self._session.close()
        if ending is None or not ending.done():
            os._exit(1)  # Ray would wait for the processes that were just killed

    def _wait_stopped(self, ending: Future[None]) -> None:
        """Wait until Ray has stopped, or the time for it is over."""
        begun = time.monotonic()
        while not ending.done() and not self._at_once:
            # If the supervisor did not confirm the drain, gateways drain while Serve deletes the application. A second
            # signal cannot reach them then.
            patient = not self._nothing_open and self._signals < 2
            if time.monotonic() > begun + CLEAN_END_S + (self._config.gateway.drain_s if patient else 0.0):
                return
            wait([ending], timeout=POLL_S)

    def _stop(self) -> None:
        """Drain and stop. Runs in `_worker`, after `_start`."""
        if self._session.owned:
            self._descendants.note()
        try:
            self._drain()
        finally:
            self._drained.set()
        self._session.stop()

    def _drain(self) -> None:
        """Returns once no request is open, the time is over, or the supervisor does not answer."""
        if not self._served or self._failure is not None:
            return
        grace_s = self._config.gateway.drain_s
        begun = answered = time.monotonic()
        deadline = answered + grace_s + DRAIN_LATE_S
        told = self._nothing_open = False
        while time.monotonic() < min(deadline, answered + SILENCE_S) and not self._at_once:
            left = self._session.drain(0.0 if self._signals > 1 else grace_s)
            if left is None:
                time.sleep(POLL_S)
                continue
            answered = time.monotonic()
            if left["drained"]:
                self._nothing_open = True
                return
            if left["open"] and not told and time.monotonic() - begun > NEWS_S:
                told = True
                self._console.line(
                    f"{left['open']} open requests, {grace_s:g} s to finish; press Ctrl-C again to end them now"
                )
            time.sleep(POLL_S)

    def _handle_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored if it was started to outlive its terminal
            signal.signal(signal.SIGHUP, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._heard.put(number)  # nothing that takes a lock: the main thread, which this interrupts, may hold it

    def _obey_signals(self) -> None:
        while True:
            number = self._heard.get()
            self._signals += 1
            if self._signals == 1:
                self._console.line("\nending" if number == signal.SIGINT else "ending")
            elif self._signals == KILL_SIGNALS:
                self._drained.set()
            self._stopping.set()

    # ---- words

    def _greet(self, folder: str) -> None:
        cluster = self._config.cluster
        # The devices of a Ray cluster that was joined are known once the supervisor runs.
        device = resolve_device(self._config, count_gpus()) if self._session.owned else cluster.device
        self._console.line(
            f"alignedserve {__version__}: {self._config.served_model_name} ({folder}), {cluster.prefill} prefill and "
            f"{cluster.decode} decode instances, device {device}"
        )
        if note := model_note(Path(folder)):
            self._console.line(note)
        for note in (policy_note(self._config), cost_model_note(self._config)):
            if note:
                self._console.line(note)
        if note := open_door_note(self._config.gateway):
            self._console.line(note)

    def _announce(self) -> None:
        url = self._url()
        # The example is a completion: of text if the model has a tokenizer, else of token ids.
        folder = resolve_model(self._config.model.path, self._config.model.trust_remote_code)
        has_text = any((folder / name).is_file() for name in TOKENIZER_FILES)
        prompt = "Return a list of" if has_text else [1, 2, 3]
        body = {"model": self._config.served_model_name, "prompt": prompt, "max_tokens": 48, "stream": True}
        self._console.step("ready")
        gateway = self._config.gateway
        grpc_place = f", gRPC on {gateway.host}:{gateway.grpc_port}" if self._session.owned else ""
        self._console.line(f"serving {self._config.served_model_name} on {url}{grpc_place}")
        header = "-H 'Content-Type: application/json'"
        if self._config.gateway.api_key_file:
            header += " -H 'Authorization: Bearer KEY'"
        self._console.line(f"  curl -N {url}/v1/completions {header} -d '{json.dumps(body)}'")
        if live := self._session.live_url():  # clients cannot take all of its connections
            self._console.line(f"for probes, /live, /health and /metrics are also on {live}")
        if gateway.dashboard:
            self._console.line(f"watch it and try it at {url}/")
        if logs := self._config.log.dir or self._session.logs_dir:
            self._console.line(f"its processes log to {logs}")
        self._console.line("press Ctrl-C to end it")
