"""The thread of a worker that computes: messages in between two steps, and never a wait for another process."""

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
    """A thread that alone holds its books. Other threads leave it messages: calls, which it makes with arguments `P`.

    It calls `turn` again and again, which takes the messages and computes a step. After a turn that ran nothing it
    sleeps until a message comes. An exception ends it: the books may be wrong then, and the process must be replaced.
    """

    def __init__(self, name: str) -> None:
        self.meter = StepMeter()
        self._inbox: queue.SimpleQueue[Callable[P, object] | None] = queue.SimpleQueue()  # None: stop
        self._stopped = False  # set in the thread, when it has taken the None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # ---- called from any thread

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """What was left before is still handled. Returns when the thread has ended, or after ENDS_WITHIN_S."""
        self._inbox.put(None)
        self._thread.join(timeout=ENDS_WITHIN_S)

    @property
    def busy(self) -> bool:
        return not self.meter.waiting or not self._inbox.empty()

    def tell(self, message: Callable[P, object]) -> None:
        self._inbox.put(message)

    def _ask(self, question: Callable[[], Result]) -> Future[Result]:
        """What `question` finds in this thread's books, between two steps."""
        answer: Future[Result] = Future()

        def message(*_: P.args, **__: P.kwargs) -> None:
            if answer.set_running_or_notify_cancel():
                answer.set_result(question())

        self._inbox.put(message)
        return answer

    # ---- the thread

    @abstractmethod
    def turn(self) -> bool:
        """`_take_messages`, then a step where there is work; whether anything ran."""

    @abstractmethod
    def _woken(self, message: Callable[P, object]) -> None:
        """Handle the message that ended the sleep."""

    @abstractmethod
    def _on_fatal(self, error: BaseException) -> None:
        """The thread ends with this."""

    def _sleep_limit_s(self) -> float | None:
        """How long to sleep at most; None: until a message comes."""
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
        """Handle what has come in."""
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
