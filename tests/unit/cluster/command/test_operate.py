"""`alignedserve restart` and `wait-idle`: what they order, show and wait for."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from alignedserve.cluster.cli import operate
from alignedserve.cluster.cli.operate import GONE_AFTER_S, RunningCluster, wait_idle
from alignedserve.errors import AlignedServeError, UnavailableError

URL = "http://gateway:8000"
ORDER: dict[str, Any] = {
    "since_unix_s": 5.0,
    "roles": ["decode", "scheduler"],
    "doing": "",
    "done": False,
    "failure": "",
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Cluster(RunningCluster):
    """Returns each status in turn, and then repeats the last one."""

    said: list[dict[str, Any] | None]
    orders: list[tuple[str, dict[str, Any]]]

    def status(self) -> dict[str, Any] | None:
        said = self.said.pop(0) if len(self.said) > 1 else self.said[0]
        return said if said is None else {"restart": {**ORDER, **said}}

    def order(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        self.orders.append((name, body))
        return ORDER


def restart(monkeypatch: pytest.MonkeyPatch, said: list[dict[str, Any] | None], timeout_s: float = 30.0) -> Cluster:
    cluster = Cluster("http://here", "", "", frozenset())
    object.__setattr__(cluster, "said", said)
    object.__setattr__(cluster, "orders", [])
    monkeypatch.setattr(operate, "find_cluster", lambda url, key_file: cluster)
    monkeypatch.setattr(operate, "POLL_S", 0.0)
    assert operate.restart(["decode", "scheduler"], None, timeout_s, None) == 0
    return cluster


def test_each_step_is_shown_once_also_without_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier: dict[str, Any] = {"since_unix_s": 1.0, "done": True}
    steps: list[dict[str, Any] | None] = [
        earlier,
        {"doing": "decode-0 drains"},
        {"doing": "decode-0 drains"},
        None,
        {"doing": "scheduler-0 starts"},
    ]
    cluster = restart(monkeypatch, [*steps, {"done": True}])
    assert cluster.orders == [("restart", {"roles": ["decode", "scheduler"]})]
    assert capsys.readouterr().out.splitlines() == [
        "http://here: restarting decode, scheduler",
        "http://here: decode-0 drains",
        "http://here: scheduler-0 starts",
        "http://here: all processes of these roles were replaced",
    ]


def test_a_terminal_shows_a_bar_of_the_processes_that_were_replaced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(ORDER, "processes", 3)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    restart(monkeypatch, [{"doing": "decode-0 drains", "replaced": 0}, {"doing": "", "replaced": 2}, {"done": True}])
    bars = [bar for bar in terminal.getvalue().split("\r") if "decode-0 drains" in bar]
    assert " 0/3 " in bars[0]
    assert " 2/3 " in bars[-1]
    assert "drains" not in capsys.readouterr().out


def test_why_it_has_stopped_is_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AlignedServeError, match="scheduler-0 does not start: no memory"):
        restart(monkeypatch, [{"done": True, "failure": "scheduler-0 does not start: no memory"}])


def test_it_waits_no_longer_than_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnavailableError, match="decode-0 drains"):
        restart(monkeypatch, [{"doing": "decode-0 drains"}], timeout_s=0.05)


# ---- wait-idle


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Gateway:
    """Answers with one count of open requests after another, and repeats the last. None: there is no answer.

    `alone`: the number of first answers without the supervisor, which has the other gateways' counts.
    """

    def __init__(self, *counts: int | None, alone: int = 0) -> None:
        self._counts = list(counts)
        self._alone = alone

    def metrics(self, url: str, timeout_s: float) -> str:
        assert url == URL
        assert timeout_s > 0
        count = self._counts.pop(0) if len(self._counts) > 1 else self._counts[0]
        if count is None:
            raise UnavailableError(f"{url} does not answer")
        self._alone -= 1
        if self._alone >= 0:
            return f'alignedserve_gateway_open_requests{{instance="gateway-0"}} {count}'
        return "alignedserve_role_starts_total 4\n" + "\n".join(
            f'alignedserve_gateway_open_requests{{instance="gateway-{number}"}} {share}'
            for number, share in enumerate((count, 0))
        )


def ask(clock: Clock, gateway: Gateway, timeout_s: float = 60.0) -> int:
    return wait_idle(URL, timeout_s, gateway.metrics, clock, clock.sleep)


def test_it_returns_when_the_last_request_of_the_cluster_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    assert ask(clock, Gateway(2, 1, 1, 0)) == 0
    assert clock.now == 1.5
    assert capsys.readouterr().out == f"{URL}: no request is open\n"


def test_it_gives_up_at_its_limit_and_says_how_many_are_open(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    assert ask(clock, Gateway(3), timeout_s=10.0) == 1
    assert clock.now == 10.0
    assert "3 requests are open after 10 s" in capsys.readouterr().out


def test_a_proxy_that_is_replaced_meanwhile_ends_no_wait() -> None:
    clock = Clock()
    assert ask(clock, Gateway(1, None, None, 1, 0)) == 0
    assert clock.now == 2.0


def test_a_cluster_that_is_gone_is_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    assert ask(clock, Gateway(None)) == 0
    assert clock.now == GONE_AFTER_S
    assert "nothing to wait for" in capsys.readouterr().out


def test_one_gateways_own_page_says_nothing_of_the_others() -> None:
    clock = Clock()
    assert ask(clock, Gateway(0, 0, 3, 0, alone=2)) == 0
    assert clock.now == 1.5


def test_without_a_supervisor_it_says_that_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    assert ask(clock, Gateway(0, alone=1000), timeout_s=10.0) == 1
    assert clock.now == 10.0
    assert "an unknown number of requests are open after 10 s" in capsys.readouterr().out
