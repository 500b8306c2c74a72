"""Progress of `simulate` and `profile`: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import sys
import time

import pytest

from alignedserve.cluster.cli import progress
from alignedserve.cluster.cli.progress import for_about
from alignedserve.simulator.progress import Steps


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run_two() -> None:
    with Steps(2, "run") as steps:
        steps.begin("[1/2] aligned")
        steps.line("3 refused")
        steps.begin("[2/2] fcfs")


def test_elsewhere_each_step_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    run_two()
    with for_about(0.1, "measuring"):
        pass
    assert capsys.readouterr().err == "[1/2] aligned\n3 refused\n[2/2] fcfs\nmeasuring\n"


def test_on_a_terminal_a_bar_shows_the_step_and_how_many_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    run_two()
    shown = terminal.getvalue()
    assert "3 refused\n" in shown
    last = [line for line in shown.split("\r") if "fcfs" in line][-1]
    assert "1/2" in last
    assert "50%" in last


def test_on_a_terminal_work_of_a_known_length_shows_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "TICK_S", 0.001)
    with for_about(1.0, "measuring"):
        until_s = time.monotonic() + 20
        while "1 of about 1 s" not in terminal.getvalue() and time.monotonic() < until_s:
            time.sleep(0.01)
    assert "0 of about 1 s" in terminal.getvalue()
    assert "1 of about 1 s" in terminal.getvalue()
