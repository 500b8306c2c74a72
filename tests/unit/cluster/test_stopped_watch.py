"""A process of the command that stays stopped is ended. If nothing restarts it, the command ends."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

from alignedserve.cluster.launch.descendants import Descendants
from alignedserve.cluster.serve.stopped_processes import StoppedWatch


@pytest.mark.parametrize(
    ("name", "after_s", "said"),
    [
        ("ray::ServeController", 0.3, "was stopped for 0.3 s, and was ended: Ray starts a new one"),
        ("/bin/haproxy", 0.3, "was stopped for 0.3 s, and was ended: Ray starts a new one"),
        ("/bin/raylet", 0.6, "was stopped for 0.6 s, and was ended"),
        ("gcs_server", 0.6, "was stopped for 0.6 s, and was ended"),
        ("vim", None, ""),
    ],
)
def test_one_that_stays_stopped_is_ended(name: str, after_s: float | None, said: str) -> None:
    with subprocess.Popen([name, "60"], executable="/bin/sleep") as process:
        try:
            watch = StoppedWatch(Descendants(), after_s=0.3, unreplaced_s=0.6)
            assert watch.look() == []
            process.send_signal(signal.SIGSTOP)
            lines, begun_s = [], time.monotonic()
            while not lines and time.monotonic() - begun_s < (10.0 if after_s else 1.0):
                lines = watch.look()
                time.sleep(0.02)
            assert lines == ([f"{name.rpartition('/')[2]} (pid {process.pid}) {said}"] if said else [])
            if after_s:
                assert time.monotonic() - begun_s >= after_s
                assert process.wait(10.0) == -signal.SIGKILL
        finally:
            process.kill()
