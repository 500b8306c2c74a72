"""`alignedserve restart`: what it orders, shows and waits for."""

from __future__ import annotations

from typing import Any

import pytest

from alignedserve.cluster.cli import restart_command
from alignedserve.cluster.cli.orders import RunningCluster
from alignedserve.errors import AlignedServeError, UnavailableError

ORDER = {"since_unix_s": 5.0, "roles": ["decode", "scheduler"], "doing": "", "done": False, "failure": ""}


class Cluster(RunningCluster):
    """Says one thing after the other, and then the last for ever."""

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
    monkeypatch.setattr(restart_command, "find_cluster", lambda url, key_file: cluster)
    monkeypatch.setattr(restart_command, "POLL_S", 0.0)
    assert restart_command.restart(["decode", "scheduler"], None, timeout_s, None) == 0
    return cluster


def test_each_step_is_shown_once_while_nobody_answers_too(
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
        "http://here: every process of them is new",
    ]


def test_why_it_has_stopped_is_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AlignedServeError, match="scheduler-0 does not start: no memory"):
        restart(monkeypatch, [{"done": True, "failure": "scheduler-0 does not start: no memory"}])


def test_it_waits_no_longer_than_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnavailableError, match="decode-0 drains"):
        restart(monkeypatch, [{"doing": "decode-0 drains"}], timeout_s=0.05)
