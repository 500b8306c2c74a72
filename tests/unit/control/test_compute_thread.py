"""The thread under both worker loops: its messages, its sleep, its end, and errors in it."""

from __future__ import annotations

import threading

import pytest

from alignedserve.control.compute_thread import ComputeThread

SOON_S = 10.0


class Counting(ComputeThread[[list[str]]]):
    """Computes `steps` steps in all; its messages note themselves in a list."""

    def __init__(self, steps: int = 0, sleep_limit_s: float | None = None) -> None:
        super().__init__("counting")
        self.noted: list[str] = []
        self.woken: list[str] = []
        self.turns = 0
        self.error: BaseException | None = None
        self.failed = threading.Event()
        self._steps = steps
        self._limit_s = sleep_limit_s

    def turn(self) -> bool:
        self.turns += 1
        self._take_messages(self.noted)
        if self._stopped or not self._steps:
            return False
        self._steps -= 1
        with self.meter.step(1.0):
            return True

    def _woken(self, message: object) -> None:
        assert callable(message)
        message(self.woken)

    def _on_fatal(self, error: BaseException) -> None:
        self.error = error
        self.failed.set()

    def _sleep_limit_s(self) -> float | None:
        return self._limit_s


def test_what_was_left_before_the_stop_is_handled_in_its_order() -> None:
    thread = Counting(steps=3)
    for name in ("a", "b"):
        thread.tell(lambda noted, name=name: noted.append(name))
    assert thread.busy
    thread.start()
    thread.stop()
    assert thread.noted == ["a", "b"]
    assert not thread._thread.is_alive()
    assert thread.error is None


def test_a_message_ends_its_sleep_and_the_asked_answer_between_steps() -> None:
    thread = Counting(steps=2)
    thread.start()
    turns = thread._ask(lambda: thread.turns).result(SOON_S)
    assert turns >= 1
    while not thread.meter.waiting:
        threading.Event().wait(0.001)
    thread.tell(lambda woken: woken.append("up"))
    thread.stop()
    assert [*thread.woken, *thread.noted] == ["up"]


def test_it_sleeps_no_longer_than_its_limit() -> None:
    thread = Counting(sleep_limit_s=0.01)
    thread.start()
    done = threading.Event()
    for _ in range(1000):
        if thread.turns > 3:
            break
        done.wait(0.01)
    thread.stop()
    assert thread.turns > 3


@pytest.mark.parametrize("asleep", [False, True])
def test_an_error_ends_it_and_is_told(asleep: bool) -> None:
    def wrong(_: list[str]) -> None:
        raise ValueError("the books are wrong")

    thread = Counting()
    if not asleep:
        thread.tell(wrong)
    thread.start()
    if asleep:
        while not thread.meter.waiting:
            threading.Event().wait(0.001)
        thread.tell(wrong)
    assert thread.failed.wait(SOON_S)
    assert str(thread.error) == "the books are wrong"
    thread.stop()
