"""The compute thread of a worker. It handles messages between steps, and never waits for another process."""

from __future__ import annotations

import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, ParamSpec, TypeVar

from alignedserve.control.steps import StepMeter

logger = logging.getLogger(__name__)

P = ParamSpec("P")
Result = TypeVar("Result")

ENDS_WITHIN_S = 10.0


class ComputeThread(ABC, Generic[P]):
    """A thread that owns its state. Other threads send it messages: functions, which it calls with arguments `P`.

    It calls `turn` repeatedly, which handles messages and computes a step. After a turn with no work it sleeps until a
    message arrives. An exception ends the thread: its state may then be inconsistent, and the process must be replaced.
    """

    def __init__(self, name: str) -> None:
        self.meter = StepMeter()
        self._inbox: queue.SimpleQueue[Callable[P, object] | None] = queue.SimpleQueue()  # None: stop
        self._stopped = False  # set in the thread when it takes None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # ---- called from any thread

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after all earlier messages, and waits for its end for at most ENDS_WITHIN_S."""
        self._inbox.put(None)
        self._thread.join(timeout=ENDS_WITHIN_S)

    @property
    def busy(self) -> bool:
        """Whether the thread is working or has messages."""
        return not self.meter.waiting or not self._inbox.empty()

    def tell(self, message: Callable[P, object]) -> None:
        """Sends a message: the thread calls it between two steps."""
        self._inbox.put(message)

    def _ask(self, question: Callable[[], Result]) -> Future[Result]:
        """The result of `question`, which the thread calls between two steps, when its state is consistent."""
        answer: Future[Result] = Future()

        def message(*_: P.args, **__: P.kwargs) -> None:
            if answer.set_running_or_notify_cancel():
                answer.set_result(question())

        self._inbox.put(message)
        return answer

    # ---- the thread

    @abstractmethod
    def turn(self) -> bool:
        """Calls `_take_messages`, then computes a step if there is work. Returns whether a step ran."""

    @abstractmethod
    def _woken(self, message: Callable[P, object]) -> None:
        """Handles the message that ended the sleep."""

    @abstractmethod
    def _on_fatal(self, error: BaseException) -> None:
        """Called when the thread ends with this error."""

    def _sleep_limit_s(self) -> float | None:
        """The longest sleep in seconds; None: until a message arrives."""
        return None

    def _run(self) -> None:
        self.meter.waiting = False
        try:
            while not self._stopped:
                if not self.turn() and not self._stopped:
                    self._sleep()
        except BaseException as error:
            logger.exception("the %s thread failed", self._thread.name)
            self._on_fatal(error)

    def _take_messages(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Handles all messages that have arrived."""
        while not self._stopped:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            if message is None:
                self._stopped = True
            else:
                message(*args, **kwargs)
            self.meter.count += 1

    def _sleep(self) -> None:
        try:
            with self.meter.idle():
                message = self._inbox.get(timeout=self._sleep_limit_s())
        except queue.Empty:
            return
        if message is None:
            self._stopped = True
        else:
            self._woken(message)
