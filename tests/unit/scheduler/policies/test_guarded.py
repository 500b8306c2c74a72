"""A custom policy that raises or returns nonsense costs no request and no scheduler, and is reported by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alignedserve.cluster.cli.main import main
from alignedserve.config import SchedulerConfig
from alignedserve.errors import ConfigError
from alignedserve.request import RequestKey
from alignedserve.scheduler.core import events as ev
from alignedserve.scheduler.core.actions import Prefetch
from alignedserve.scheduler.core.alarm import ALARM_S
from alignedserve.scheduler.core.guarded_policy import MOST_FAULTS, GuardedPolicy
from alignedserve.scheduler.policies.base import BatchLimits, Entry
from alignedserve.scheduler.policies.fcfs import FcfsPolicy
from alignedserve.scheduler.policies.queue import QueuePolicy
from alignedserve.scheduler.systems import resolve
from support.core_cell import CoreCell, decode_report, key, only

STRANGER = Entry(RequestKey("stranger"), 5, 1, 0.0)
LIMITS = BatchLimits(10, 1, 3)


def broken(method: str, answer: Callable[..., Any]) -> type[FcfsPolicy]:
    """FCFS with one method replaced."""
    return type("Broken", (FcfsPolicy,), {method: lambda self, *given: answer(*given)})


def fail(*_: object) -> None:
    raise RuntimeError("poison")


def waiting(policy: GuardedPolicy, count: int = 4) -> list[Entry]:
    entries = [Entry(RequestKey(f"r{number}"), 10, 3, float(number)) for number in range(count)]
    for entry in entries:
        policy.insert(entry)
    return entries


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (fail, "poison"),
        (lambda *_: None, "NoneType"),
        (lambda *_: [], "empty"),
        (lambda *_: ["r0"], "str"),
        (lambda *_: [STRANGER], "stranger"),
        (lambda *_: [Entry(RequestKey("r0"), 10, 3, 0.0)] * 2, "twice"),
        (lambda *_: [Entry(RequestKey(f"r{n}"), 10, 3, 0.0) for n in range(4)], "exceed the limit"),
    ],
)
def test_what_is_no_batch_is_replaced_by_the_oldest_that_fit(answer: Callable[..., Any], said: str) -> None:
    policy = GuardedPolicy(SchedulerConfig(), "mine", broken("form", answer))
    entries = waiting(policy)
    assert policy.form(LIMITS, None, 1.0) == entries[:3]
    assert said in policy.faults.alarm(0.0)
    assert policy.faults.alarm(0.0).startswith("policy mine: 1 faults")


def test_a_batch_without_the_overdue_request_is_none() -> None:
    policy = GuardedPolicy(SchedulerConfig(), "mine", broken("form", lambda *_: [Entry(RequestKey("r1"), 10, 3, 0.0)]))
    waiting(policy)
    assert policy.form(LIMITS, RequestKey("r3"), 1.0)[0].key == RequestKey("r3")
    assert [entry.key for entry in policy.form(LIMITS, None, 1.0)] == [RequestKey("r1")]
    assert policy.faults.count == 1


def test_one_request_alone_may_be_larger_than_the_limits() -> None:
    policy = GuardedPolicy(SchedulerConfig(), "mine", FcfsPolicy)
    policy.insert(Entry(RequestKey("large"), 900, 50, 0.0))
    assert len(policy.form(LIMITS, None, 1.0)) == 1
    assert policy.faults.count == 0


def test_one_that_was_not_told_of_a_change_is_not_asked_any_more() -> None:
    policy = GuardedPolicy(SchedulerConfig(), "mine", broken("remove", fail))
    entries = waiting(policy)
    policy.remove(entries[0].key)
    assert policy.form(LIMITS, None, 1.0) == entries[1:4]
    assert "no longer called" in policy.faults.alarm(0.0)
    assert "no longer called" in policy.faults.alarm(ALARM_S + 1.0)
    assert policy.faults.count == 1
    policy.check_integrity()


def test_books_of_its_own_that_do_not_match_are_a_fault_of_it() -> None:
    policy = GuardedPolicy(SchedulerConfig(), "mine", broken("check_integrity", fail))
    waiting(policy)
    policy.check_integrity()
    assert re.fullmatch(
        rf"check_integrity: RuntimeError\('poison'\) \({re.escape(__file__)}:\d+\)", policy.faults.latest
    )
    policy.strict = True
    with pytest.raises(ConfigError, match="check_integrity"):
        policy.check_integrity()


def test_one_that_fails_all_the_time_is_asked_so_often() -> None:
    asked: list[int] = []
    policy = GuardedPolicy(SchedulerConfig(), "mine", broken("form", lambda *_: asked.append(1)))
    waiting(policy)
    for _ in range(3 * MOST_FAULTS):
        assert policy.form(LIMITS, None, 1.0)
    assert len(asked) == policy.faults.count == MOST_FAULTS


def test_the_log_says_where_it_raised(caplog: pytest.LogCaptureFixture) -> None:
    policy = GuardedPolicy(SchedulerConfig(), "mine", broken("form", fail))
    waiting(policy)
    policy.form(LIMITS, None, 1.0)
    assert "in fail\n" in caplog.text


def test_faults_are_told_for_a_minute() -> None:
    policy = GuardedPolicy(SchedulerConfig(), "mine", broken("form", fail))
    waiting(policy)
    assert policy.faults.alarm(0.0) == ""
    policy.form(LIMITS, None, 1.0)
    told = policy.faults.alarm(2.0)
    assert "1 faults" in told
    assert policy.faults.alarm(2.0 + ALARM_S) == told
    assert policy.faults.alarm(3.0 + ALARM_S) == ""
    policy.form(LIMITS, None, 90.0)
    assert "2 faults" in policy.faults.alarm(90.0)


def test_the_core_serves_on_and_says_whose_fault_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Path(__file__).stem
    monkeypatch.setitem(globals(), "Poison", broken("form", fail))
    monkeypatch.setattr("importlib.import_module", lambda name: __import__("sys").modules[__name__])
    cell = CoreCell(policy=f"{module}:Poison")
    assert len(only(cell.wait("a", 10), Prefetch)) == 1
    cell.do(ev.Joined("d0", (key("a"),)))
    assert cell.do(ev.Finished((key("a"),)))
    cell.do(decode_report())
    assert "poison" in cell.core.alarm(cell.now_s)
    assert cell.core.alarm(cell.now_s + ALARM_S + 1.0) == ""


def test_faults_in_all_ranges_count_together_and_stay_when_a_range_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    module, asked = Path(__file__).stem, []
    monkeypatch.setitem(globals(), "Poison", broken("matches", lambda *_: fail(asked.append(1))))
    monkeypatch.setattr("importlib.import_module", lambda name: __import__("sys").modules[__name__])
    cell = CoreCell(policy=f"{module}:Poison", sharing="quantiles", decodes=3)
    ranges = list(cell.core._state.sharing.policies())[1:]  # the first is of the common share
    assert len(ranges) == 3
    for _ in range(MOST_FAULTS):
        for policy in ranges:
            assert not policy.matches(10, 1, 20)
    assert len(asked) == MOST_FAULTS
    assert cell.core.alarm(cell.now_s).startswith(f"policy {module}:Poison: {MOST_FAULTS} faults")
    for number in range(3):
        cell.do(ev.InstanceLost("decode", f"d{number}"))
    cell.do(ev.InstanceJoined("decode", "d3"))
    cell.do(decode_report("d3"), after_s=ALARM_S + 1.0)
    assert len(list(cell.core._state.sharing.policies())) == 1
    assert "no longer called" in cell.core.alarm(cell.now_s)


def test_the_simulator_ends_with_what_was_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "poisoned.py").write_text(
        "from alignedserve.scheduler.policies.fcfs import FcfsPolicy\n"
        "class Poison(FcfsPolicy):\n"
        "    def form(self, limits, seed, now_s):\n"
        "        return []\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["simulate", "--trace", "mix:requests=20,short=1", "--policy", "poisoned:Poison"]) != 0
    assert "policy 'poisoned:Poison', form: it is empty although requests are waiting" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["class Broken(:", "1 / 0", "raise RuntimeError"])
def test_a_file_that_cannot_be_imported_is_named(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "does_not_import.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"policy 'does_not_import:X': does_not_import:X cannot be imported: \w+Error"
    ):
        resolve("does_not_import:X")


@pytest.mark.parametrize("rank", [math.nan, (1, math.nan)])
def test_a_rank_without_a_place_is_a_fault_that_names_it(rank: object) -> None:
    policy = GuardedPolicy(SchedulerConfig(), "mine", ranked(lambda _: rank))
    policy.strict = True
    with pytest.raises(ConfigError, match=rf"'mine', insert or remove: .*{re.escape(repr(rank))}: NaN has no place"):
        policy.insert(STRANGER)


def test_a_rank_that_changes_is_a_fault_that_names_it() -> None:
    ranks = iter((1, 2))
    policy = GuardedPolicy(SchedulerConfig(), "mine", ranked(lambda _: next(ranks)))
    policy.strict = True
    policy.insert(STRANGER)
    with pytest.raises(ConfigError, match=r"rank\(\) of .*stranger.* is now 2, not what it was"):
        policy.remove(STRANGER.key)


def ranked(rank: Callable[[Entry], object]) -> type[QueuePolicy]:
    class Ranked(QueuePolicy):
        def rank(self, entry: Entry) -> object:
            return rank(entry)

    return Ranked


def test_a_policy_that_cannot_be_made_says_so() -> None:
    with pytest.raises(ConfigError, match=r"policy 'mine' cannot be created: RuntimeError: poison"):
        GuardedPolicy(SchedulerConfig(), "mine", broken("__init__", fail))
