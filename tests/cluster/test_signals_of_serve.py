"""What a terminal and an operator send to `alignedserve serve`: at its start, while it serves, and more than once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from alignedserve.cluster.launch.descendants import Descendants
from support.serving import FakeServeProcess

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

ENDS_WITHIN_S = 30.0
ENDS_SLOWLY = {"FAKE_DECODE": "end=60"}


@pytest.fixture(autouse=True)
def own_runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALIGNEDSERVE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path / "run"


class Foreground(FakeServeProcess):
    """In a session and a process group of its own, as a terminal's foreground job; `nohup`: ignoring SIGHUP."""

    def __init__(self, *arguments: str, environment: Mapping[str, str], nohup: bool = False) -> None:
        super().__init__(*arguments, environment=environment)
        # These tests may themselves run under nohup: a signal that is ignored stays so in child processes.
        self._before = ("setsid", "nohup") if nohup else ("setsid", "env", "--default-signal=HUP")

    @property
    def command(self) -> Sequence[str]:
        return (*self._before, *super().command)

    def send(self, number: int) -> None:
        """To the whole process group, as a terminal does."""
        os.killpg(self.process.pid, number)


def wait_until(holds: Callable[[], object], server: Foreground, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert server.process.poll() is None, server.output
        assert time.monotonic() < deadline, server.output
        time.sleep(0.02)


def ends(server: Foreground, within_s: float, *, status: int) -> None:
    """The command ends in time; every process that it has started is gone then, by itself."""
    descendants, begun = Descendants(), time.monotonic()
    while server.process.poll() is None:
        descendants.note()
        assert time.monotonic() < begun + within_s, server.output
        time.sleep(0.05)
    assert server.process.returncode == status, server.output
    assert descendants.end(5.0) == 0
    assert list(Path("/tmp").glob(f"as-{server.process.pid}-*")) == []
    assert "Traceback" not in server.output


@pytest.mark.parametrize("moment", ["Ray starts", pytest.param("roles load", marks=pytest.mark.slow)])
def test_ctrl_c_during_the_start_leaves_nothing_and_under_nohup_a_closed_terminal_ends_nothing(
    moment: str, own_runtime_dir: Path
) -> None:
    server = Foreground("--device", "cpu", environment={"FAKE_PREFILL": "never_ready=1"}, nohup=True)
    server.start()
    try:
        if moment == "Ray starts":
            wait_until(lambda: server.pids("gcs/gcs_server"), server)
            assert "Ray is up" not in server.output
        else:
            wait_until(lambda: "prefill-0      loading" in server.output, server)
        server.send(signal.SIGHUP)
        time.sleep(0.5)
        assert "ending" not in server.output
        server.send(signal.SIGINT)
        ends(server, ENDS_WITHIN_S, status=0)
        assert "ending" in server.output
        assert "error" not in server.output
        assert not own_runtime_dir.exists() or list(own_runtime_dir.iterdir()) == []
    finally:
        server.stop()


@pytest.mark.slow
def test_a_closed_terminal_ends_it_and_a_third_signal_kills_what_does_not_end() -> None:
    with Foreground("--device", "cpu", environment=ENDS_SLOWLY) as server:
        server.send(signal.SIGHUP)
        wait_until(lambda: "ending" in server.output, server)
        server.send(signal.SIGTERM)
        time.sleep(1.0)
        assert server.process.poll() is None, "two signals let what is slow end by itself"
        server.send(signal.SIGINT)
        ends(server, 5.0, status=1)
