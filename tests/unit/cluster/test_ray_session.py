"""Starting Ray on a machine that is busy."""

from __future__ import annotations

import pytest

from alignedserve.cluster.serve import ray_session


def test_what_did_not_come_up_in_time_is_begun_a_second_time() -> None:
    calls: list[str] = []

    def begin() -> None:
        calls.append("begin")
        if calls.count("begin") == 1:
            raise RuntimeError("The current node timed out during startup.")

    ray_session._twice(begin, lambda: calls.append("clear up"))
    assert calls == ["begin", "clear up", "begin"]


@pytest.mark.parametrize(("message", "times"), [("no such option", 1), ("the actor died unexpectedly", 2)])
def test_what_fails_for_good_fails(message: str, times: int) -> None:
    calls: list[str] = []

    def begin() -> None:
        calls.append("begin")
        raise ValueError(message)

    with pytest.raises(ValueError, match=message):
        ray_session._twice(begin, lambda: None)
    assert len(calls) == times


def test_a_busy_machine_is_named_with_its_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_session, "usable_cores", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (23.4, 0.0, 0.0))
    assert "its load is 23 on 2 cores" in ray_session._busy()
    monkeypatch.setattr("os.getloadavg", lambda: (1.0, 0.0, 0.0))
    assert ray_session._busy() == ""
