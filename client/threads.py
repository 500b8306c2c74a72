"""A batch of the blocking client: each open call has a thread, and the caller's thread has everything else."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import grpc

from alignedserve.client.batch import Batch, Outcome, checked_items
from alignedserve.client.calls import Call
from alignedserve.client.types import Completion
from alignedserve.errors import AlignedServeError


class Halt:
    """Lets one thread cut short the calls of others: `run` then raises CancelledError; `cut` ends their pauses."""

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
        """Cut short what is open, and what begins from now on."""
        self.cut.set()
        with self._lock:
            responses = list(self._open)
        for response in responses:
            response.cancel()


def run_batch(
    batch: Batch[Any], items: Iterable[Any], ask: Callable[[Call[Completion]], Completion], halt: Halt, concurrency: int
) -> list[Outcome]:
    """The results of the batch. `ask` runs in threads; `items` and the user's own functions in this one."""
    ended: SimpleQueue[tuple[int, Completion | BaseException]] = SimpleQueue()

    def work(number: int, call: Call[Completion]) -> None:
        outcome: Completion | BaseException
        try:
            outcome = ask(call)
        except BaseException as error:
            outcome = error
        ended.put((number, outcome))

    with contextlib.closing(batch), ThreadPoolExecutor(concurrency, "alignedserve-client") as pool:
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
                            pool.submit(work, *added)
                if not batch.open:
                    return batch.results()
                number, outcome = ended.get()
                if not isinstance(outcome, Completion | AlignedServeError):
                    raise outcome
                batch.end(number, outcome)
        except BaseException:
            halt.all()  # the pool waits for its threads
            raise
