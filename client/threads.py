"""A batch of the blocking client: each open call runs in a thread, everything else in the caller's thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any

import grpc

from alignedserve.client.batch import Batch, Outcome, checked_items
from alignedserve.client.calls import Call
from alignedserve.client.types import Completion
from alignedserve.errors import AlignedServeError


class Halt:
    """Lets one thread end the calls of others: `run` then raises CancelledError, and `cut` ends waits."""

    def __init__(self, cut: threading.Event) -> None:
        self.cut = cut
        self._open: set[Any] = set()
        self._lock = threading.Lock()

    def run(self, method: Any, call: Call[Any]) -> Any:
        """Send the call and wait for its response. Raises grpc.RpcError."""
        response = method.future(call.message, timeout=call.timeout_s, metadata=call.metadata)
        with self._lock:
            self._open.add(response)
        try:
            if self.cut.is_set():
                response.cancel()
            return response.result()
        except grpc.FutureCancelledError:
            raise call.closed_here(call.message.request_id) from None
        finally:
            with self._lock:
                self._open.discard(response)

    def all(self) -> None:
        """End all open calls, and every call that begins later."""
        self.cut.set()
        with self._lock:
            responses = list(self._open)
        for response in responses:
            response.cancel()


class _Workers:
    """A thread for each open call. They are daemon threads, because a ThreadPoolExecutor would delay a program's exit.

    `ended` receives the number of each call and its result or exception.
    """

    def __init__(self, ask: Callable[[Call[Completion]], Completion]) -> None:
        self.ended: SimpleQueue[tuple[int, Completion | BaseException]] = SimpleQueue()
        self._ask = ask
        self._calls: SimpleQueue[tuple[int, Call[Completion]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def begin(self, number: int, call: Call[Completion], open_calls: int) -> None:
        """Run a call. `open_calls` is the number of open calls, including this one."""
        if open_calls > len(self._threads):
            thread = threading.Thread(target=self._work, name="alignedserve-client", daemon=True)
            thread.start()
            self._threads.append(thread)
        self._calls.put((number, call))

    def _work(self) -> None:
        while (numbered := self._calls.get()) is not None:
            number, call = numbered
            outcome: Completion | BaseException
            try:
                outcome = self._ask(call)
            except BaseException as error:
                outcome = error
            self.ended.put((number, outcome))

    def close(self) -> None:
        """Wait until all open calls have ended."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()


def run_batch(
    batch: Batch[Any], items: Iterable[Any], ask: Callable[[Call[Completion]], Completion], halt: Halt
) -> list[Outcome]:
    """The results of the batch. `ask` runs in threads; `items` and the user's functions run in this thread."""
    with contextlib.closing(batch), contextlib.closing(_Workers(ask)) as workers:
        try:
            taking = checked_items(items)
            more = True
            while True:
                while more and batch.wants_more:
                    try:
                        added = batch.add(next(taking))
                    except StopIteration:
                        more = False
                    else:
                        if added is not None:
                            workers.begin(*added, batch.open)
                if not batch.open:
                    return batch.results()
                number, outcome = workers.ended.get()
                if not isinstance(outcome, Completion | AlignedServeError):
                    raise outcome
                batch.end(number, outcome)
        except BaseException:
            halt.all()  # then wait for the workers
            raise
