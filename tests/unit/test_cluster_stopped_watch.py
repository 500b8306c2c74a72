"""What was started for the command and stays stopped is ended, where somebody starts it again."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

from alignedserve.cluster.descendants import Descendants
from alignedserve.cluster.stopped_watch import StoppedWatch


@pytest.mark.parametrize(("name", "ended"), [("ray::ServeController", True), ("/bin/haproxy", True), ("raylet", False)])
def test_one_that_stays_stopped_is_ended_where_somebody_replaces_it(name: str, ended: bool) -> None:
    with subprocess.Popen([name, "60"], executable="/bin/sleep") as process:
        try:
            watch = StoppedWatch(Descendants(), after_s=0.3)
            assert watch.look() == []
            process.send_signal(signal.SIGSTOP)
            said, begun_s = [], time.monotonic()
            while not said and time.monotonic() - begun_s < (10.0 if ended else 1.0):
                said = watch.look()
                time.sleep(0.02)
            shown = name.rpartition("/")[2]
            assert said == ([f"{shown} (pid {process.pid})"] if ended else [])
            if ended:
                assert time.monotonic() - begun_s >= 0.3
                assert process.wait(10.0) == -signal.SIGKILL
        finally:
            process.kill()
